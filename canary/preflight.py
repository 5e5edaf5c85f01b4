"""What must be true before a run starts: each check says ok, warn, refused or unknown, and what to do. Reads only.

Unknown counts as refused: a run that cannot be watched, or taken back, does not begin.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from appliance.admin_http import AdminError, get_json
from appliance.fleet import Fleet
from appliance.log import ApplianceError, ExitCode
from appliance.paths import Paths
from appliance.releases import RELEASE_JSON, Release, ReleaseStore
from appliance.slots import pointer
from canary.happenings import Now
from canary.placement import Placement
from canary.run import Phase, Run
from canary.seams import Rules, Samples
from canary.store import Store, boot_id

_MAX_CONNTRACK_PERCENT = 80.0
Status = Literal["ok", "warn", "refused", "unknown"]


class Start(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What `canary start` asks for."""

    release: str
    policy: dict[str, Any] = {}  # keys of Policy that differ from canary.toml
    manual: bool = False
    dry_run: bool = False
    skip_analysis: bool = False
    ignore_cooldown: bool = False
    no_itl: bool = False  # without the limits of inter-token latency that the policy has
    other_model_name: bool = False  # clients that ask for stable's name may get 404 from it


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    status: Status
    text: str
    hint: str | None = None
    code: ExitCode = ExitCode.REFUSED

    @property
    def blocks(self) -> bool:
        return self.status in ("refused", "unknown")

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "status": self.status, "text": self.text, "hint": self.hint}


def run_checks(
    paths: Paths, placement: Placement, rules: Rules, samples: Samples, start: Start, now: Now
) -> list[Check]:
    """All of them, also after one that refuses."""
    store = ReleaseStore(paths)
    fleet, last = placement.fleet(), Store(paths).load()
    on = last is not None and not last.over  # then that is what it is refused for, and not what the run is doing
    checks: tuple[tuple[str, Callable[[], Iterator[Check]]], ...] = (
        ("run", lambda: _run(last, start, now)),
        ("release", lambda: _release(paths, store, start)),
        ("stable", lambda: _stable(paths, store, start.release, on)),
        ("model name", lambda: _model_name(paths, store, start)),
        ("gpus", lambda: _gpus(fleet, start.release)),
        ("gateways", lambda: _gateways(paths)),
        ("metrics", lambda: _metrics(samples)),
        ("rules", lambda: _rules(rules, on)),
        ("host", lambda: _host(paths)),
    )
    found = []
    for name, check in checks:
        try:
            found += list(check())
        except ApplianceError as error:
            known = error.exit_code in (ExitCode.BUSY, ExitCode.USAGE)  # else it is the preflight that says no
            code = error.exit_code if known else ExitCode.REFUSED
            found.append(Check(name, "refused", error.message, error.hint, code))
        except OSError as error:
            found.append(Check(name, "unknown", str(error), "are you root?"))
    return found


def _run(last: Run | None, start: Start, now: Now) -> Iterator[Check]:
    if last is not None and not last.over:
        yield Check("run", "refused", *busy(last), ExitCode.BUSY)
        return
    left = cooldown_left(last, now)
    if left > 0 and last is not None:
        text = f"run {last.id} failed: {last.reason}; its cool-down lasts another {left:.0f} s"
        if not start.ignore_cooldown:
            yield Check("run", "refused", text, "wait, or --ignore-cooldown")
            return
        yield Check("run", "warn", text)
    else:
        yield Check("run", "ok", "no other run is on")


def busy(run: Run) -> tuple[str, str]:
    """What to say, and what to do, where `run` is on."""
    end = f"`canary rollback {run.id}` ends it" if run.abortable else "`canary status --wait`, then again"
    return f"run {run.id} of {run.release} is on ({run.phase})", end


def cooldown_left(last: Run | None, now: Now) -> float:
    """Seconds for which no run may start, because the last one failed."""
    if last is None or last.phase is not Phase.FAILED:
        return 0.0
    same_boot = last.boot_id == boot_id()
    age = now.boot - last.entered if same_boot else now.utc - (last.ended_at or now.utc)
    return min(last.policy.cooldown, last.policy.cooldown - age)  # a wall clock that went back must not make it longer


def _release(paths: Paths, store: ReleaseStore, start: Start) -> Iterator[Check]:
    from appliance.release_build import quick_problem  # numpy comes with it: only for a run

    name = start.release
    release = store.get(name)
    release.engine_python(paths)
    if problem := quick_problem(release.directory(paths)):
        yield Check("release", "refused", f"{name} is damaged: {problem}", f"`appliance release verify {name}`")
        return
    if devices := store.golden_devices(name):
        yield Check("release", "ok", f"{name}, golden answers on {', '.join(devices)}")
    else:
        text = f"{name} has no golden answers: nobody can judge what it computes, so no step could pass"
        hint = f"`appliance release add {name} --model MODEL` (the same as before) records them"
        yield Check("release", "warn" if start.skip_analysis else "refused", text, hint)


