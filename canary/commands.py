"""What may be asked of the controller over its socket. One op, one reply; errors carry a hint and an exit code.

status check start retry undo pause resume promote rollback weight rules cleanup
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from appliance.launcher.control_server import Client, failure
from appliance.log import ApplianceError, BusyError, UsageError
from appliance.slots import pointer, set_slot
from canary import happenings, undoing
from canary.controller import Controller
from canary.placement import Placement
from canary.preflight import Check, Start, busy, now, run_checks
from canary.run import MAX_REASON_CHARS, Hook, Phase, Run, check_policy, to_state
from canary.seams import Rules
from canary.settings import load_settings, merge, without
from canary.store import Store, boot_id
from canary.types import Policy
from canary.worker import Worker

Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a new run shall be like."""

    start: Start
    policy: Policy
    hooks: list[Hook]
    warnings: tuple[Check, ...] = ()


class Commands:
    """`handle` is what a ControlServer calls. Preflights run in a thread of their own: they ask launchers."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._waiting: dict[str, tuple[Client, Callable[[Any], Answer]]] = {}
        self._worker = Worker(controller.loop, "preflight", self._checked)
        self._number = 0

    def close(self) -> None:
        self._worker.close()

    def handle(self, request: dict[str, Any], client: Client) -> None:
        op = str(request.pop("op"))
        request.pop("timeout", None)
        try:
            answer = self._answer(op, request, client)
        except ApplianceError as error:
            answer = failure(error.message, hint=error.hint, code=error.exit_code)
        if answer is not None:
            client.reply(answer)

    def _answer(self, op: str, request: dict[str, Any], client: Client) -> Answer | None:
        by = _text(request.pop("by", f"uid {client.uid}"), "by", 64)
        if op == "status":
            return self.status()
        if op == "undo" and (taken := self._take_back(request, by)) is not None:
            return taken
        if op in ("check", "start", "retry", "undo"):
            self._preflight(op, request, client, by)
            return None
        if op == "rules":
            return rules_answer(self._controller.parts.rules)
        if op == "cleanup":
            return self._cleanup()
        run = self._run(request.pop("run", None))
        if op == "rollback":
            return self._rollback(run, request, by)
        event: happenings.Event
        if op == "pause":
            event = happenings.Pause(_text(request.pop("reason", "by hand"), "reason", MAX_REASON_CHARS), by)
        elif op == "resume":
            event = happenings.Resume(by)
        elif op == "promote":
            event = happenings.Promote(by, bool(request.pop("full", False)))
        elif op == "weight":
            event = happenings.SetWeight(by, self._checked_weight(request.pop("weight", None)))
        else:
            raise UsageError(f"unknown op {op!r}")
        self._controller.handle(event)
        return self.status()

    def _run(self, pinned: Any) -> Run:
        """The present run; a command that names another one is refused, so that it never hits a newer one."""
        run = self._controller.run
        if run is None:
            text, hint = self._controller.store.no_run()
            raise happenings.Refused(text, hint=hint)
        if pinned not in (None, run.id):
            raise happenings.Refused(f"run {pinned} is not the present one, {run.id} is", hint="`canary list`")
        return run

    def status(self) -> Answer:
        """The run and what is known beside it; no subprocess, no socket."""
        controller, observer = self._controller, self._controller.observer
        live = controller.live
        run = controller.run
        boot, at = now().boot, controller.loop.time()
        return {
            "ok": True, "schema": 1, "controller": True, "run": to_state(run) if run else None, "boot": boot,
            "live": {
                "rule": live.rule, "rule_seconds": live.rule_seconds, "rule_error": live.rule_error,
                "drift": live.drift, "in_work": live.count("in_work", at), "draining": live.count("draining", at),
                "alive": observer.alive if observer else None,
                "observed": observer.observed() if observer else None,
                "samples": msgspec.to_builtins(observer.reading) if observer and observer.reading else None,
            },
        }  # fmt: skip

    def _checked_weight(self, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 100:
            raise UsageError(f"weight {value!r} is no number from 0 to 100")
        run = self._run(None)
        if run.placement == "exclusive" and value > run.target:
            raise happenings.Refused(
                f"placement is exclusive: this step's GPUs carry {run.target:g} %", hint="promote first"
            )
        return float(value)

    def _rollback(self, run: Run, request: dict[str, Any], by: str) -> Answer:
        drain = request.pop("drain", 60.0)
        if isinstance(drain, bool) or not isinstance(drain, int | float) or not 0 <= drain <= 86400:
            raise UsageError(f"drain {drain!r} is no number of seconds")
        reason = _text(request.pop("reason", "by hand"), "reason", MAX_REASON_CHARS)
        self._controller.handle(happenings.Abort(reason, by, float(drain)))
        return self.status()

    def _take_back(self, request: dict[str, Any], by: str) -> Answer | None:
        """`canary undo` in the bake: the old engines are there, so no new run is needed. None: not in the bake."""
        run = self._controller.run
        if run is None or not run.kept or request.get("to") not in (None, run.id):
            return None
        self._controller.handle(happenings.Abort("undo", by, run.policy.settle_seconds))
        return self.status() | {"checks": [], "before": run.release, "after": run.stable}

    # -- starting
    def _preflight(self, op: str, request: dict[str, Any], client: Client, by: str) -> None:
        wanted = self._wanted(op, request)
        start, policy, hooks = wanted.start, wanted.policy, wanted.hooks
        controller, parts = self._controller, self._controller.parts
        policy = check_policy(policy, controller.placement.fleet().config.engine.placement)

        def checks(_: Any) -> list[Check]:
            paths = controller.store.paths
            releases = {"canary": start.release}
            samples = parts.samples(policy, releases)
            return [*wanted.warnings, *run_checks(paths, controller.placement, parts.rules, samples, start, now())]

        def answer(found: list[Check]) -> Answer:
            shown = {"checks": [check.as_dict() for check in found], "policy": msgspec.to_builtins(policy)}
            blocking = [check for check in found if check.blocks]
            if op == "check":
                return {"ok": True, "passed": not blocking, **shown}
            if blocking:
                first = blocking[0]
                text = f"refused: {'; '.join(dict.fromkeys(check.text for check in blocking))}"
                return failure(text, hint=first.hint, code=first.code) | shown
            run = self._new(start, policy, by)
            controller.begin(msgspec.structs.replace(run, hooks=hooks))
            controller.poke()
            return self.status() | shown | {"before": run.stable, "after": run.release}

        self._number += 1
        key = f"preflight {self._number}"
        self._waiting[key] = client, answer
        self._worker.submit(key, checks)

    def _checked(self, key: str, result: Any) -> None:
        client, answer = self._waiting.pop(key)
        try:
            if isinstance(result, ApplianceError):
                raise result
            if isinstance(result, Exception):
                client.reply(failure(f"internal error: {type(result).__name__}: {result}"))
                return
            client.reply(answer(result))
        except ApplianceError as error:
            client.reply(failure(error.message, hint=error.hint, code=error.exit_code))

    def _wanted(self, op: str, request: dict[str, Any]) -> Wanted:
        if op == "retry":
            last = self._run(None)
            if last.phase not in (Phase.ABORTED, Phase.FAILED):
                raise happenings.Refused(f"run {last.id} is {last.phase}", hint="retry is for failed and aborted runs")
            start = Start(
                release=last.release, manual=last.manual, dry_run=last.dry_run, ignore_cooldown=True,
                other_model_name=last.other_model_name,
            )  # fmt: skip
            return self._as_before(start, last)
        if op == "undo":
            return self._undo(request)
        settings = load_settings(self._controller.store.paths.canary_config)
        try:
            start = msgspec.convert(request, Start)
        except msgspec.ValidationError as error:
            raise UsageError(f"start: {error}") from None
        policy = merge(settings.policy, start.policy)
        return Wanted(start, without(policy, "itl") if start.no_itl else policy, settings.hooks)

    def _as_before(self, start: Start, last: Run) -> Wanted:
        """With the policy of that run, so a canary.toml that cannot be used is no reason not to: its hooks, too."""
        try:
            return Wanted(start, last.policy, load_settings(self._controller.store.paths.canary_config).hooks)
        except ApplianceError as error:
            text = f"{error.message}: the hooks of run {last.id} are used"
            return Wanted(start, last.policy, last.hooks, (Check("settings", "warn", text, error.hint),))

    def _undo(self, request: dict[str, Any]) -> Wanted:
        """Back to what served before the last settled run, or run `to`."""
        if (on := self._controller.run) is not None and not on.over:
            text, end = busy(on)
            raise BusyError(text, hint=end)
        store, force = self._controller.store, request.pop("force", False) is True
        serving = pointer(store.paths, "stable")
        last = undoing.former(store.history(), serving, request.pop("to", None), force=force)
        start = Start(release=last.stable, skip_analysis=True, ignore_cooldown=True, other_model_name=True)
        return self._as_before(start, last)

    def _new(self, start: Start, policy: Policy, by: str) -> Run:
        controller, at = self._controller, now()
        stable = pointer(controller.store.paths, "stable")
        assert stable is not None  # a check said so
        return Run(
            id=controller.store.next_id(), release=start.release, stable=stable, policy=policy, boot_id=boot_id(),
            created_at=at.utc, by=by, placement=controller.placement.fleet().config.engine.placement,
            manual=start.manual, dry_run=start.dry_run, skip_analysis=start.skip_analysis,
            other_model_name=start.other_model_name, seq=1, entered=at.boot,
            entered_at=at.utc, progress=at.boot,
            last_event={"event": "created", "seq": 1, "phase": "starting", "by": by, "steps": policy.steps},
        )  # fmt: skip

    # -- rules and leftovers
    def _cleanup(self) -> Answer:
        controller = self._controller
        return {
            "ok": True,
            "done": clean_up(controller.store, controller.placement, controller.parts.rules, controller.run),
        }


def rules_answer(rules: Rules) -> Answer:
    """What `canary rules` shows."""
    state = rules.read()
    return {
        "ok": True, "weight": state.weight, "run": state.run, "drift": list(state.drift), "diff": rules.diff(),
        "counters": rules.counters(), "draining": rules.draining(), "conntrack_percent": state.conntrack_percent,
        "notes": rules.notes(),
    }  # fmt: skip


def clean_up(store: Store, placement: Placement, rules: Rules, run: Run | None) -> list[str]:
    """After runs of earlier versions, tests, hands: rule at 0, canary slot empty, marker gone. Says what it did.
    Used by the holder of Store.controlling()."""
    if run is not None and not run.over:
        raise happenings.Refused(f"run {run.id} is {run.phase}", hint="`canary rollback` ends it in order")
    done = rules.repair()
    if weight := rules.read().weight:
        done.append(f"the rule sent {weight:g} % to the canary; it is at 0 now")
    rules.set_weight(run.id if run else "0", 0.0)
    if (release := pointer(store.paths, "canary")) is not None:
        set_slot(store.paths, "canary", None)
        fleet = placement.fleet()
        for gpu in fleet.survey()[0]:
            fleet.call(gpu, "sync", wait=False, timeout=30.0)
        done.append(f"the slot canary pointed at {release}; it is empty now")
    store.mark(None, None)
    store.clear_abort()
    return done


def _text(value: Any, key: str, limit: int) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= limit or not value.isprintable():
        raise happenings.Refused(f"{key}: not usable", hint=f"1 to {limit} printable characters")
    return value
