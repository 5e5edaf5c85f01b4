"""Reads the policy: healthcheck/policy.toml and what /etc/appliance/healthcheck.toml overrides. Every key and value is
checked; errors name the file, the row and what is allowed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from appliance.statefile import StateError, read_bounded
from appliance.tomlfile import NotToml, parse_toml
from healthcheck.machine_types import Needs
from healthcheck.policy_review import refuse
from healthcheck.policy_types import (
    KEY,
    RANGE,
    UNKNOWN_RULE,
    Attempts,
    Breaker,
    Decide,
    Decision,
    Deferred,
    Policy,
    PolicyError,
    Probation,
    Rule,
    Table,
    Timeouts,
    Together,
    action_name,
    normalise_key,
)
from healthcheck.types import Action

__all__ = [
    "SHIPPED",
    "Decision",
    "Policy",
    "PolicyError",
    "Rule",
    "action_name",
    "load_policy",
    "normalise_key",
    "parse_policy",
]

SCHEMA = 1
SHIPPED = Path(__file__).with_name("policy.toml")
_MAX_BYTES = 1 << 20


class _Row(Table, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A [[rule]] as it is written. In an override absent means: as before."""

    keys: Annotated[list[str], Meta(min_length=1, max_length=64)]
    title: str | None = None
    action: str | None = None
    then: str | None = None
    needs: Needs | None = None
    recheck: bool | None = None
    fallback: str | None = None
    deferrable: bool | None = None
    shared: bool | None = None
    muted: str | None = None
    max_resets: Annotated[int, Meta(ge=0, le=20)] | None = None
    peers: bool | None = None
    note: str | None = None
    source: str | None = None


def load_policy(override: Path | None = None, *, shipped: Path = SHIPPED) -> Policy:
    """The shipped policy with what `override` changes (a file that is not there changes nothing). PolicyError."""
    policy = _build(_read(shipped), str(shipped), None)
    if override is not None:
        try:
            data = _read(override)
        except FileNotFoundError:
            return policy
        policy = _build(data, str(override), policy)
    return policy


def parse_policy(data: bytes, *, where: str, base: Policy | None = None) -> Policy:
    """The policy in `data` (over `base`, where it is an override). PolicyError names `where`, the row and the key."""
    return _build(data, where, base)


def _read(path: Path) -> bytes:
    try:
        return read_bounded(path, _MAX_BYTES)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise PolicyError(f"cannot read {path}: {error.strerror}", hint="it has to be readable by root") from None
    except StateError as error:
        raise PolicyError(error.message, hint="this is no policy") from None


_SECTIONS: dict[str, type[Table]] = {
    "decide": Decide,
    "attempts": Attempts,
    "breaker": Breaker,
    "deferred": Deferred,
    "timeouts": Timeouts,
    "probation": Probation,
}


_KNOWN = ", ".join(("schema", *(f"[{name}]" for name in (*_SECTIONS, "limits")), "[[rule]]", "[[together]]"))


def _build(data: bytes, where: str, base: Policy | None) -> Policy:
    try:
        table = parse_toml(data, where)
    except NotToml as error:
        raise PolicyError(error.message, hint=error.hint) from None
    schema = table.pop("schema", None if base is None else SCHEMA)  # an override may leave it out
    if schema != SCHEMA or type(schema) is not int:
        raise PolicyError(f"{where}: schema {schema!r}, this version reads {SCHEMA}", hint=f"write schema = {SCHEMA}")
    if unknown := sorted(set(table) - set(_SECTIONS) - {"rule", "together", "limits"}):
        raise PolicyError(f"{where}: unknown key {unknown[0]!r}", hint=f"known: {_KNOWN}")
    sections: dict[str, Any] = {name: _section(table, name, base, where) for name in _SECTIONS}
    limits = table.get("limits", {})
    if not isinstance(limits, dict):
        raise PolicyError(f"{where}: limits is no table", hint="write [limits]")
    rules = dict(base.rules) if base else {}
    fresh: dict[str, str] = {}
    for row in _rows(table, "rule", where):
        for pattern in row.keys:
            if pattern in fresh:
                raise PolicyError(f"{where}: two rules for {pattern}", hint="keep one of them")
            fresh[pattern] = where
            rules[pattern] = _rule(row, pattern, base, where)
    _check_overlaps(rules, where)
    refuse(rules)
    together = {pair.keys: pair for pair in base.together} if base else {}
    for row in _rows(table, "together", where):
        pair = _together(row, rules, together.get(frozenset(row.keys)), where)
        together[pair.keys] = pair
    return Policy(
        rules=rules,
        together=tuple(together.values()),
        deciding=sections["decide"],
        attempts=sections["attempts"],
        breaker=sections["breaker"],
        deferred=sections["deferred"],
        timeouts=sections["timeouts"],
        probation=sections["probation"],
        limits=(dict(base.limits) if base else {}) | limits,
    )


def _section(table: dict[str, Any], name: str, base: Policy | None, where: str) -> Table:
    kind = _SECTIONS[name]
    written = table.get(name, {})
    if not isinstance(written, dict):
        raise PolicyError(f"{where}: {name} is no table", hint=f"write [{name}]")
    before = getattr(base, "deciding" if name == "decide" else name) if base else None
    values = (msgspec.structs.asdict(before) if before else {}) | written
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.__struct_fields__)
        raise PolicyError(f"{where}: [{name}] {error}", hint=f"known keys: {known}") from None