def _stable(paths: Paths, store: ReleaseStore, name: str, on: bool) -> Iterator[Check]:
    stable, canary = pointer(paths, "stable"), pointer(paths, "canary")
    if stable is None:
        yield Check(
            "stable", "refused", "no release is in service", "`appliance release use NAME` puts the first one in"
        )
        return
    if stable == name:
        yield Check("stable", "refused", f"{name} is what stable serves already", "name another release")
        return
    if identity(paths, store.get(stable)) == identity(paths, store.get(name)):
        why = f"{name} is the same as {stable}: model files, options and engine version"
        yield Check("stable", "refused", why, "there is nothing to find out")
        return
    if canary not in (None, name) and not on:
        why = f"the slot canary points at {canary}, and no run is on"
        yield Check("stable", "refused", why, "`canary cleanup` empties it")
        return
    yield Check("stable", "ok", f"{stable} is in service")


def _model_name(paths: Paths, store: ReleaseStore, start: Start) -> Iterator[Check]:
    """What clients call it: the judge counts no 404, so it would never see that they ask for another name."""
    if (stable := pointer(paths, "stable")) is None:
        return  # `_stable` says so
    ours, asked = store.get(start.release).model_name, store.get(stable).model_name
    if ours == asked:
        yield Check("model name", "ok", f"clients call it {ours}, as they do {stable}")
        return
    text = (
        f"clients call {stable} {asked!r} and {start.release} {ours!r}: from {start.release}, who asks for {asked!r}"
        f" gets 404, and no verdict counts that"
    )
    again = f"`appliance release add NAME --model MODEL --model-name {asked}`, or --other-model-name if you mean it"
    yield Check("model name", "warn" if start.other_model_name else "refused", text, again)


def identity(paths: Paths, release: Release) -> dict[str, Any]:
    """What makes a release compute what it computes; names and notes are not part of it."""
    from appliance.release_build import read_release_manifest

    files = read_release_manifest(release.directory(paths))
    return {
        "files": {name: entry.sha256 for name, entry in files.items() if name != RELEASE_JSON},
        "options": msgspec.to_builtins(release.options),
        "engine": release.engine_version,
        "model_name": release.model_name,
        "python": release.python if not (paths.lib / release.engine_version).is_dir() else None,
    }


def _gpus(fleet: Fleet, name: str) -> Iterator[Check]:
    from appliance.golden_record import room_for

    states, away = fleet.survey()
    for gpu, reason in away.items():
        yield Check("gpus", "warn", f"GPU {gpu} takes no part: {reason}")
    exclusive = fleet.config.engine.placement == "exclusive"
    if len(states) < (2 if exclusive else 1):
        need = "two GPUs (placement is exclusive: stable keeps one)" if exclusive else "a GPU"
        yield Check(
            "gpus", "refused", f"{len(states)} GPUs take engines now; a canary needs {need}", "appliance status"
        )
        return
    for state in () if exclusive else states.values():
        if problem := room_for(fleet, state, name):
            hint = "lower engine.gpu_memory_fraction, or engine.placement exclusive"
            yield Check("gpus", "refused", problem, hint)
            return
    yield Check("gpus", "ok", f"{len(states)} GPUs, placement {fleet.config.engine.placement}")


def _gateways(paths: Paths) -> Iterator[Check]:
    for slot in ("stable", "canary"):
        try:
            state = get_json(paths.gateway_socket(slot), "/state")
        except AdminError as error:
            yield Check(
                "gateways", "refused", f"gateway {slot}: {error.message}", f"systemctl start appliance-gateway@{slot}"
            )
            continue
        if slot == "stable" and state.get("serving") is None:
            yield Check("gateways", "refused", "the stable gateway serves nothing", "appliance status")
        else:
            yield Check("gateways", "ok", f"gateway {slot} answers")


def _metrics(samples: Samples) -> Iterator[Check]:
    samples.check()
    yield Check("metrics", "ok", "the gateways measure what the policy limits")


def _rules(rules: Rules, on: bool) -> Iterator[Check]:
    state = rules.read()
    if state.weight and not on:
        yield Check(
            "rules", "refused", f"the rule sends {state.weight:g} % to the canary, and no run is on", "canary cleanup"
        )
        return
    if state.drift:
        yield Check(
            "rules", "warn", f"others changed our rules: {'; '.join(state.drift)}; they are repaired at the start"
        )
    for note in rules.notes():
        yield Check("rules", "warn", note)
    used = state.conntrack_percent
    if used is not None and used > _MAX_CONNTRACK_PERCENT:
        text = f"the conntrack table is {used:.0f} % full"
        yield Check("rules", "refused", text, "raise net.netfilter.nf_conntrack_max")
        return
    yield Check("rules", "ok", "netfilter can be read" if used is None else f"conntrack table {used:.0f} % full")


def _host(paths: Paths) -> Iterator[Check]:
    if paths.host_drain.exists():
        yield Check("host", "warn", "the host is drained: load balancers send little, so a verdict takes long")
    else:
        yield Check("host", "ok", "not drained")


def now() -> Now:
    """The clocks that runs are timed by."""
    return Now(time.clock_gettime(time.CLOCK_BOOTTIME), time.time())
