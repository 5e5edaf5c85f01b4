"""Every key that a probe can signal has a row of its own in the shipped policy: none falls to a catch-all unseen."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import healthcheck
from healthcheck.policy import load_policy

POLICY = load_policy()
FOLDER = Path(healthcheck.__file__).parent
KEY = re.compile(r"[a-z_]+:[a-z0-9_]+")
_FAMILY = re.compile(r"([a-z_]+):[a-z0-9_]*")
NUMBERED = {"xid", "sxid", "recovery_action"}  # families whose names are numbers of the driver: a row for the rest
NO_SIGNALS = {
    "ledger:incomplete": "machine_turn.py: the cause of an incident whose ledger somebody edited",
    "engine:failed": "machine.py: the key of an alert",
}


def emitted() -> Iterator[tuple[str, str]]:
    """(key or "family:*", where) of every string in the code that looks like a key, literal or put together."""
    for path in sorted(FOLDER.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path.name}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and KEY.fullmatch(node.value):
                yield node.value, where
            if isinstance(node, ast.JoinedStr) and (match := _FAMILY.fullmatch(_beginning(node))):
                yield f"{match[1]}:*", where


def _beginning(text: ast.JoinedStr) -> str:
    """What an f-string says before its first value."""
    first = text.values[0]
    return str(first.value) if isinstance(first, ast.Constant) and len(text.values) > 1 else ""


FOUND = dict(emitted())


@pytest.mark.parametrize("key", sorted(set(FOUND) - set(NO_SIGNALS)))
def test_every_key_that_the_code_emits_has_its_own_row(key: str) -> None:
    family, _, name = key.partition(":")
    if name == "*":
        assert family in NUMBERED, f"{FOUND[key]}: spell the keys of {family}: out, so that they are seen here"
    assert key in POLICY.rules, f"{FOUND[key]} signals {key}, healthcheck/policy.toml has no row for it"


def test_the_code_is_really_searched() -> None:
    """Some that are known to be there, one of each way to signal."""
    known = {"ecc:uncorrected", "clocks:slowdown", "nvlink:errors", "gpu:off_the_bus", "sxid:*", "xid:*", "probe:hung"}
    assert known | {"golden:mismatch", "engine:stalled", "nvml:gpu_is_lost"} <= set(FOUND)


def test_exceptions_are_still_there() -> None:
    assert set(NO_SIGNALS) <= set(FOUND)
