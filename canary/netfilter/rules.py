"""The texts of our rules, and how to tell whether a saved rule is one of them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from canary.netfilter.model import (
    CANARY,
    GUARD,
    PROBABILITY_STEPS,
    TAG,
    TO_CANARY,
    TO_STABLE,
    Desired,
    Rule,
    Ruleset,
    Tokens,
    Weighted,
    options,
)

_SYN_FLAGS = ("FIN,SYN,RST,ACK", "SYN")
_SYN = ("--tcp-flags", *_SYN_FLAGS)
_RUN = re.compile(re.escape(TAG) + r"run=(\S+) weight=")


def _said(text: str) -> Tokens:
    return ("-m", "comment", "--comment", TAG + text)


def jump(desired: Desired, hook: str) -> Tokens:
    """Of nat PREROUTING or OUTPUT into our chain."""
    through = ("-o", "lo") if hook == "OUTPUT" else ()
    match = ("-p", "tcp", "-m", "tcp", "--dport", str(desired.port), *_SYN, "-m", "addrtype", "--dst-type", "LOCAL")
    return (*through, *match, *_said("new connections"), "-j", CANARY)


def weight_rules(desired: Desired) -> list[Tokens]:
    """All of APPLIANCE-CANARY. 0 and 100 percent need no dice."""
    rest = (*_said("the rest"), "-j", TO_STABLE)
    if desired.steps == 0:
        return [rest]
    said = _said(f"run={desired.run} weight={desired.weight:.12g}")
    if desired.steps == PROBABILITY_STEPS:
        return [(*said, "-j", TO_CANARY)]
    probability = f"{desired.weight / 100:.12f}"
    dice = ("-m", "statistic", "--mode", "random", "--probability", probability)
    return [(*dice, *said, "-j", TO_CANARY), rest]


def target_rules(desired: Desired) -> dict[str, list[Tokens]]:
    """The chains whose counters are the numbers of connections.

    DNAT with a port alone, not REDIRECT: REDIRECT also rewrites the address, to the interface's first one, where a
    gateway that listens on another address of the host does not answer.
    """
    to = ("-p", "tcp", *_said("to the canary"), "-j", "DNAT", "--to-destination", f":{desired.canary_port}")
    return {TO_CANARY: [to], TO_STABLE: [(*_said("to stable"), "-j", "RETURN")]}


def guard_jump(desired: Desired) -> Tokens:
    """Of filter INPUT. Only packets that begin a connection pass here."""
    match = ("-p", "tcp", "-m", "tcp", "--dport", str(desired.canary_port), *_SYN)
    return (*match, *_said("guard"), "-j", GUARD)


def guard_rules(desired: Desired) -> list[Tokens]:
    """All of APPLIANCE-GUARD: who did not come through `port`, nor is on this host, is refused at once."""
    match = ("!", "-i", "lo", "-p", "tcp", "-m", "conntrack", "!", "--ctorigdstport", str(desired.port))
    return [(*match, *_said("only through the port"), "-j", "REJECT", "--reject-with", "tcp-reset")]


def canonical(tokens: Sequence[str]) -> frozenset[tuple[bool, str, Tokens]]:
    """What a rule means, independent of how a version of iptables prints it: order, `--syn`, digits of a probability.
    Module names (-m) carry no meaning of their own."""
    meaning = set()
    for negated, option, values in options(tokens):
        if option == "-m":
            continue
        if option == "--syn":
            option, values = _SYN[0], _SYN[1:]
        if option == "--tcp-flags":
            values = tuple(",".join(sorted(value.split(","))) for value in values)
        if option == "--probability":
            values = tuple(map(_steps, values))
        if option == "-p" and values == ("6",):
            values = ("tcp",)
        meaning.add((negated, option, values))
    return frozenset(meaning)


def same(rule: Rule, tokens: Sequence[str]) -> bool:
    return rule.tokens == tuple(tokens) or canonical(rule.tokens) == canonical(tokens)


def same_rules(rules: Sequence[Rule], wanted: Sequence[Tokens]) -> bool:
    return len(rules) == len(wanted) and all(map(same, rules, wanted))


def _steps(probability: str) -> str:
    """As the kernel holds it. iptables prints 11 digits, which is finer than one of 2**31 steps."""
    try:
        return str(round(float(probability) * PROBABILITY_STEPS))
    except (ValueError, OverflowError):
        return probability


def weighted(ruleset: Ruleset) -> Weighted:
    """The weight that these rules have, and their counters."""
    nat = ruleset.table("nat")
    canary = sum(rule.packets for rule in nat.rules(TO_CANARY) if rule.target == "DNAT")
    stable = sum(rule.packets for rule in nat.rules(TO_STABLE) if rule.target == "RETURN")
    steps, run = _weight_of(nat.rules(CANARY))
    return Weighted(steps, run, canary, stable)


def _weight_of(rules: Sequence[Rule]) -> tuple[int | None, str | None]:
    if not rules:
        return None, None
    first = rules[0]
    if first.target == TO_STABLE:
        return 0, None
    found = _RUN.match(first.comment)
    if first.target != TO_CANARY or not found:
        return None, None
    probability = first.value("--probability")
    if probability is None:
        return PROBABILITY_STEPS, found[1]
    steps = _steps(probability)
    return (int(steps), found[1]) if steps.isdigit() else (None, found[1])
