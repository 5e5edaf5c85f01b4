"""State files: whole after a kill at any step, strict when read."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance import statefile
from appliance.log import BusyError
from appliance.statefile import StateError, read_state, remove_state, state_lock, write_state

CALLS = ("scandir", "open", "fchmod", "write", "fsync", "close", "replace", "unlink")
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def killed_at(step: int, path: Path, state: dict[str, Any], *, after: bool) -> bool:
    """Writes `state` in a child that is killed at its step-th system call (before or after it; a write is cut in half
    first). False if the child got to its end."""
    child = os.fork()
    if child == 0:
        left = step

        def killing(name: str) -> Any:
            real = getattr(os, name)

            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal left
                left -= 1
                if left >= 0:
                    return real(*args, **kwargs)
                if name == "write" and not after:
                    real(args[0], bytes(args[1])[: len(args[1]) // 2])
                elif after:
                    real(*args, **kwargs)
                os.kill(os.getpid(), signal.SIGKILL)

            return call

        for name in CALLS:
            setattr(statefile.os, name, killing(name))
        try:
            write_state(path, state, schema=1)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("there", [False, True])
def test_a_kill_at_any_step_leaves_the_old_or_the_new_state(tmp_path: Path, there: bool, after: bool) -> None:
    old, new = ({"n": 1} if there else None), {"n": 2, "text": "x" * 5000}
    outcomes, step = set(), 0
    while True:
        path = tmp_path / str(step) / "gpus.json"
        path.parent.mkdir()
        if old:
            write_state(path, old, schema=1)
        killed = killed_at(step, path, new, after=after)
        found = read_state(path, schema=1)
        assert found in (old, new), step
        outcomes.add(str(found == new))
        write_state(path, {"n": 3}, schema=1)
        assert read_state(path, schema=1) == {"n": 3}
        assert os.listdir(path.parent) == ["gpus.json"]  # what the killed one left behind is gone
        if not killed:
            break
        step += 1
    assert step >= 8 and outcomes == {"True", "False"}  # steps on both sides of the commit point were hit


def test_a_failed_write_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_state(path, {"n": 1}, schema=1)
    for name in ("write", "fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(statefile.os, name, lambda *args: (_ for _ in ()).throw(OSError(28, "No space left")))
            with pytest.raises(OSError, match="No space left"):
                write_state(path, {"n": 2}, schema=1)
        assert read_state(path, schema=1) == {"n": 1} and os.listdir(tmp_path) == ["a.json"]


def test_a_living_writer_keeps_its_temporary_file(tmp_path: Path) -> None:
    """The sweep is for the dead: another process may be in the middle of its write."""
    other = tmp_path / f".a.json.{os.getppid()}.1.tmp"
    other.touch()
    write_state(tmp_path / "a.json", {}, schema=1)
    assert other.exists()


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text().filter(lambda key: key != "schema"), json_values))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "round.json"
    write_state(path, state, schema=7, durable=False)
    assert read_state(path, schema=7) == state
    assert json.loads(path.read_bytes())["schema"] == 7


def test_text_that_is_no_text_survives(tmp_path: Path) -> None:
    """argv with invalid UTF-8 has lone surrogates, as in `appliance drain 0 --reason $'\\xff'`."""
    reason = os.fsdecode(b"\xff fan")
    write_state(tmp_path / "a.json", {"reason": reason}, schema=1)
    assert read_state(tmp_path / "a.json", schema=1) == {"reason": reason}


def test_nobody_can_write_another_schema(tmp_path: Path) -> None:
    write_state(tmp_path / "a.json", {"schema": 99, "n": 1}, schema=1)
    assert read_state(tmp_path / "a.json", schema=1) == {"n": 1}


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_a_state_or_a_state_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.json"
    path.write_bytes(data)
    try:
        found = read_state(path, schema=1)
    except StateError as error:
        assert str(path) in error.message and error.hint
    else:
        assert isinstance(found, dict)


@pytest.mark.parametrize(
    "data, words",
    [
        (b"", "not JSON"),
        (b'{"schema": 1', "not JSON"),
        (b'{"schema": 1, "since": NaN}', "NaN is no JSON"),
        (b"[1]", "no JSON object"),
        (b"{}", "schema None"),
        (b'{"schema": 2}', "schema 2, this version reads 1"),
        (b'{"schema": true}', "schema True"),
        (b'{"schema": 1.0}', "schema 1.0"),
        (b"[" * 100_000, "not JSON"),
        ('{"schema": 1}'.encode("utf-16"), "not JSON"),
        (b" " * (statefile.MAX_BYTES + 1), "larger than"),
    ],
)
def test_what_is_not_ours_is_named(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(data)
    with pytest.raises(StateError, match=words):
        read_state(path, schema=1)
    assert path.read_bytes() == data  # never overwritten


@pytest.mark.timeout(10)
def test_special_files_never_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "dir").mkdir()
    for name in ("fifo", "dir"):
        with pytest.raises(StateError, match="no regular file"):
            read_state(tmp_path / name, schema=1)
    assert read_state(tmp_path / "missing", schema=1) is None


def test_remove_says_whether_there_was_one(tmp_path: Path) -> None:
    write_state(tmp_path / "a.json", {}, schema=1)
    assert remove_state(tmp_path / "a.json") and not remove_state(tmp_path / "a.json")


def test_the_lock_excludes_and_gives_up(tmp_path: Path) -> None:
    path, counted = tmp_path / "n.json", 8
    write_state(path, {"n": 0}, schema=1)

    def count() -> None:
        for _ in range(counted):
            with state_lock(path, wait_seconds=20):
                state = read_state(path, schema=1) or {}
                write_state(path, {"n": state["n"] + 1}, schema=1, durable=False)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_state(path, schema=1) == {"n": 4 * counted}
    with state_lock(path), pytest.raises(BusyError), state_lock(path, wait_seconds=0.05):
        pass
    with pytest.raises(StateError, match="is not there"), state_lock(tmp_path / "no" / "n.json"):
        pass


HINTS = {  # what an operator must not be told to throw away, and what brings it back
    "gpus.json": ("keep a copy", "healthcheck history", "appliance gpus bind", "appliance-watchdog"),
    "releases/v1/release.json": ("appliance release remove v1", "appliance release add v1"),
    "releases/holds/release.json": ("appliance release remove holds",),
    "releases/v1/manifest.json": ("appliance release remove v1",),
    "releases/v1/golden/cpu.json": ("--golden auto",),
    "canary.json": ("keep a copy", "canary status", "canary cleanup", "appliance-canary"),
    "canary-runs/r1.json": ("a run that is over",),
    "leases.json": ("appliance status",),
    "holds/gpu0.json": ("keep a copy", "healthcheck history", "appliance drain"),
    "drain.json": ("appliance undrain --all",),
    "resets/GPU-1.json": ("services",),
    "watchdog.json": ("no decisions", "appliance-watchdog"),
    "other.json": ("keep a copy",),
}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": 99}', None], ids=str)
@pytest.mark.parametrize("name", HINTS)
def test_the_hint_of_a_damaged_file_is_that_of_its_kind(tmp_path: Path, name: str, content: str | None) -> None:
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    if content is None:
        file.mkdir()
    else:
        file.write_text(content)
    with pytest.raises(StateError) as caught:
        read_state(file, schema=1)
    hint = str(caught.value.hint)
    assert all(words in hint for words in HINTS[name]), hint
    assert "begin afresh" not in hint
