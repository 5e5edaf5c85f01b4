"""The event log: no line is mixed, torn lines are skipped, rotation loses nothing but the oldest file."""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance import events
from appliance.events import append_event, last_events, read_events

FULL = os.environ.get("APPLIANCE_FULL") == "1"


def test_events_come_back_in_order_with_time_and_process(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    before = time.time()
    assert append_event(path, "hold", gpu=3, reason="fan\nnoise é", owner=None)
    assert append_event(path, "engine-exit", gpu=3, pid=77, ts=0)
    first, second = read_events(path)
    assert (first["event"], first["gpu"], first["reason"], first["pid"]) == ("hold", 3, "fan\nnoise é", os.getpid())
    assert before - 1 <= first["ts"] <= second["ts"] <= time.time() + 1 and "owner" not in first
    assert second["pid"] == 77
    assert len(path.read_bytes().splitlines()) == 2
    assert [event["event"] for event in last_events(path, 1)] == ["engine-exit"]
    assert list(read_events(tmp_path / "none")) == []


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=1, max_size=60))
def test_a_torn_line_costs_only_itself(tmp_path_factory: pytest.TempPathFactory, torn: bytes) -> None:
    """A power cut may leave any bytes at the end, NULs for example."""
    path = tmp_path_factory.mktemp("torn") / "events.jsonl"
    append_event(path, "before")
    with path.open("ab") as file:
        file.write(b'{"event": "torn", ' + torn)
    append_event(path, "after")
    found = [event.get("event") for event in read_events(path)]
    assert found[0] == "before" and found[-1] == "after"


def test_every_cut_of_a_line_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append_event(path, "one", text="x" * 20)
    line = path.read_bytes()
    for size in range(1, len(line)):
        path.write_bytes(line[:size])
        append_event(path, "two")
        assert [event["event"] for event in read_events(path)] == (["one", "two"] if size >= len(line) - 1 else ["two"])


def _write(path: Path, writer: int, count: int, limit: int) -> None:
    events.MAX_BYTES = limit
    for number in range(count):
        assert append_event(path, "e", writer=writer, number=number, text="x" * (number * 37 % 300))


@pytest.mark.parametrize("limit", [6_000, 60_000, 1 << 30])
def test_concurrent_writers_lose_nothing_but_what_was_rotated_away(tmp_path: Path, limit: int) -> None:
    path, writers, count = tmp_path / "events.jsonl", 4, 2000 if FULL else 150
    with multiprocessing.get_context("fork").Pool(writers) as pool:
        pool.starmap(_write, [(path, writer, count, limit) for writer in range(writers)])
    for file in tmp_path.iterdir():
        for line in file.read_bytes().splitlines():
            assert json.loads(line)["event"] == "e"  # whole, and nobody else's bytes in it
    assert max(file.stat().st_size for file in tmp_path.iterdir()) <= limit + 500
    found = list(read_events(path))
    seen = {writer: [e["number"] for e in found if e["writer"] == writer] for writer in range(writers)}
    for numbers in seen.values():
        # What is left of each writer is a tail without a gap: nothing was lost but the oldest file.
        assert numbers == list(range(count - len(numbers), count))
    assert len(found) == writers * count or limit < 1 << 30


def test_a_rotation_between_open_and_lock_does_not_lose_the_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real, rotations = tmp_path / "events.jsonl", events.fcntl.flock, []
    append_event(path, "zero")

    def rotating(fd: int, how: int) -> None:
        if not rotations:
            rotations.append(1)
            for _ in range(2):  # after the second what we have open has no name any more
                path.touch()
                os.replace(path, path.with_name("events.jsonl.1"))
        real(fd, how)

    monkeypatch.setattr(events.fcntl, "flock", rotating)
    assert append_event(path, "one")
    assert [event["event"] for event in read_events(path)][-1] == "one"


@pytest.mark.timeout(20)
def test_a_stopped_writer_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_LOCK_SECONDS", 0.2)
    path = tmp_path / "events.jsonl"
    lock = str(path.with_name(".events.jsonl.lock"))
    code = f"import fcntl, time; f = open({lock!r}, 'a'); fcntl.flock(f, 2); print(1, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline()
        holder.send_signal(signal.SIGSTOP)
        assert append_event(path, "goes on")
        holder.kill()
    assert [event["event"] for event in read_events(path)] == ["goes on"]


def test_who_may_only_read_cannot_hold_up_the_writers(tmp_path: Path) -> None:
    """flock(2) takes any descriptor, so a lock that strangers respect must be on a file that they cannot open."""
    path = tmp_path / "events.jsonl"
    append_event(path, "zero")
    readable = [file for file in tmp_path.iterdir() if file.stat().st_mode & 0o044]
    assert path in readable
    with contextlib.ExitStack() as stack:
        for file in readable:
            fcntl.flock(stack.enter_context(file.open()), fcntl.LOCK_EX)
        began = time.monotonic()
        for number in range(5):
            append_event(path, "more", number=number)
        assert time.monotonic() - began < events._LOCK_SECONDS  # nobody was waited for
    assert len(list(read_events(path))) == 6


def test_what_cannot_be_written_goes_to_the_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert not append_event(Path("/dev/full"), "hold", gpu=1)
    finally:
        Path("/dev/.full.lock").unlink(missing_ok=True)
    error = capsys.readouterr().err
    assert "No space left" in error and '"event": "hold"' in error and '"gpu": 1' in error
    assert not append_event(tmp_path / "no" / "events.jsonl", "hold")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    assert not append_event(tmp_path / "link", "hold")  # never through a link that somebody planted
    assert not (tmp_path / "target").exists()


def test_a_full_disk_in_mid_line_is_noticed(tmp_path: Path) -> None:
    """RLIMIT_FSIZE cuts a write short as a full disk does."""
    path = tmp_path / "events.jsonl"
    append_event(path, "one")
    size = path.stat().st_size
    code = f"""
import pathlib, resource, sys
from appliance.events import append_event
resource.setrlimit(resource.RLIMIT_FSIZE, ({size + 10}, {size + 10}))
sys.exit(append_event(pathlib.Path({str(path)!r}), "two"))
"""
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert done.returncode == 0 and "event not in" in done.stderr and '"event": "two"' in done.stderr
    assert path.stat().st_size == size + 10
    append_event(path, "three")
    assert [event["event"] for event in read_events(path)] == ["one", "three"]