def _rows(table: dict[str, Any], name: str, where: str) -> list[_Row]:
    written = table.get(name, [])
    if not isinstance(written, list):
        raise PolicyError(f"{where}: {name} is no array of tables", hint=f"write [[{name}]]")
    rows = []
    for number, row in enumerate(written, 1):
        try:
            rows.append(msgspec.convert(row, _Row))
        except msgspec.ValidationError as error:
            known = ", ".join(_Row.__struct_fields__)
            raise PolicyError(f"{where}: [[{name}]] {number}: {error}", hint=f"known keys: {known}") from None
    return rows


_ACTIONS = {action.name.lower(): action for action in Action}


def _action(text: str, place: str) -> Action:
    try:
        return _ACTIONS[text]
    except KeyError:
        raise PolicyError(f"{place}: no action {text!r}", hint=f"one of {', '.join(_ACTIONS)}") from None


def _rule(row: _Row, pattern: str, base: Policy | None, where: str) -> Rule:
    place = f"{where}: rule {pattern}"
    before = _before(pattern, base, place)
    _check_pattern(pattern, place)
    if before is None and (row.action is None or row.title is None or row.note is None or not row.source):
        raise PolicyError(f"{place}: a new rule needs title, action, note and source", hint="add what is missing")
    rule = before or Rule(pattern, row.title or "", Action.NONE, "", "")
    given = {f.name: getattr(row, f.name) for f in fields(Rule) if getattr(row, f.name, None) is not None}
    for name in ("action", "then", "fallback"):
        if name in given:
            given[name] = _action(given[name], place)
    rule = replace(rule, **given, pattern=pattern, where=where)
    _check_rule(rule, place)
    return rule


def _before(pattern: str, base: Policy | None, place: str) -> Rule | None:
    """The rule that an override changes."""
    if base is None:
        return None
    if found := base.rules.get(pattern):
        return found
    if pattern.rpartition(":")[2] == "*" or RANGE.fullmatch(pattern.partition(":")[2]):
        return None
    found = base.rule(pattern)
    if found is UNKNOWN_RULE:
        families = sorted({known.partition(":")[0] for known in base.rules})
        raise PolicyError(f"{place}: no such signal", hint=f"names start with {', '.join(families)}")
    return found


def _check_pattern(pattern: str, place: str) -> None:
    match = KEY.fullmatch(pattern)
    span = RANGE.fullmatch(match["name"]) if match else None
    if match is None or (span and int(span[1]) >= int(span[2])):
        raise PolicyError(f"{place}: not a pattern", hint='like "xid:79", "xid:39-41", "clocks:*"')
    name, numeric = match["name"], match["family"] in ("xid", "sxid", "recovery_action")
    is_number = bool(span) or name.isdecimal()
    if name != "*" and numeric != is_number:
        raise PolicyError(f"{place}: a number belongs to xid:, sxid: and recovery_action: only", hint='like "xid:79"')


def _check_rule(rule: Rule, place: str) -> None:
    if rule.then not in (Action.NONE, Action.DEFERRED_RESET):
        raise PolicyError(f"{place}: then can be deferred_reset only", hint="remove it")
    if rule.then != Action.NONE and rule.action != Action.RESTART_ENGINE:
        raise PolicyError(f"{place}: then belongs to restart_engine", hint="remove it")
    if rule.muted not in ("", "stop", "reset"):
        raise PolicyError(f"{place}: muted is {rule.muted!r}", hint='"stop", "reset" or ""')
    if rule.fallback is not None and not rule.recheck:
        raise PolicyError(f"{place}: fallback without recheck", hint="write recheck = true")
    if rule.deferrable and rule.action == Action.ABORT_RESET:
        raise PolicyError(f"{place}: what aborts requests cannot be deferrable", hint="use drain_reset")
    if rule.action == Action.DEFERRED_RESET and not rule.deferrable:
        raise PolicyError(f"{place}: a deferred reset is deferrable", hint="write deferrable = true")


def _check_overlaps(rules: Mapping[str, Rule], where: str) -> None:
    """Two ranges that share a number would leave it to their order which counts."""
    spans = []
    for pattern in rules:
        if span := RANGE.fullmatch(pattern.partition(":")[2]):
            spans.append((int(span[1]), int(span[2]), pattern))
    spans.sort()
    for (_, end, one), (start, _, other) in itertools.pairwise(spans):
        if start <= end:
            raise PolicyError(f"{where}: {one} and {other} overlap", hint="split one of them")


def _together(row: _Row, rules: Mapping[str, Rule], before: Together | None, where: str) -> Together:
    keys = frozenset(row.keys)
    place = f"{where}: together {'+'.join(row.keys)}"
    for key in keys:
        _check_pattern(key, place)
        if not re.fullmatch(r"[a-z_]+:[a-z0-9_]+", key):
            raise PolicyError(f"{place}: {key} is a pattern", hint="name single signals")
    if len(keys) < 2:
        raise PolicyError(f"{place}: one signal alone", hint="use [[rule]]")
    pattern = "+".join(row.keys)
    if before is None and (row.action is None or row.note is None or not row.source):
        raise PolicyError(f"{place}: needs action, note and source", hint="add what is missing")
    title = " and ".join(rules[key].title if key in rules else key for key in row.keys)
    rule = before.rule if before else Rule(pattern, title, Action.NONE, "", "")
    given = {f.name: getattr(row, f.name) for f in fields(Rule) if getattr(row, f.name, None) is not None}
    for name in ("action", "then", "fallback"):
        if name in given:
            given[name] = _action(given[name], place)
    rule = replace(rule, **given, where=where)
    _check_rule(rule, place)
    return Together(keys, rule)
