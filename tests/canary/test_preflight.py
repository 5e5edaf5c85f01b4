"""What refuses a run before it begins, each with the reason and the fix."""

from __future__ import annotations

import pytest

from appliance.hostconfig import parse_config
from appliance.models import ModelStore
from appliance.releases import ReleaseOptions, ReleaseStore
from appliance.slots import set_slot
from canary.happenings import Now
from canary.placement import Placement
from canary.preflight import Check, Start, cooldown_left, run_checks
from canary.run import Phase
from canary.store import Store, boot_id
from canary.types import Policy
from tests.canary.stand_ins import RuleState, make_parts
from tests.canary.test_machine import make
from tests.canary.world import World


def checks(world: World, release: str = "v2", **start: object) -> list[Check]:
    parts = make_parts(world.paths)
    samples = parts.samples(Policy(), {})
    wanted = Start(release=release, **start)  # type: ignore[arg-type]
    return run_checks(world.paths, Placement(world.paths), parts.rules, samples, wanted, Now(0.0, 0.0))


def blocking(world: World, release: str = "v2", **start: object) -> str:
    return "; ".join(f"{check.name}: {check.text}" for check in checks(world, release, **start) if check.blocks)


def test_a_healthy_host_refuses_nothing(world: World) -> None:
    found = checks(world)
    assert blocking(world) == "" and {check.status for check in found} == {"ok"}
    assert {check.name for check in found} == {
        "run", "release", "stable", "model name", "gpus", "gateways", "metrics", "rules", "host",
    }  # fmt: skip


def test_identical_releases_are_refused_by_what_they_compute(world: World) -> None:
    store, models = ReleaseStore(world.paths), ModelStore(world.paths.models)
    config = parse_config(b'[gpus]\nbackend = "cpu"\n', where="test")
    if not world.paths.release("twin").exists():
        store.add("twin", models, "tiny", config, link=True, note="another note")
        store.add("other", models, "tiny", config, link=True, options=ReleaseOptions(max_model_len=64))
    assert "the same as v1" in blocking(world, "twin")
    assert "the same" not in blocking(world, "other")
    assert "serves already" in blocking(world, "v1")


def add_renamed(world: World) -> None:
    """The release "renamed", which computes what v2 does and is called otherwise by clients."""
    if not world.paths.release("renamed").exists():
        config = parse_config(b'[gpus]\nbackend = "cpu"\n', where="test")
        models, options = ModelStore(world.paths.models), ReleaseOptions(max_batch_seqs=3)
        ReleaseStore(world.paths).add(
            "renamed", models, "tiny", config, model_name="other-name", options=options, link=True
        )


def test_another_model_name_is_refused_since_no_verdict_counts_404(world: World) -> None:
    add_renamed(world)
    (check,) = (one for one in checks(world, "renamed") if one.name == "model name")
    assert check.status == "refused" and "who asks for 'tiny' gets 404" in check.text
    assert "--model-name tiny" in str(check.hint) and "--other-model-name" in str(check.hint)
    (check,) = (one for one in checks(world, "renamed", other_model_name=True) if one.name == "model name")
    assert check.status == "warn" and "404" in check.text


def test_without_golden_answers_only_an_undo_starts(world: World) -> None:
    test_identical_releases_are_refused_by_what_they_compute(world)
    assert "no golden answers" in blocking(world, "other")
    assert "golden" not in blocking(world, "other", skip_analysis=True)


@pytest.mark.parametrize("trouble", ["gateway", "slot", "rule", "metrics", "conntrack", "stable", "release"])
def test_trouble_is_named(world: World, trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said, release = trouble, "v2"
    if trouble == "gateway":
        socket = world.paths.gateway_socket("canary")
        hidden = socket.with_suffix(".hidden")
        socket.rename(hidden)
        try:
            assert "gateway canary" in blocking(world)
        finally:
            hidden.rename(socket)
        return
    if trouble == "slot":
        set_slot(world.paths, "canary", "v1")
        said = "slot canary points at v1"
    elif trouble == "rule":
        world.rules.set_weight("7", 5.0)
        said = "sends 5 % to the canary"
    elif trouble == "metrics":
        world.script.set(metrics_problem="no edge at 0.08 s")
        said = "no edge"
    elif trouble == "conntrack":
        full = RuleState(0.0, None, conntrack_percent=93.0)
        monkeypatch.setattr("tests.canary.stand_ins.FileRules.read", lambda _: full)
        said = "93 % full"
    elif trouble == "stable":
        set_slot(world.paths, "stable", None)
        said = "no release is in service"
    else:
        release, said = "nosuch", "there is no release 'nosuch'"
    assert said in blocking(world, release)


def test_rules_that_cannot_be_read_refuse(world: World) -> None:
    world.script.set(rules_error="iptables-save is the legacy backend")
    assert "legacy" in blocking(world)


def test_cooldown_counts_after_failures_only_and_survives_clocks_that_jump() -> None:
    failed = make(phase=Phase.FAILED, boot_id=boot_id(), entered=100.0, ended_at=5000.0)
    assert cooldown_left(failed, Now(400.0, 0.0)) == 300.0  # 600 s, by the monotonic clock
    assert cooldown_left(failed, Now(701.0, 0.0)) <= 0
    for phase in (Phase.ABORTED, Phase.SETTLED):
        assert cooldown_left(make(phase=phase, entered=100.0, boot_id=boot_id()), Now(101.0, 0.0)) == 0
    other_boot = make(phase=Phase.FAILED, boot_id="b", entered=1e9, ended_at=5000.0)
    assert cooldown_left(other_boot, Now(1.0, 5100.0)) == 500.0
    assert cooldown_left(other_boot, Now(1.0, 10.0)) == 600.0  # the wall clock went back: never longer than that


def test_runs_are_kept_and_numbered(world: World) -> None:
    store = Store(world.paths)
    assert store.next_id() == "1"
    for number in range(1, 4):
        run = make(id=str(number), phase=Phase.SETTLED)
        store.save(run)
        store.archive(run)
    assert store.next_id() == "4" and [run.id for run in store.history()] == ["1", "2", "3"]
