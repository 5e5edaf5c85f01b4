"""The reset of one GPU against the stand-in for nvidia-smi: what it does, refuses, puts back, and says."""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from appliance.command import Result
from appliance.events import read_events
from appliance.log import ApplianceError, BusyError, ExitCode
from appliance.statefile import StateError, state_lock
from healthcheck import reset as module
from healthcheck.reset import Intent, exit_code, main, recover, reset
from healthcheck.reset_plan import After, Facts, Limits, judge_after, judge_command
from tests.healthcheck.reset_world import DCGM, STAND_IN, UUID, World, in_a_child

FULL = bool(os.environ.get("APPLIANCE_FULL"))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def all_is_back(world: World) -> bool:
    return world.states()[DCGM] == "active" and world.gpu["persistence"] is True


# -- the way it should go


def test_a_reset(world: World) -> None:
    result = reset(world.host(), UUID)
    assert result["ok"] and exit_code(result) == ExitCode.DONE
    assert world.gpu["resets"] == 1 and world.gpu["recovery_action"] == "None"
    assert all_is_back(world)
    assert set(result["phases"]) == {
        "free", "stop_clients", "persistence_off", "released", "reset", "check", "restore"
    }  # fmt: skip
    assert all(0 <= seconds < 60 for seconds in result["phases"].values())
    assert result["started"] <= result["finished"] <= time.time()
    on_disk = json.loads(world.paths.gpu_reset(UUID).read_text())
    assert on_disk == result and on_disk["schema"] == 1
    assert not world.paths.gpu_reset_intent(UUID).exists()
    names = [event["event"] for event in read_events(world.paths.events)]
    assert names == ["gpu-reset-started", "gpu-reset"]


def test_the_stand_in_refuses_while_persistence_mode_is_on(world: World) -> None:
    """So the test above shows that it was off, and DCGM stopped, at the moment of the reset (NVSentinel #1690)."""
    state = world.smi_now()
    for persistence, client in ((True, False), (False, True)):
        world.change_gpu(persistence=persistence)
        world.client.touch() if client else world.client.unlink()
        result = subprocess.run([world.smi, "--gpu-reset", "-i", UUID], capture_output=True, text=True)
        assert result.returncode == 255 and "GPU 00000000:1B:00.0: In use by another client" in result.stdout
    assert state["gpus"][0].get("resets") is None


def test_what_was_off_stays_off(world: World) -> None:
    world.change_gpu(persistence=False)
    world.set_units({DCGM: "inactive", "nvidia-persistenced.service": "inactive"})
    assert reset(world.host(), UUID)["ok"]
    assert world.states()[DCGM] == "inactive"
    assert world.gpu["persistence"] is False
    assert world.calls("-pm") == 0


def test_a_further_client_is_stopped_and_started(world: World) -> None:
    world.set_units(world.states() | {"datadog-agent.service": "active"})
    seen: list[str] = []
    world.before_call = lambda argv: seen.append(" ".join(argv[:3])) if argv[1] in ("start", "stop") else None
    assert reset(world.host(client_units=(DCGM, "datadog-agent.service")), UUID)["ok"]
    assert seen == [
        f"systemctl {verb} {unit}" for verb in ("stop", "start") for unit in (DCGM, "datadog-agent.service")
    ]


def test_persistence_mode_of_a_gpu_that_answers_no_query(world: World) -> None:
    """Unknown, and the daemon runs: turned off, else the reset would be refused for ever; on again afterwards."""
    world.change_smi(query="fail")
    world.after_call = lambda argv: world.change_smi(query="ok") if "--gpu-reset" in argv else None
    result = reset(world.host(), UUID)
    assert result["ok"], result
    assert world.gpu["persistence"] is True and world.calls("-pm") == 2


def test_an_old_driver_that_knows_no_recovery_action(world: World) -> None:
    world.change_gpu(recovery_action=None)
    result = reset(world.host(), UUID)
    assert result["ok"] and "does not say" in result["detail"]


# -- what fails


