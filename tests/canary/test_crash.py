"""The controller is killed (SIGKILL) before or after each thing it does to the host, started again, and every run ends
promoted or rolled back, with rule, pointers, engines, state file and event log saying the same.

Default: a sample of the places, spread over the whole life of a run; APPLIANCE_FULL=1: 200 kills, and two in one run.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from appliance.events import read_events
from appliance.leases import Leases
from appliance.slots import pointer
from canary.client import ControllerError, NoController
from canary.happenings import Refused
from canary.placement import Placement
from canary.run import COMMITTED, ENDED
from canary.store import AbortWish, Store
from tests.canary.processes import ControllerProcess
from tests.canary.world import QUICK, World

FULL = os.environ.get("APPLIANCE_FULL") == "1"
KILLS = 200 if FULL else 20
SCENARIOS = ("good", "bad", "aborted", "taken back")
MAX_RESTARTS = 12
KILLED: list[int] = []


def begin(world: World, controller: ControllerProcess, long_bake: bool) -> bool:
    """Asks for a run; False if the controller died over it."""
    if Store(world.paths).load() is not None:
        return True
    try:
        controller.call("start", release="v2", policy=QUICK | ({"settle_seconds": 600.0} if long_bake else {}))
    except NoController:
        return False
    except ControllerError as error:  # a restarted one has it already
        assert "is" in error.message
    return True


def live(world: World, scenario: str, kills: list[tuple[int, bool]], trace: Path) -> dict[str, Any]:
    """Controllers one after another, each killed at its place, the last one at none."""
    world.reset()
    world.script.set(**({"fail_at": 100} if scenario == "bad" else {}))
    wished = False
    for number in range(MAX_RESTARTS):
        kill_at, after = kills[number] if number < len(kills) else (None, False)
        with ControllerProcess(world.paths, kill_at=kill_at, after=after, trace=trace) as controller:
            begun = begin(world, controller, scenario == "taken back")
            if scenario == "aborted" and begun and not wished:
                time.sleep(random.random() * 0.4)
                wished = wish(world)
            if scenario == "taken back":
                wish_in_the_bake(world, controller)
            ended = controller.run_to_end() if begun or Store(world.paths).load() else None
            if ended is not None:
                return ended
            assert controller.wait() == -signal.SIGKILL
            KILLED.append(number)
    raise AssertionError("it never ended")


def wish(world: World) -> bool:
    """What `canary rollback` leaves on disk, whoever is there to see it; True once that is settled."""
    run = Store(world.paths).load()
    if run is None:
        return False
    try:
        Store(world.paths).wish_abort(AbortWish(run.id, "by hand", "test", 0.05))
    except Refused:
        assert run.over or pointer(world.paths, "stable") == "v2"
    return True


def wish_in_the_bake(world: World, controller: ControllerProcess) -> None:
    """Once the release is promoted and its former engines are kept, unless the controller dies before."""
    while controller.alive():
        run = Store(world.paths).load()
        if run is not None and run.stage == "bake":
            Store(world.paths).wish_abort(AbortWish(run.id, "by hand", "test", 0.05))
        if run is not None and (run.phase in ENDED or run.reverted or run.stage == "bake"):
            return
        time.sleep(0.002)


def check(world: World, scenario: str, run: dict[str, Any]) -> None:
    promoted = run["phase"] == "settled"
    if scenario == "good":
        assert promoted, run["reason"]
    elif scenario == "bad":
        assert run["phase"] == "failed", run["phase"]
    elif scenario == "taken back":
        assert (run["phase"], run["reverted"]) == ("aborted", True), run["reason"]
    else:
        assert run["phase"] in ("settled", "aborted"), run["reason"]
    serving = "v2" if promoted else "v1"
    assert world.rules.read().weight in (0, None)
    assert (pointer(world.paths, "stable"), pointer(world.paths, "canary")) == (serving, None)
    assert world.engines() == [[serving]] * world.gpus
    assert not world.paths.canary_marker.exists()
    leases = Leases(Placement(world.paths).fleet())
    assert leases.all() == []
    check_events(world, run)


def check_events(world: World, run: dict[str, Any]) -> None:
    """One event for each transition, in order, none twice, the last one is how it ended."""
    told = [e for e in read_events(world.paths.events) if e.get("run") == run["id"] and "seq" in e]
    assert [event["seq"] for event in told] == list(range(1, run["seq"] + 1))
    assert told[-1]["event"] == f"canary_{run['phase']}"
    commits = [event for event in told if event["event"] == "canary_committed"]
    assert len(commits) == (run["phase"] == "settled" or run["reverted"])
    reverts = [event for event in told if event["event"] == "canary_reverted"]
    assert len(reverts) == run["reverted"]
    back = [event["seq"] for event in told if event["phase"] == "rolling_back"]
    assert not back or max((e["weight"] for e in told if e["seq"] >= min(back)), default=0) == 0


@pytest.fixture(scope="module")
def places(shared_world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """How many effects an undisturbed run has, in each scenario."""
    counts = {}
    for scenario in SCENARIOS:
        trace = tmp_path_factory.mktemp("trace") / scenario
        check(shared_world, scenario, live(shared_world, scenario, [], trace))
        counts[scenario] = len(trace.read_text().splitlines())
    assert min(counts["good"], counts["bad"], counts["taken back"]) > 25, counts
    counts["aborted"] = counts["good"]  # its own number depends on when the wish is seen
    return counts


@pytest.mark.parametrize("number", range(KILLS))
def test_killed_at_any_place_it_still_ends(world: World, places: dict[str, int], number: int, tmp_path: Path) -> None:
    scenario = SCENARIOS[number % len(SCENARIOS)]
    random.seed(number)
    turn, turns = number // len(SCENARIOS), max(1, KILLS // len(SCENARIOS))
    last = places[scenario] - 12  # their number varies a little, and at the very last ones the run is over
    at = 1 + (turn * last) // turns + random.randrange(max(1, last // turns))
    kills = [(at, number % 2 == 0)]
    if number % 5 == 4:  # and the next one while it picks up the pieces
        kills.append((random.randrange(1, 12), True))
    trace = tmp_path / "trace"
    KILLED.clear()
    try:
        check(world, scenario, live(world, scenario, kills, trace))
        assert KILLED or scenario == "aborted"  # there the number of places depends on when the wish is seen
    except AssertionError:
        print(f"scenario {scenario}, kills {kills}\n{trace.read_text()}")
        print((world.paths.run / "controller.log").read_text()[-4000:])
        raise


@pytest.mark.parametrize("phase", ["starting", "step", "promoting"])
def test_a_reboot_before_the_commit_point_ends_the_run(
    world: World, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rules are gone, /run is empty, the clock began anew: weight 0, aborted (reboot)."""
    stop_in(world, phase)
    reboot(world)
    with ControllerProcess(world.paths) as controller:
        run = controller.run_to_end()
    assert run is not None and (run["phase"], run["reason"]) == ("aborted", "reboot")
    assert max(world.rules.history(), default=0) == 0
    check(world, "aborted", run)


