"""The controller with the real netfilter of a network namespace: kills, another tool that empties all tables, rollback.
What traffic sees of the rules is test_netfilter_netns.py's."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.paths import Paths
from appliance.slots import pointer
from canary.client import NoController
from canary.netfilter.apply import Netfilter
from canary.rollback_cli import LAST_RESORT
from canary.seams import Parts
from canary.store import Store
from tests.canary.netns import Namespace, require_netns
from tests.canary.processes import ControllerProcess
from tests.canary.stand_ins import make_parts
from tests.canary.test_life import wait_for
from tests.canary.world import QUICK, World

pytestmark = pytest.mark.netns
KILLS = 40 if os.environ.get("APPLIANCE_FULL") == "1" else 4


@pytest.fixture(scope="module")
def namespace() -> Iterator[Namespace]:
    require_netns()
    made = Namespace()
    yield made
    made.close()


def netfilter(namespace: Namespace, paths: Paths) -> Netfilter:
    return Netfilter(namespace.runner, lock=paths.run / "netfilter", proc=namespace.proc)


def real_rules(namespace: Namespace) -> Callable[[Paths], Parts]:
    return lambda paths: replace(make_parts(paths), rules=netfilter(namespace, paths))


def check(world: World, namespace: Namespace, serving: str) -> None:
    rules = netfilter(namespace, world.paths)
    found = rules.read()
    assert found.weight == 0 and not found.drift and rules.draining() == 0
    assert (pointer(world.paths, "stable"), pointer(world.paths, "canary")) == (serving, None)
    assert world.engines() == [[serving]] * world.gpus


@pytest.mark.parametrize("number", range(KILLS))
def test_killed_with_real_rules(world: World, namespace: Namespace, number: int) -> None:
    good = number % 2 == 0
    if not good:
        world.script.set(fail_at=100)
    at = 10 + random.Random(number).randrange(40)
    parts = real_rules(namespace)
    with ControllerProcess(world.paths, kill_at=at, after=number % 3 == 0, parts=parts) as controller:
        with suppress(NoController):  # on a busy machine it may be killed before its answer is out
            controller.call("start", release="v2", policy=QUICK)
        run = controller.run_to_end()
        assert run is None and controller.wait() == -signal.SIGKILL, f"effect {at} was not reached"
    with ControllerProcess(world.paths, parts=parts) as controller:
        run = controller.run_to_end()
    assert run is not None and run["phase"] == ("settled" if good else "failed")
    check(world, namespace, "v2" if good else "v1")


def test_the_last_resort_needs_nothing_of_ours(world: World, namespace: Namespace) -> None:
    """Of README's bad day: neither python nor state nor configuration."""
    rules = netfilter(namespace, world.paths)
    rules.set_weight("1", 50.0)
    readme = (Path(__file__).parents[2] / "canary/README.md").read_text()
    assert LAST_RESORT in readme
    for line in LAST_RESORT.split("; "):
        namespace.run(line.split())
    assert not netfilter(namespace, world.paths).read().weight
    for program in ("iptables", "ip6tables"):
        listed = namespace.run([program, "-t", "nat", "-S", "APPLIANCE-CANARY"])
        assert "APPLIANCE-TO-CANARY" not in str(listed)
    rules.set_weight("1", 0.0)
    assert netfilter(namespace, world.paths).read().weight == 0


def test_tables_emptied_by_another_tool_are_put_back_and_told(world: World, namespace: Namespace) -> None:
    world.script.set(verdict="inconclusive")
    with ControllerProcess(world.paths, parts=real_rules(namespace)) as controller:
        controller.call("start", release="v2", policy=QUICK | {"step_seconds": 60.0})
        rules = netfilter(namespace, world.paths)
        wait_for(world, lambda run: run.stage == "observe" and rules.read().weight == 10)
        for program in ("iptables", "ip6tables"):
            for table in ("nat", "filter"):
                namespace.run([program, "-t", table, "-F"])
                namespace.run([program, "-t", table, "-X"])
        assert netfilter(namespace, world.paths).read().weight in (None, 10)  # 10: it was faster than we
        wait_for(world, lambda _: netfilter(namespace, world.paths).read().weight == 10)
        wait_for(world, lambda _: "canary_drift" in [e["event"] for e in Store(world.paths).events("1")])
        reply = controller.call("rollback", reason="test", drain=0.0)
        assert reply["live"]["rule"] == 0 and netfilter(namespace, world.paths).read().weight == 0
        print(f"from the command to weight 0: the rules took {1000 * reply['live']['rule_seconds']:.0f} ms")
        controller.run_to_end()
    check(world, namespace, "v1")
