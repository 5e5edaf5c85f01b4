"""What an override may not say (it contradicts a rule of healthcheck/README.md), and what it had better not. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from healthcheck.limits import read_limits
from healthcheck.policy_types import Policy, PolicyError, Rule, action_name
from healthcheck.types import Action

CORRECTED = ("ecc:corrected", "ecc:corrected_rate", "xid:92")  # 92: the catalogue's high rate of single bit errors
UNKNOWN = ("probe:hung", "nvml:driver_mismatch", "trial:")  # not probed, the host's driver, a release on trial
_ASKED_FOR = "recovery_action:"  # NVML itself asks for it, also with a number that only a newer one knows
_MANY_RESETS = 4
_OFTEN = 5.0  # s


def strongest(rule: Rule) -> Action:
    """What a rule may lead to."""
    return max(rule.action, rule.fallback or Action.NONE, rule.then)


def refuse(rules: Mapping[str, Rule]) -> None:
    """PolicyError names the file, the row and the rule of the README that it breaks."""
    table = [(rule, why) for rule in rules.values() if strongest(rule) > Action.ALERT and (why := _forbidden(rule))]
    for rule, why in table:
        raise PolicyError(
            f"{rule.where}: rule {rule.pattern}: {action_name(strongest(rule))} is refused: {why}",
            hint='"alert" or "none" is allowed here; README of healthcheck/: the three rules',
        )


def _forbidden(rule: Rule) -> str | None:
    pattern = rule.pattern
    if pattern in CORRECTED:
        return "corrected errors never drain, they are corrected"
    if pattern.startswith(UNKNOWN):
        return "unknown is no reason to act"
    if pattern.endswith(":*") and not pattern.startswith(_ASKED_FOR):
        return "a catch-all stands for what nobody knows, and unknown is no reason to act; name the signals"
    return None


def warnings(policy: Policy, shipped: Policy) -> Iterator[str]:
    """What is allowed and looks like a mistake."""
    for pattern, rule in policy.rules.items():
        before = shipped.rule(pattern) if not pattern.endswith("*") and "-" not in pattern else None
        if before is not None and strongest(before) <= Action.ALERT < strongest(rule):
            yield f"{pattern} leads to {action_name(strongest(rule))}; as shipped it is only told"
    least, given = shipped.timeouts.reset, policy.timeouts.reset
    if given < least:
        yield f"[timeouts] reset = {given:g} s is less than the reset unit may take ({least:g} s): its GPU is given up"
    if policy.attempts.resets > _MANY_RESETS:
        yield f"[attempts] resets = {policy.attempts.resets}: what {shipped.attempts.resets} do not cure none will"
    limits, usual = read_limits(policy.limits), read_limits(shipped.limits)
    if limits.probe_interval < _OFTEN:
        yield f"[limits] probe_interval = {limits.probe_interval:g} s: a reading costs a GPU tens of milliseconds"
    if limits.probe_deadline < usual.probe_deadline:
        yield (
            f"[limits] probe_deadline = {limits.probe_deadline:g} s: calls into a sick driver return after 45 s: "
            "what is killed earlier is never read"
        )
    if limits.reading_stale < 2 * limits.probe_interval:
        yield "[limits] reading_stale is less than two probe intervals: one that is missed makes everything unknown"