@pytest.mark.parametrize(
    ("how", "needs", "text"),
    [
        (3, "human", "cannot be reset alone"),
        (4, "human", "no permission"),
        (9, "human", "driver is not loaded"),
        (14, "human", "infoROM"),
        (15, "reboot", "fallen off the bus"),
        (255, None, "Unknown Error"),
        ("silent", None, "did not say that it reset"),
        ("lies", "human", "still asks for: Reset"),
        ("wrong_gpu", "human", "answers in its place"),
    ],
)
def test_a_reset_that_fails(world: World, how: Any, needs: str | None, text: str) -> None:
    world.change_smi(reset=how)
    result = reset(world.host(), UUID)
    assert not result["ok"] and exit_code(result) == ExitCode.FAILED
    assert (result["needs"], text in result["detail"]) == (needs, True), result
    assert all_is_back(world)


def test_after_a_reset_that_wants_a_reboot(world: World) -> None:
    world.change_smi(action_after="Reboot")
    result = reset(world.host(), UUID)
    assert (result["ok"], result["needs"]) == (False, "reboot")


def test_a_reset_that_hangs(tmp_path: Path) -> None:
    """The whole program, killed with its group; everything is put back nevertheless."""
    world = World(tmp_path, in_process=False)
    world.change_smi(reset="hang")
    result = reset(world.host(limits=Limits(free=0.4, reset=0.5)), UUID)
    assert (result["ok"], result["needs"], exit_code(result)) == (False, "reboot", ExitCode.INCONCLUSIVE)
    assert "did not end in 0.5 s" in result["detail"]
    assert all_is_back(world)


def test_a_service_that_cannot_be_stopped(world: World) -> None:
    real = world.run

    def run(argv: list[str], **options: Any) -> Result:
        if argv[:2] == ["systemctl", "stop"]:
            return Result(tuple(argv), 1, b"", b"Refusing")
        return real(argv, **options)

    result = reset(world.host(run=run), UUID)
    assert not result["ok"] and f"cannot stop {DCGM}" in result["detail"]
    assert world.calls("--gpu-reset") == 0 and all_is_back(world)


def test_what_cannot_be_put_back_is_said_and_tried_again(world: World) -> None:
    """Services are never left stopped in silence."""
    world.after_call = lambda argv: world.set_units({DCGM: "broken"}) if "--gpu-reset" in argv else None
    result = reset(world.host(), UUID)
    assert result["ok"] and exit_code(result) == ExitCode.FAILED
    assert DCGM in result["not_restored"][0]
    assert world.gpu["persistence"] is True
    world.after_call = lambda argv: None
    world.set_units({DCGM: "inactive"})  # somebody mended it
    (again,) = recover(world.host())
    assert again["ok"] and not again["not_restored"] and all_is_back(world)
    assert recover(world.host()) == []


# -- what is refused before anything is touched


def refused(world: World, result: dict[str, Any]) -> str:
    assert not result["ok"] and exit_code(result) == ExitCode.REFUSED
    assert world.calls("--gpu-reset") == world.calls("-pm") == 0 and all_is_back(world)
    return str(result["detail"])


def test_an_engine_could_start_meanwhile(world: World) -> None:
    for level in (None, "drain"):
        world.hold(level)
        assert "neither held nor stopped" in refused(world, reset(world.host(), UUID))
    world.paths.launcher_state(0).unlink()  # `appliance stop 0`: no launcher
    assert reset(world.host(), UUID)["ok"]


def test_the_driver_does_not_show_it(world: World) -> None:
    other = "GPU-00000000-0000-0000-0000-000000000001"
    result = reset(world.host(), other)
    assert result["needs"] == "reboot" and "does not show" in refused(world, result)


def test_mig(world: World) -> None:
    (world.root / "driver/capabilities/gpu0/mig/gi1").mkdir(parents=True)
    assert "MIG" in refused(world, reset(world.host(), UUID))


