"""An engine is a large program that reads what strangers send: whatever it becomes, its launcher goes on, and so do the
other engines of the GPU."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.appliance.launcher.world import World

NewWorld = Callable[..., World]
HUGE = 10**4300 - 1

ANSWERS: dict[str, dict[str, Any]] = {
    "half a surrogate": {"status": "\ud800"},
    "a NUL": {"status": "a\0b"},
    "control characters": {"status": "\x1b]0;owned\x07\n<0>kernel: panic"},
    "a megabyte": {"status": "x" * 900_000},
    "no text": {"status": [[["x"]]]},
    "endless digits": {"requests": {"running": HUGE, "waiting": HUGE, "in_flight_http": HUGE}},
    "a ratio over all floats": {"status": "loading", "loading": {"done_bytes": HUGE, "total_bytes": 1}},
    "another device": {"engine": {"backend": "\ud800\0"}, "device": {"backend": "\n", "uuid": "\ud800"}},
}


@pytest.mark.parametrize("first", ["while it loads", "when it is ready"])
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=list(ANSWERS))
def test_nothing_it_says_ends_the_launcher(new_world: NewWorld, answer: dict[str, Any], first: str) -> None:
    world = new_world(stall_timeout=0.3)
    world.add_release("good")
    behave = world.add_release("bad", **(answer if first == "while it loads" else {}))
    world.use("good")
    world.use("bad", "canary")
    world.start()
    good = world.reach("good", "ready")
    world.until(lambda: (behave / "starts").exists())
    if first == "when it is ready":
        world.reach("bad", "ready")
        world.says("bad", **answer)
    said = []
    for _ in range(8):
        world.run(0.1)
        said += world.notified()
    assert world.engine("good")["pid"] == good["pid"] and world.engine("good")["admitted"]
    assert any("STATUS" in message for message in said)
    for text in (world.state()["status"], *(message.get("STATUS", "") for message in said)):
        assert text.isprintable() and len(text) < 5000
    assert all(line.isprintable() for line in world.paths.events.read_text().splitlines())


def _directory(socket: Path) -> None:
    socket.unlink()
    (socket / "below").mkdir(parents=True)


def _file(socket: Path) -> None:
    socket.unlink()
    socket.write_text("x")


def _link(socket: Path) -> None:
    socket.unlink()
    socket.symlink_to("/etc/passwd")


def _closed(socket: Path) -> None:
    socket.parent.chmod(0o1000)  # sticky too


@pytest.mark.parametrize("spoil", [_directory, _file, _link, _closed])
def test_whatever_it_leaves_in_the_place_of_its_socket(world: World, spoil: Callable[[Path], None]) -> None:
    world.add_release("r1")
    world.use("r1")
    world.start()
    first = world.reach("r1", "ready")
    spoil(Path(first["socket"]))
    os.kill(first["pid"], signal.SIGKILL)
    world.until(lambda: world.engine("r1").get("admitted") and world.engine("r1")["pid"] != first["pid"])
    assert Path(first["socket"]).is_socket()
    assert Path(first["socket"]).parent.stat().st_mode & 0o7777 == 0o750
    assert Path("/etc/passwd").is_file()


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
def test_also_with_the_capabilities_of_the_unit(tmp_path: Path) -> None:
    """Without CAP_FOWNER (appliance-gpu@.service) root cannot unlink what others own in a sticky directory."""
    tmp_path.chmod(0o755)
    directory = tmp_path / "engines"
    directory.mkdir()
    (directory / "r1.sock").mkdir()
    for path in (directory / "r1.sock", directory):
        os.chown(path, 64700, 64700)
    directory.chmod(0o1000)
    code = "import sys; from pathlib import Path; from appliance.launcher.spawn import prepare_socket; "
    code += f"prepare_socket(Path({str(directory / 'r1.sock')!r}), 64700, 64700)"
    capabilities = "-all,+setuid,+setgid,+setpcap,+kill,+chown,+dac_override"
    command = ["setpriv", f"--bounding-set={capabilities}", "--inh-caps=-all", sys.executable, "-c", code]
    subprocess.run(command, check=True, timeout=60)
    found = directory.stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o7777) == (64700, 64700, 0o750)
    assert not (directory / "r1.sock").exists()


# -- ends at the worst moment


def test_a_child_that_dies_as_its_scope_becomes_ready(world: World) -> None:
    """Reaped only after the answer of systemd is handled: neither the end of the launcher nor a failure for good."""
    world.add_release("r1")
    world.use("r1")
    real, died = world.scopes.start, []

    def start(plan: Any, pid: int, done: Callable[[dict[str, Any]], None]) -> None:
        def die_then_answer() -> None:
            died.append(pid)
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            done({"ok": True, "unit": {}})

        if died:
            real(plan, pid, done)
        else:
            world.loop.later(0.05, die_then_answer)

    world.scopes.start = start  # type: ignore[method-assign]
    world.start()
    entry = world.reach("r1", "ready")
    assert entry["restarts"] == 1 and "SIGKILL" in entry["last_exit"]


@pytest.mark.parametrize("answer", [{"ok": False, "error": "no such process"}, {"ok": True, "unit": {}}])
def test_an_answer_of_systemd_is_never_taken_for_that_of_a_later_start(world: World, answer: dict[str, Any]) -> None:
    """Two calls for one name at a time could also kill each other's scope."""
    world.add_release("r1")
    world.use("r1")
    asked: list[tuple[int, Callable[[dict[str, Any]], None]]] = []
    world.scopes.start = lambda plan, pid, done: asked.append((pid, done))  # type: ignore[method-assign]
    world.start()
    world.until(lambda: len(asked) == 1)
    world.ask("restart", release="r1")
    world.run(0.3)
    assert len(asked) == 1  # the first is not answered yet
    asked[0][1](answer)
    world.until(lambda: len(asked) == 2)
    world.run(0.1)
    assert world.engine("r1")["state"] == "starting" and world.engine("r1")["pid"] == asked[1][0]
    asked[1][1]({"ok": True, "unit": {}})
    entry = world.reach("r1", "ready")
    assert entry["restarts"] == 0 and len(world.starts("r1")) == 1
    assert "backoff" not in world.history("r1")


@pytest.mark.timeout(600)
def test_nothing_is_kept_over_many_restarts(world: World) -> None:
    world.add_release("r1")
    world.use("r1")
    world.start()
    world.reach("r1", "ready")

    def restart() -> None:
        before = world.engine("r1")["pid"]
        assert world.answer("restart", release="r1", wait=True) == {"ok": True}
        assert world.engine("r1")["pid"] != before

    restart()
    first = len(os.listdir("/proc/self/fd"))
    for _ in range(300 if os.environ.get("APPLIANCE_FULL") == "1" else 8):
        restart()
    assert len(os.listdir("/proc/self/fd")) == first
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    assert children.count(str(world.engine("r1")["pid"])) == 1
    assert len(world.loop._timers) < 200
