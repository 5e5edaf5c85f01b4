"""`appliance release`: use, check, remove and their exit codes, against launchers that speak the real protocol."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_launcher import FakeFleet
from release_helpers import paths_fixture, release_command, store_fixture  # noqa: F401  # fixtures
from store_helpers import run_and_die

from appliance import fleet as fleet_module
from appliance.cli import main
from appliance.events import read_events
from appliance.fleet import Fleet
from appliance.fsutil import locked
from appliance.models import ModelStore
from appliance.paths import Paths
from appliance.releases import ReleaseStore
from appliance.slots import read_slot, set_slot
from engine.spawn import python_env, python_module
from tests.tiny import make_tiny_model

Command = Callable[..., dict[str, Any]]
FULL = bool(os.environ.get("APPLIANCE_FULL"))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Command:
    """run("use", "v1", code=0) -> the JSON document."""

    def command(*arguments: str, code: int = 0) -> dict[str, Any]:
        found, document = release_command(capsys, *arguments)
        assert found == code, document
        return document.get("error", document) if code else document  # type: ignore[return-value]

    return command


@pytest.fixture
def make(run: Command) -> Callable[..., None]:
    def make(*names: str) -> None:
        for name in names:
            run("add", name, "--model", "tiny", "--model-name", "chat", "--note", name)

    return make


@pytest.fixture(scope="module")
def template() -> Iterator[Path]:
    """/var/lib/appliance of a host with the releases v1 and v2, which has v1 in service."""
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setenv("APPLIANCE_ROOT", directory)
        paths = Paths.under(Path(directory))
        ModelStore(paths.models).add(make_tiny_model(Path(directory) / "source"), "tiny")
        with FakeFleet(paths, 2):
            for name in ("v1", "v2"):
                command = ["release", "add", name, "--model", "tiny", "--model-name", "chat", "--note", name, "-q"]
                assert main(command) == 0
            assert main(["release", "use", "v1", "-q"]) == 0
        yield paths.state


@pytest.fixture
def two(paths: Paths, template: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeFleet]:
    """Two slots that serve v1; v2 is there."""
    shutil.copytree(template, paths.state, symlinks=True)
    monkeypatch.setattr(fleet_module, "POLL_SECONDS", 0.01)
    with FakeFleet(paths, 2) as fleet:
        yield fleet


def everywhere(fleet: FakeFleet) -> dict[str, str]:
    """What runs, the same on every GPU."""
    found = [fleet.running(gpu) for gpu in range(fleet.gpus)]
    assert all(item == found[0] for item in found), found
    return found[0]


def left_over(paths: Paths) -> dict[str, Any]:
    state = json.loads((paths.state / "leases.json").read_text())
    return {key: value for key, value in state.items() if key != "schema" and value}


# -- shared placement --------------------------------------------------------------------------------------------------


def test_use_goes_in_order(two: FakeFleet, run: Command, paths: Paths) -> None:
    """New ones ready and judged, then the pointer, then the old ones go; every step is an event."""
    answer = run("use", "v2")
    assert (answer["previous"], answer["changed"], answer["gpus"]) == ("v1", True, [0, 1])
    assert answer["warnings"] == []
    assert read_slot(paths, "stable") == "v2" and everywhere(two) == {"v2": "ready"}
    assert two.log(0)[:2] == two.log(1)[:2] == ["run v2", "sync"]
    events = [event["event"] for event in read_events(paths.events) if event.get("release") == "v2"]
    started = events.index("release_use_started")
    assert events[started:] == [
        "release_use_started", *["release_engine_asked"] * 2, *["release_engine_ready"] * 2,
        *["release_golden_compared"] * 2, "release_use_committed", "release_use_finished",
    ]  # fmt: skip
    assert left_over(paths) == {}


def test_the_same_again_changes_nothing(two: FakeFleet, run: Command, paths: Paths) -> None:
    before = os.lstat(paths.slot_pointer("stable")).st_mtime_ns, list(read_events(paths.events))
    answer = run("use", "v1")
    assert (answer["changed"], answer["gpus"]) == (False, [0, 1])
    assert (os.lstat(paths.slot_pointer("stable")).st_mtime_ns, list(read_events(paths.events))) == before
    assert two.log(0) == []


@pytest.mark.parametrize(
    ("phase", "code", "hint"),
    [("step", 5, "canary rollback 7"), ("settling", 5, "canary status --wait"), ("settled", 0, ""), ("failed", 0, "")],
)
def test_a_canary_run_keeps_others_from_changing_slots(
    two: FakeFleet, run: Command, paths: Paths, phase: str, code: int, hint: str
) -> None:
    value = {"schema": 1, "id": "7", "release": "v2", "stable": "v1", "phase": phase}
    paths.canary_run.write_text(json.dumps(value))
    run("use", "v1")  # it is in service: nothing to change
    before = read_slot(paths, "stable")
    document = run("use", "v2", code=code)
    if code:
        assert "run 7 of v2 against v1" in document["message"] and hint in document["hint"]
        assert read_slot(paths, "stable") == before
    else:
        assert read_slot(paths, "stable") == "v2"


def test_whether_a_run_is_on_may_be_unknown_and_then_nothing_changes(
    two: FakeFleet, run: Command, paths: Paths
) -> None:
    paths.canary_run.write_text("{")
    assert "canary.json" in run("use", "v2", code=1)["message"]
    assert read_slot(paths, "stable") == "v1"


def test_another_model_name_is_allowed_and_said_loudly(
    two: FakeFleet, run: Command, paths: Paths, capsys: pytest.CaptureFixture[str]
) -> None:
    run("add", "v3", "--model", "tiny", "--model-name", "other", "--note", "renamed")
    (warning,) = run("use", "v3")["warnings"]
    assert "clients that ask for 'chat' get 404 from now on" in warning and "--model-name chat" in warning
    (event,) = (event for event in read_events(paths.events) if event.get("warning"))
    assert (event["event"], event["release"], event["warning"]) == ("release_use_committed", "v3", warning)
    assert main(["release", "use", "v1", "-q"]) == 0
    assert "clients that ask for 'other' get 404" in capsys.readouterr().err
    assert run("use", "v2")["warnings"] == []  # the same name again


def test_back_and_forth(two: FakeFleet, run: Command, paths: Paths) -> None:
    for name in ("v2", "v1", "v2"):
        run("use", name)
        assert everywhere(two) == {name: "ready"} and read_slot(paths, "stable") == name
    run("remove", "v1")


@pytest.mark.parametrize(
    "script, code, message",
    [
        ({"dies": {"v2": "killed by SIGSEGV"}}, 1, "v2 does not start on GPU 1: killed by SIGSEGV"),
        ({"refuse": {"run": "no memory"}}, 1, "no memory"),
        ({"deaf": True}, 1, "ended in the middle of run"),
        ({"salt": {"v2": "!"}}, 4, "v2 on GPU 1 does not give its golden answers: prompt short"),
        ({"weights": {"v2": "!"}}, 4, "weights: loaded w!, recorded w"),
        ({"garbled": ["v2"]}, 3, "gave no golden answers"),
    ],
)
def test_a_failure_before_the_commit_point_is_undone(
    two: FakeFleet, run: Command, paths: Paths, script: dict[str, object], code: int, message: str
) -> None:
    """On the second GPU, when all was well on the first: v1 serves as if nothing had been, on both."""
    two.script(1, **script)
    error = run("use", "v2", code=code)
    assert message in error["message"] and "undone: stable is still v1" in error["message"]
    if code == 4:
        assert error["hint"].startswith("first `appliance release verify v2`")
    two.script(1, deaf=False)
    assert read_slot(paths, "stable") == "v1" and everywhere(two) == {"v1": "ready"}
    assert [event["event"] for event in read_events(paths.events)][-1] == "release_use_undone"
    if "deaf" not in script:
        assert left_over(paths) == {}
    two.script(1, dies={}, refuse={}, salt={}, weights={}, garbled=[])
    assert run("use", "v2")["changed"] is True and everywhere(two) == {"v2": "ready"} and left_over(paths) == {}


def test_a_systemd_that_is_late_with_the_scope_is_not_the_releases_fault(
    two: FakeFleet, run: Command, paths: Paths
) -> None:
    two.script(1, late=["v2"])
    assert run("use", "v2")["changed"] is True
    assert read_slot(paths, "stable") == "v2" and everywhere(two) == {"v2": "ready"}


def test_what_ends_after_a_late_scope_does_not_start(two: FakeFleet, run: Command, paths: Paths) -> None:
    two.script(1, late=["v2"], dies={"v2": "killed by SIGSEGV"})
    assert "v2 does not start on GPU 1: killed by SIGSEGV" in run("use", "v2", code=1)["message"]
    assert read_slot(paths, "stable") == "v1"


def test_no_progress_ends_in_time(two: FakeFleet, run: Command, paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    paths.config.write_text(paths.config.read_text() + "[engine]\nstart_timeout = 5\n")
    monkeypatch.setattr(fleet_module, "_PATIENCE", 0.3 - 5)
    two.script(0, hangs=["v2"])
    error = run("use", "v2", code=3)
    assert "v2 is not ready on GPU 0: no progress" in error["message"]
    assert everywhere(two) == {"v1": "ready"}


def test_a_failure_after_the_commit_point_is_finished_by_the_same_command(
    two: FakeFleet, run: Command, paths: Paths
) -> None:
    two.script(1, refuse={"sync": "not now"})
    error = run("use", "v2", code=1)
    assert "stable is v2 now, but not everywhere" in error["message"] and "again finishes it" in error["hint"]
    assert read_slot(paths, "stable") == "v2" and two.running(1) == {"v1": "ready", "v2": "ready"}
    two.script(1, refuse={})
    assert run("use", "v2")["changed"] is True
    assert everywhere(two) == {"v2": "ready"} and left_over(paths) == {}
    assert run("use", "v2")["changed"] is False


def test_an_unfinished_change_and_then_another(two: FakeFleet, run: Command, make: Callable[..., None]) -> None:
    make("v3")
    two.script(1, refuse={"sync": "not now"})
    run("use", "v2", code=1)
    two.script(1, refuse={})
    run("use", "v3")
    assert everywhere(two) == {"v3": "ready"}


def test_memory_is_counted_with_numbers(paths: Paths, run: Command, make: Callable[..., None]) -> None:
    with FakeFleet(paths, 1, backend="cuda") as fleet:
        for name in ("v1", "v2", "v3"):
            run("add", name, "--model", "tiny", "--golden", "skip")
        run("use", "v1")
        run("use", "v2", "--slot", "canary")
        error = run("use", "v3", code=4)
        assert "3 engines of gpu_memory_fraction 0.45, together 1.35 of its memory" in error["message"]
        assert "lower engine.gpu_memory_fraction" in error["hint"]
        assert fleet.running(0) == {"v1": "ready", "v2": "ready"}
        paths.config.write_text(paths.config.read_text() + "[engine]\ngpu_memory_fraction = 0.3\n")
        run("use", "v3")
        assert fleet.running(0) == {"v2": "ready", "v3": "ready"}


def test_canary_slot_beside_stable(two: FakeFleet, run: Command, paths: Paths) -> None:
    run("use", "v2", "--slot", "canary")
    assert (read_slot(paths, "stable"), read_slot(paths, "canary")) == ("v1", "v2")
    assert everywhere(two) == {"v1": "ready", "v2": "ready"}
    run("remove", "v2", code=4)
    run("use", "v2")  # promotion: the engines are there already
    assert everywhere(two) == {"v2": "ready"} and "run v2" not in two.log(0)[2:]


def test_no_golden_answers_is_a_warning(two: FakeFleet, run: Command) -> None:
    run("add", "v3", "--model", "tiny", "--model-name", "chat", "--golden", "skip")
    warnings = run("use", "v3")["warnings"]
    assert len(warnings) == 2 and "no golden answers of v3 were recorded on cpu" in warnings[0]


# -- who takes part ----------------------------------------------------------------------------------------------------


def test_a_held_gpu_follows_later(two: FakeFleet, run: Command) -> None:
    two.ask(1, "hold", owner="watchdog", level="stop", reason="XID 79")
    two.ask(0, "hold", owner="operator", level="drain", reason="maintenance")  # still runs its engine
    answer = run("use", "v2")
    assert answer["gpus"] == [0] and answer["warnings"] == ["GPU 1 follows later: held by watchdog: XID 79"]
    assert two.running(0) == {"v2": "ready"} and two.log(1)[-1:] != ["run v2"]


def test_without_launchers(paths: Paths, run: Command) -> None:
    with FakeFleet(paths) as fleet:
        run("add", "v1", "--model", "tiny")
        assert "would be bypassed" in str(run("use", "v1", "--offline", code=4))
        assert fleet.running(0) == {}
    error = run("use", "v1", code=1)
    assert "not running" in error["message"] and "--offline" in error["hint"] and read_slot(paths, "stable") is None
    assert run("use", "v1", "--offline")["changed"] is True
    assert read_slot(paths, "stable") == "v1"
    assert run("use", "v1")["changed"] is False  # launchers read the pointer when they start
    with FakeFleet(paths) as fleet:
        while fleet.running(0) != {"v1": "ready"}:
            pass
        assert run("use", "v1")["changed"] is False


def test_a_pointer_to_nothing_can_be_mended(two: FakeFleet, run: Command, paths: Paths) -> None:
    os.rename(paths.release("v1"), paths.releases / "gone")
    assert run("use", "v2")["previous"] == "v1"
    assert everywhere(two) == {"v2": "ready"}


# -- exclusive placement -----------------------------------------------------------------------------------------------


@pytest.fixture
def exclusive(two: FakeFleet, paths: Paths) -> FakeFleet:
    paths.config.write_text(paths.config.read_text() + '[engine]\nplacement = "exclusive"\n')
    return two


def test_exclusive_replaces_one_gpu_at_a_time(exclusive: FakeFleet, run: Command, paths: Paths) -> None:
    assert run("use", "v2")["gpus"] == [0, 1]
    assert everywhere(exclusive) == {"v2": "ready"} and exclusive.log(0)[0] == exclusive.log(1)[0] == "replace v2"
    events = [(e["event"], e.get("gpu")) for e in read_events(paths.events) if e.get("release") == "v2"]
    committed = events.index(("release_use_committed", None))
    assert events.index(("release_engine_ready", 0)) < committed < events.index(("release_engine_asked", 1))


def test_exclusive_failure_on_the_first_brings_the_old_back(exclusive: FakeFleet, run: Command, paths: Paths) -> None:
    exclusive.script(0, dies={"v2": "exit status 4"})
    error = run("use", "v2", code=1)
    assert "undone: stable is still v1" in error["message"] and read_slot(paths, "stable") == "v1"
    assert exclusive.running(0).keys() == {"v1"} and exclusive.log(1) == [] and left_over(paths) == {}


def test_exclusive_failure_on_the_second_is_finished_later(exclusive: FakeFleet, run: Command, paths: Paths) -> None:
    exclusive.script(1, dies={"v2": "exit status 4"})
    error = run("use", "v2", code=1)
    assert "stable is v2 now, but not everywhere" in error["message"] and read_slot(paths, "stable") == "v2"
    exclusive.script(1, dies={})
    run("use", "v2")
    assert everywhere(exclusive) == {"v2": "ready"} and left_over(paths) == {}


def test_exclusive_has_no_canary_slot_here(exclusive: FakeFleet, run: Command) -> None:
    assert "canary controller" in run("use", "v2", "--slot", "canary", code=4)["message"]


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_linked_release_is_verified_before_use(two: FakeFleet, run: Command, paths: Paths) -> None:
    run("add", "v3", "--model", "tiny", "--link")
    run("use", "v3")
    run("use", "v1")
    weights = paths.models / "tiny" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)  # the same size
    for gpu in range(2):
        two.script(gpu, log=[])
    error = run("use", "v3", code=4)
    assert "links to has changed: model/model.safetensors" in error["message"]
    assert two.log(0) == [] and read_slot(paths, "stable") == "v1"


def test_a_damaged_release_is_refused(two: FakeFleet, run: Command, paths: Paths) -> None:
    (paths.release("v2") / "model" / "config.json").unlink()
    error = run("use", "v2", code=4)
    assert "damaged: model/config.json" in error["message"] and two.log(0) == []
    assert run("verify", code=1) is not None


def test_check(two: FakeFleet, run: Command) -> None:
    answer = run("check", "v1")
    assert answer["verdict"] == "same" and [item["gpu"] for item in answer["gpus"]] == [0, 1]
    two.script(1, garbled=["v1"])
    assert run("check", "v1", code=3)["verdict"] == "inconclusive"
    two.script(0, salt={"v1": "!"})
    found = run("check", "v1", code=1)
    assert found["verdict"] == "different" and len(found["gpus"][0]["differences"]) == 4
    assert run("check", "v1", "--gpu", "0", code=1)["gpus"][0]["verdict"] == "different"
    assert "runs on no GPU" in run("check", "v2", code=3)["message"]


def test_one_change_at_a_time(two: FakeFleet, run: Command, paths: Paths) -> None:
    with locked(paths.releases / ".lock", "x"):
        for arguments in (("use", "v2"), ("remove", "v2"), ("add", "v3", "--model", "tiny")):
            assert "another process" in run(*arguments, code=5)["message"]
        assert run("check", "v1")["verdict"] == "same"
        assert [item["name"] for item in run("list")["releases"]] == ["v1", "v2"]


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (("use", "nope"), 1, "no release 'nope'"),
        (("use", "../v1"), 2, "cannot name a release"),
        (("use", "v1", "--slot", "beta"), 2, "invalid choice"),
        (("add", "v9", "--model", "nope"), 1, "no model 'nope'"),
        (("add", "v9", "--model", "tiny", "--option", "host=x"), 2, "no option of a release"),
        (("add", "v1", "--model", "tiny"), 4, "it differs: model name"),
        (("show", "nope"), 1, "no release 'nope'"),
        (("verify", "nope"), 1, "no release 'nope'"),
        (("remove", "v1"), 4, "slot stable points at"),
        (("remove", "nope"), 1, "no release 'nope'"),
    ],
)
def test_errors_say_what_to_do(
    two: FakeFleet, run: Command, arguments: tuple[str, ...], code: int, message: str
) -> None:
    error = run(*arguments, code=code)
    assert message in error["message"] and error["hint"] and error["exit_code"] == code


def test_for_people(two: FakeFleet, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["release", "use", "v2"]) == 0
    out, err = capsys.readouterr()
    assert out == "stable: v2 is in service on GPU 0, 1\n"
    assert "starting v2 on GPU 0, 1" in err and "draining v1" in err
    assert main(["release", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["NAME", "SLOT", "MODEL", "SIZE", "ENGINE", "CREATED", "GOLDEN"]
    assert lines[2].split()[:3] == ["v2", "stable", "chat"] and lines[2].split()[-1] == "cpu"
    assert main(["release", "show", "v2"]) == 0 and "note            v2" in capsys.readouterr().out
    assert main(["release", "verify"]) == 0 and capsys.readouterr().out.count(": ok, ") == 2


# -- SIGKILL at every step ---------------------------------------------------------------------------------------------


def ticking(tick: Callable[[], None], arguments: list[str]) -> None:
    """A death also just before and just after every question to a launcher."""
    real = Fleet.call

    def call(self: Fleet, gpu: int, op: str, **args: Any) -> dict[str, Any]:
        if op != "status":
            tick()
        answer = real(self, gpu, op, **args)
        if op != "status":
            tick()
        return answer

    Fleet.call = call  # type: ignore[method-assign]
    assert main(["release", *arguments, "-q"]) == 0


@pytest.mark.parametrize("then", ["v2", "v1"])
@pytest.mark.parametrize("placement", ["shared", "exclusive"])
def test_killed_use(two: FakeFleet, run: Command, paths: Paths, placement: str, then: str) -> None:
    """At every instant the pointer names a whole release that some launcher runs; going on and going back both work."""
    paths.config.write_text(paths.config.read_text() + f'[engine]\nplacement = "{placement}"\n')
    stride, finished, pointers = (1 if FULL else 7), False, []
    for at in range(1 if then == "v2" else 4, 400, stride):
        finished = run_and_die(lambda tick: ticking(tick, ["use", "v2"]), paths.state, at)
        pointers.append(read_slot(paths, "stable"))
        assert pointers[-1] in ("v1", "v2") and any(pointers[-1] in two.running(gpu) for gpu in range(2))
        run("use", then)
        assert read_slot(paths, "stable") == then and everywhere(two) == {then: "ready"} and left_over(paths) == {}
        if finished:
            break
        run("use", "v1")
    assert finished and {"v1", "v2"} == set(pointers)


def test_killed_add_leaves_no_engine(two: FakeFleet, run: Command, paths: Paths) -> None:
    """Whatever was recorded is whole, and the next change stops what a killed one left running."""
    stride, finished = (1 if FULL else 9), False
    for at in range(1, 600, stride):
        finished = run_and_die(
            lambda tick: ticking(tick, ["add", "v3", "--model", "tiny", "--note", "x"]), paths.state, at
        )
        for info in ReleaseStore(paths).list():
            assert info.problem is None and ReleaseStore(paths).verify(info.name).ok
        assert run("add", "v3", "--model", "tiny", "--note", "x")["golden"] == ["cpu"]
        assert everywhere(two) == {"v1": "ready"} and left_over(paths) == {}
        run("remove", "v3")
        if finished:
            break
    assert finished


def test_interrupt_undoes(two: FakeFleet, paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the new engines load."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Fleet, "wait_ready", interrupted)
    assert main(["release", "use", "v2"]) == 130
    assert everywhere(two) == {"v1": "ready"} and read_slot(paths, "stable") == "v1" and left_over(paths) == {}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_lost_terminal_undoes(two: FakeFleet, paths: Paths, number: int) -> None:
    """ssh that breaks off, or Ansible that gives up, while the new engines load."""
    two.script(1, hangs=["v2"])
    command = [*python_module("appliance"), "release", "use", "v2"]
    process = subprocess.Popen(command, env=python_env(), stderr=subprocess.PIPE)
    try:
        for _ in range(1000):
            if "v2" in two.running(1):
                break
            time.sleep(0.02)
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait(10)
    assert process.returncode == 130 and b"interrupted" in said
    assert everywhere(two) == {"v1": "ready"} and read_slot(paths, "stable") == "v1" and left_over(paths) == {}


def test_a_slot_set_by_hand_is_followed(two: FakeFleet, run: Command, paths: Paths) -> None:
    set_slot(paths, "stable", "v2")
    assert run("use", "v2")["changed"] is True
    assert everywhere(two) == {"v2": "ready"}


def test_models_of_the_environment(two: FakeFleet, run: Command, tmp_path: Path, paths: Paths,
                                   monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    ModelStore(tmp_path).add(paths.etc.parents[1] / "source", "elsewhere")
    monkeypatch.setenv("APPLIANCE_MODELS", str(tmp_path))
    assert run("add", "v3", "--model", "elsewhere")["model"] == "elsewhere"