def test_no_nvidia_smi(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("healthcheck.reset_host._SEARCH", str(world.root / "nothing"))
    assert "not installed" in refused(world, reset(world.host(nvidia_smi=None), UUID))


def test_a_slot_of_the_cpu_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only with a stand-in given by hand, which is how the whole path is tested without a GPU."""
    world = World(tmp_path, uuid="CPU-0")
    assert reset(world.host(), "CPU-0")["ok"] and world.gpu["resets"] == 1
    monkeypatch.setattr("healthcheck.reset_host._SEARCH", str(world.smi.parent))
    result = reset(world.host(nvidia_smi=None), "CPU-0")
    assert "no GPU to reset" in result["detail"] and world.gpu["resets"] == 1


@contextmanager
def holding(path: str) -> Iterator[int]:
    """A process that has `path` open."""
    code = "import sys; file = open(sys.argv[1], 'rb'); print(flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "\n"
        yield child.pid
    finally:
        child.communicate()


def test_a_holder_is_named(world: World) -> None:
    """By the device's number, under whatever name it was opened (a container's node)."""
    with holding("/dev/full") as pid:
        detail = refused(world, reset(world.host(), UUID))
        assert f"(pid {pid}" in detail and "python" in detail
    assert reset(world.host(), UUID)["ok"]


def test_a_holder_that_leaves_in_time(world: World) -> None:
    """Our own NVML takes a moment to close."""
    with holding("/dev/full") as pid:
        slept: list[float] = []

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

        world.paths.gpu_reset(UUID).parent.mkdir(parents=True, exist_ok=True)
        result = module.Reset(world.host(limits=Limits(free=30)), UUID, sleep=sleep).start()
    assert result["ok"] and slept


def test_a_mapping_is_a_holder_too(world: World) -> None:
    with open("/dev/zero", "r+b") as file:
        mapping = mmap.mmap(file.fileno(), mmap.PAGESIZE)
    assert world.host()._has_mapped(os.getpid(), "/dev/zero")
    mapping.close()
    assert not world.host()._has_mapped(os.getpid(), "/dev/zero")


def test_an_engine_that_still_runs(world: World) -> None:
    scope = world.root / "cgroup/appliance.slice/appliance-gpu0.slice/appliance-gpu0-v1.scope"
    scope.mkdir(parents=True)
    (world.root / "cgroup/cgroup.procs").write_text("")
    (scope / "cgroup.procs").write_text("4711\n")
    assert "engine appliance-gpu0-v1.scope" in refused(world, reset(world.host(), UUID))
    (scope / "cgroup.procs").write_text("")
    assert reset(world.host(), UUID)["ok"]


def test_nvidia_drm_is_named() -> None:
    """Words of NVSentinel #1690 and of a driver of 2020 (gpu-operator #118)."""
    facts = Facts(UUID, None, "nvidia-smi", False, 0, True, drm=True)
    for text in (
        b"The following GPUs could not be reset:\n  GPU 00000000:1A:00.0: In use by another client\n",
        b"GPU 00000000:C1:00.0 is currently in use by another process.\n",
    ):
        verdict = judge_command(Result(("nvidia-smi",), 255, text, b""), facts, 60)
        assert verdict is not None and verdict.needs == "human" and "nvidia_drm" in verdict.detail


def test_exit_status_0_with_a_refusal_is_no_reset() -> None:
    """mig-parted #9: "silently failing and returning a successful error code"."""
    text = b"The following GPUs could not be reset:\n  GPU 00000000:1A:00.0: In use by another client\n"
    verdict = judge_command(Result(("nvidia-smi",), 0, text, b""), Facts(UUID, None, "x", False, 0, True), 60)
    assert verdict is not None and not verdict.ok


@pytest.mark.parametrize("action", ["Reset", "Reboot", "Drain P2P", "Drain and Reset", "Bus Reset", "something new"])
def test_any_further_action_is_no_success(action: str) -> None:
    """Texts of nvidia-smi(1), "GPU Recovery Action"; one that we do not know is for a human."""
    verdict = judge_after(UUID, After(UUID, action))
    assert not verdict.ok and verdict.needs == ("reboot" if action == "Reboot" else "human")


# -- killed anywhere