def test_a_reboot_after_the_commit_point_settles(world: World) -> None:
    stop_in(world, "settling")
    reboot(world)
    with ControllerProcess(world.paths) as controller:
        run = controller.run_to_end()
    assert run is not None and run["phase"] == "settled"
    check(world, "good", run)


def stop_in(world: World, phase: str) -> None:
    """Kills a controller as soon as the state file says that it is in `phase`."""
    world.script.set(verdict="inconclusive" if phase == "step" else "pass")
    if phase == "promoting":
        config = '[[hooks]]\nwhen = "promote"\nexec = ["/bin/sleep", "20"]\n'
        world.paths.canary_config.write_text(config)
    if phase == "starting":
        world.fleet.script(0, hangs=["v2"])
    long = {"settle_seconds": 2.0} if phase == "settling" else {}
    with ControllerProcess(world.paths) as controller:
        controller.call("start", release="v2", policy=QUICK | long)
        deadline = time.monotonic() + 30
        while (run := Store(world.paths).load()) is None or run.phase != phase:
            assert time.monotonic() < deadline and controller.alive()
            time.sleep(0.005)
    world.fleet.script(0, hangs=[])


def reboot(world: World) -> None:
    """What a reboot does to the files: another boot id in the state file is as good as another one in the kernel."""
    state = world.paths.canary_run.read_text()
    run = Store(world.paths).load()
    assert run is not None and run.phase not in ENDED
    world.paths.canary_run.write_text(state.replace(run.boot_id, "00000000-0000-0000-0000-000000000000"))
    (world.paths.run / "rules.json").unlink(missing_ok=True)
    world.paths.canary_marker.unlink(missing_ok=True)
    if run.phase not in COMMITTED:
        assert pointer(world.paths, "stable") == "v1"
