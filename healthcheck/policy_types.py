"""The policy as it is used: rules, decisions, and what `healthcheck explain` says. Pure; policy.py reads it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from appliance.log import ApplianceError, ExitCode
from healthcheck.machine_types import Needs
from healthcheck.types import Action, Signal

KEY = re.compile(r"(?P<family>[a-z_]{1,32}):(?P<name>[a-z0-9_]{1,48}|\*|[0-9]{1,5}-[0-9]{1,5})")
RANGE = re.compile(r"([0-9]{1,5})-([0-9]{1,5})")

Seconds = Annotated[float, Meta(ge=0, le=365 * 86400)]
Timeout = Annotated[float, Meta(ge=0.05, le=7 * 86400)]
Count = Annotated[int, Meta(ge=1, le=100)]


class PolicyError(ApplianceError):
    """The policy cannot be used; names file, row and key. A restart does not help, so the unit does not retry it."""

    exit_code = ExitCode.REFUSED


class Table(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    pass


class Decide(Table, kw_only=True, frozen=True, forbid_unknown_fields=True):
    duplicate_window: Seconds
    partner_wait: Seconds
    recheck_timeout: Timeout
    peers_timeout: Timeout
    peers_window: Seconds
    common_window: Seconds
    common_gpus: Annotated[int, Meta(ge=2, le=1024)]


class Attempts(Table, kw_only=True, frozen=True, forbid_unknown_fields=True):
    resets: Annotated[int, Meta(ge=0, le=20)]
    window: Timeout
    resets_per_week: Annotated[int, Meta(ge=0, le=100)]
    restarts: Annotated[int, Meta(ge=0, le=100)]
    retry_delay: Seconds


class Breaker(Table, kw_only=True, frozen=True, forbid_unknown_fields=True):
    max_out: Annotated[int, Meta(ge=0, le=1024)] | None = None

    def limit(self, gpus: int) -> int:
        """How many of a host's `gpus` GPUs automation may have out of service at once."""
        return max(1, gpus // 2) if self.max_out is None else self.max_out


class Deferred(Table, kw_only=True, frozen=True, forbid_unknown_fields=True):
    quiet: Seconds
    max_wait: Seconds


class Timeouts(Table, kw_only=True, frozen=True, forbid_unknown_fields=True):
    drain: Timeout
    stop: Timeout
    reset: Timeout
    turn: Timeout
    start: Timeout
    warmup: Timeout
    verify: Timeout
    probation: Seconds
    mute_after_reset: Seconds
    reissue: Annotated[float, Meta(ge=1, le=3600)]


class Probation(Table, kw_only=True, frozen=True, forbid_unknown_fields=True):
    share: Annotated[float, Meta(gt=0, le=1)]


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table for one pattern; policy.toml says what each field means."""

    pattern: str
    title: str
    action: Action
    note: str
    source: str
    then: Action = Action.NONE
    needs: Needs = Needs.HUMAN
    recheck: bool = False
    fallback: Action | None = None
    deferrable: bool = False
    shared: bool = False
    muted: str = ""  # "", "stop" or "reset"
    max_resets: int | None = None
    peers: bool = False
    where: str = ""  # the file


@dataclass(frozen=True, slots=True)
class Together:
    """Signals of one GPU that mean something else together than alone."""

    keys: frozenset[str]
    rule: Rule


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be done about the signals of one GPU."""

    action: Action
    cause: str  # the key that decided ("xid:48+xid:63" for two together)
    detail: str
    rule: Rule
    then: Action = Action.NONE  # afterwards, or NONE


UNKNOWN_RULE = Rule("*", "signal without a rule", Action.ALERT, "Unknown is no reason to act.", "", where="built in")


@dataclass(frozen=True, slots=True)
class Policy:
    rules: Mapping[str, Rule]  # by pattern
    together: tuple[Together, ...]
    deciding: Decide
    attempts: Attempts
    breaker: Breaker
    deferred: Deferred
    timeouts: Timeouts
    probation: Probation
    limits: Mapping[str, Any]  # thresholds; checked by healthcheck.checks, which owns them

    def rule(self, key: str) -> Rule:
        """The most exact rule for a signal's key; one that only alerts where there is none."""
        if exact := self.rules.get(key):
            return exact
        family, _, name = key.partition(":")
        if name.isascii() and name.isdecimal():
            for pattern, rule in self.rules.items():
                span = RANGE.fullmatch(pattern.removeprefix(f"{family}:"))
                if span and int(span[1]) <= int(name) <= int(span[2]):
                    return rule
        return self.rules.get(f"{family}:*", UNKNOWN_RULE)

    def waits(self, key: str) -> bool:
        """True where another signal may still change what this one means."""
        return any(key in pair.keys for pair in self.together)

    def decide(self, signals: Sequence[Signal], *, recovery_action: int | None, rechecked: bool = True) -> Decision:
        """What to do about the signals of one GPU.

        `recovery_action` is what NVML says now (None: not known), `rechecked` whether anybody asked. The strongest
        action wins; of two equal ones that which cannot be deferred, then the first.
        """
        if not signals:
            raise ValueError("no signal, nothing to decide")
        details = {signal.key: signal.detail for signal in reversed(signals)}
        asked = dict.fromkeys(signal.key for signal in signals)
        if recovery_action is not None:
            asked.setdefault(f"recovery_action:{recovery_action}")
            details.setdefault(f"recovery_action:{recovery_action}", "read from NVML")
        known = recovery_action is not None or not rechecked
        options = [(key, self.rule(key)) for key in asked]
        for pair in self.together:
            if pair.keys <= asked.keys():
                first = next(key for key in asked if key in pair.keys)
                details[pair.rule.pattern] = details[first]
                options = [option for option in options if option[0] not in pair.keys]
                options.append((pair.rule.pattern, pair.rule))
        ranked = [(self._effective(rule, known), not rule.deferrable, -order, key, rule)
                  for order, (key, rule) in enumerate(options)]  # fmt: skip
        action, _, _, key, rule = max(ranked, key=lambda option: option[:3])
        then = max((rule.then for _, rule in options), default=Action.NONE)
        if action == Action.RESTART_ENGINE and any(r.action == Action.DEFERRED_RESET for _, r in options):
            then = Action.DEFERRED_RESET  # the restart does not activate the remapped row
        return Decision(action, key, details[key], rule, then if action == Action.RESTART_ENGINE else Action.NONE)

    @staticmethod
    def _effective(rule: Rule, known: bool) -> Action:
        return rule.action if known or rule.fallback is None else rule.fallback

    def explain(self, key: str) -> list[str]:
        """What would happen and why, in lines for people. `key` like "xid:79"; "79" and "Xid 79" mean that too."""
        key = normalise_key(key)
        rule = self.rule(key)
        needs = f" (then {rule.needs} is asked for)" if rule.action >= Action.RESTART_ENGINE else ""
        lines = [f"{key}: {rule.title}", f"action: {action_name(rule.action)}{needs}"]
        if rule is UNKNOWN_RULE:
            lines.append("no rule names it, nor its family: nothing of ours signals it, as far as this policy knows")
        elif rule.pattern.endswith(":*"):
            lines.append(f"no rule names it: this is the catch-all {rule.pattern}")
        lines += [text for wanted, text in _remarks(rule, self) if wanted]
        for pair in self.together:
            if key in pair.keys:
                others = ", ".join(sorted(pair.keys - {key}))
                lines.append(f"with {others}: {action_name(pair.rule.action)}. {pair.rule.note}")
        lines += [f"why: {rule.note}"] if rule.note else []
        return lines + [f"source: {rule.source or 'none'}", f"rule: {rule.pattern} in {rule.where}"]


def _remarks(rule: Rule, policy: Policy) -> Iterable[tuple[bool, str]]:
    resets = policy.attempts.resets if rule.max_resets is None else min(rule.max_resets, policy.attempts.resets)
    resetting = rule.then == Action.DEFERRED_RESET or Action.DEFERRED_RESET <= rule.action <= Action.ABORT_RESET
    fallback = action_name(rule.action if rule.fallback is None else rule.fallback)
    hours = policy.attempts.window / 3600
    yield rule.then != Action.NONE, f"then: {action_name(rule.then)}"
    yield rule.recheck, f"first: the recovery action is read again, the stronger counts; not known: {fallback}"
    yield rule.peers, "first: held, and the other GPUs are asked; the same on two of them resets nothing"
    yield rule.deferrable, "the last serving GPU is left in service"
    yield (
        rule.shared,
        f"on {policy.deciding.common_gpus} GPUs within {policy.deciding.common_window:g} s: automation stops",
    )
    yield bool(rule.muted), f"not counted while our own {rule.muted} brings it about"
    yield resetting, f"at most {resets} resets in {hours:g} h, then quarantine (needs {rule.needs})"


def action_name(action: Action) -> str:
    return action.name.lower().replace("_", " ")


def normalise_key(text: str) -> str:
    """ "79", "Xid 79", "XID:79" -> "xid:79". PolicyError where it is no key."""
    text = text.strip().lower()
    if match := re.fullmatch(r"(?:xid)?[ :]*([0-9]{1,5})", text):
        return f"xid:{int(match[1])}"
    match = KEY.fullmatch(text)
    if match is None or not re.fullmatch(r"[a-z0-9_]+", match["name"]):
        raise PolicyError(f"{text!r} is no signal", hint='like "79", "xid:79" or "ecc:uncorrected"')
    return text