class Killer:
    """Ends the process before or after the n-th command or change of a state file."""

    def __init__(self, world: World, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at, self.points = at, 0
        world.before_call = world.after_call = lambda argv: self.point()
        for name in ("write_state", "remove_state"):
            monkeypatch.setattr(module, name, self._around(getattr(module, name)))

    def point(self) -> None:
        self.points += 1
        if self.points == self.at:
            os._exit(137)

    def _around(self, work: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.point()
            result = work(*args, **options)
            self.point()
            return result

        return call


def count_points(tmp_path: Path, work: Any) -> int:
    world = World(tmp_path / "count")
    with pytest.MonkeyPatch.context() as patch:
        killer = Killer(world, -1, patch)
        work(world)
        return killer.points


def killed_at(world: World, at: int, work: Any) -> int:
    def child() -> None:
        with pytest.MonkeyPatch.context() as patch:
            Killer(world, at, patch)
            work(world)

    return in_a_child(child)


def check_recovered(world: World, at: Any) -> None:
    was_begun = world.paths.gpu_reset_intent(UUID).exists()
    results = recover(world.host())
    assert all_is_back(world), at
    assert not world.paths.gpu_reset_intent(UUID).exists()
    assert [result["uuid"] for result in results] == ([UUID] if was_begun else [])
    for result in results:
        assert not result["ok"] or world.gpu["recovery_action"] == "None", "success without a reset"
    assert recover(world.host()) == []
    assert reset(world.host(), UUID)["ok"] and all_is_back(world)


def test_killed_at_every_point(tmp_path: Path) -> None:
    points = count_points(tmp_path, lambda world: reset(world.host(), UUID))
    assert points > 40
    for at in range(1, points + 1, 1 if FULL else 3):
        world = World(tmp_path / str(at))
        assert killed_at(world, at, lambda world: reset(world.host(), UUID)) == 137
        check_recovered(world, at)


def test_killed_again_while_it_recovers(tmp_path: Path) -> None:
    rng = random.Random(5)
    for round_ in range(300 if FULL else 12):
        world = World(tmp_path / str(round_))
        at = rng.randint(1, 60)
        killed_at(world, at, lambda world: reset(world.host(), UUID))
        kills = [rng.randint(1, 12) for _ in range(3)]
        for again in kills:
            killed_at(world, again, lambda world: recover(world.host()))
        check_recovered(world, (at, kills))


def test_a_new_reset_puts_back_first_what_a_killed_one_left(tmp_path: Path) -> None:
    """DCGM is stopped by the killed one; the next finds it inactive and must start it nevertheless."""
    world = World(tmp_path)
    world.after_call = lambda argv: os._exit(137) if "--gpu-reset" in argv else None
    assert in_a_child(lambda: reset(world.host(), UUID)) == 137
    world.after_call = lambda argv: None
    assert world.states()[DCGM] == "inactive" and world.gpu["persistence"] is False
    result = reset(world.host(), UUID)
    assert result["ok"] and all_is_back(world) and world.gpu["resets"] == 2


def test_after_a_reboot_nothing_is_started(world: World) -> None:
    """What is enabled runs again by itself; what somebody had started by hand is not ours to start."""
    host = world.host()
    path = world.paths.gpu_reset_intent(UUID)
    path.parent.mkdir(parents=True)
    Intent(path, UUID, "another boot", 1.0, "reset", [DCGM], True).write()
    world.set_units({DCGM: "inactive"})
    world.change_gpu(persistence=False)
    (result,) = recover(host)
    assert not result["ok"] and "interrupted in phase reset" in result["detail"]
    assert world.states()[DCGM] == "inactive" and world.gpu["persistence"] is False
    assert not path.exists()


def test_an_intent_that_is_not_ours_stops_everything(world: World) -> None:
    path = world.paths.gpu_reset_intent(UUID)
    path.parent.mkdir(parents=True)
    for text in ("{", '{"schema": 2}', '{"schema": 1, "surprise": 1}'):
        path.write_text(text)
        with pytest.raises(StateError):
            reset(world.host(), UUID)
        assert world.calls("--gpu-reset") == 0 and path.read_text() == text


def test_two_at_once(world: World) -> None:
    folder = world.paths.gpu_reset(UUID).parent
    folder.mkdir(parents=True)
    with state_lock(folder / "host"), pytest.raises(BusyError, match="another reset"):
        reset(world.host(), UUID)
    assert world.calls("--gpu-reset") == 0


# -- the program


SYSTEMCTL = """#!/bin/sh
case "$1" in
show) test -e "$0.$4" && echo active || echo inactive;;
stop) rm -f "$0.$2"; rm -f %(client)s;;
start) touch "$0.$2" %(client)s;;
esac
"""


@pytest.fixture
def program(tmp_path: Path) -> tuple[World, dict[str, str]]:
    """The module as the unit starts it, on a CPU slot, with systemctl and nvidia-smi from a directory of ours."""
    world = World(tmp_path, uuid="CPU-0", in_process=False)
    systemctl = world.root / "bin/systemctl"
    systemctl.write_text(SYSTEMCTL % {"client": world.client})
    systemctl.chmod(0o755)
    Path(f"{systemctl}.{DCGM}").touch()
    environ = {"PATH": f"{world.root / 'bin'}:{os.environ['PATH']}", "APPLIANCE_ROOT": str(world.root)}
    return world, environ | {"APPLIANCE_NVIDIA_SMI": str(world.smi)}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "healthcheck.reset", *arguments]


def test_the_program(program: tuple[World, dict[str, str]]) -> None:
    world, environ = program
    dry = subprocess.run(command("--uuid", "CPU/0", "--dry-run"), env=environ, capture_output=True, text=True)
    assert dry.returncode == 0, dry.stderr
    assert dry.stdout.splitlines()[0] == f"systemctl stop {DCGM}" and world.calls("--gpu-reset") == 0
    done = subprocess.run(command("--uuid", "CPU-0", "--json"), env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert world.gpu["resets"] == 1 and world.gpu["persistence"] is True


def test_the_program_killed_and_recovered(program: tuple[World, dict[str, str]]) -> None:
    world, environ = program
    world.change_smi(reset="hang")
    with subprocess.Popen(command("--uuid", "CPU-0"), env=environ, start_new_session=True) as child:
        deadline = time.monotonic() + 30
        while not world.calls("--gpu-reset"):
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        busy = subprocess.run(command("--uuid", "CPU-0"), env=environ, capture_output=True, text=True)
        assert busy.returncode == ExitCode.BUSY and "another reset is running" in busy.stderr
        hung = children_of(child.pid)
        child.kill()
    for pid in hung:  # of a session of its own; systemd ends the whole control group of the unit
        os.kill(pid, signal.SIGKILL)
    assert world.gpu["persistence"] is False
    stopped = subprocess.run(command("--recover", "--uuid", "CPU/0"), env=environ, capture_output=True, text=True)
    assert stopped.returncode == 0, stopped.stderr
    assert "interrupted in phase reset" in stopped.stdout
    assert world.gpu["persistence"] is True and world.client.exists()


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize(
    "arguments",
    [[], ["--uuid", "0"], ["--uuid", "GPU-../../x"], ["--uuid", "CPU-0", "--client-unit", "appliance.service"]],
)
def test_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == ExitCode.USAGE
    assert "hint" in capsys.readouterr().err


def test_systemd_that_does_not_answer_is_no_reset(world: World) -> None:
    real = world.run

    def run(argv: list[str], **options: Any) -> Result:
        return Result(tuple(argv), 1, b"", b"no bus") if argv[0] == "systemctl" else real(argv, **options)

    result = reset(world.host(run=run), UUID)
    assert not result["ok"] and "cannot see whether" in result["detail"]
    assert world.calls("--gpu-reset") == 0
    with pytest.raises(ApplianceError):
        world.host(run=run).read(UUID)


def test_the_stand_in_can_be_run() -> None:
    assert os.access(STAND_IN, os.X_OK)
