"""plan(): cases as JSON (netfilter_cases/), and random hosts put through an interpreter of iptables-restore."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canary.netfilter import plan as planning
from canary.netfilter import rules
from canary.netfilter.model import (
    FILTER_CHAINS,
    NAT_CHAINS,
    Chain,
    Desired,
    Family,
    NetfilterError,
    Plan,
    Rule,
    Ruleset,
    State,
    Table,
    Transaction,
    Weighted,
)
from canary.netfilter.parse import parse_save, split

CASES = sorted((Path(__file__).parent / "netfilter_cases").glob("*.json"))
EXAMPLES = 2000 if os.environ.get("APPLIANCE_FULL") == "1" else 60


def read_case(path: Path) -> tuple[dict[str, Any], State, Desired]:
    case = json.loads(path.read_text())
    rulesets = {
        Family(family): parse_save("\n".join(lines) + "\n", Family(family)) for family, lines in case["save"].items()
    }
    return case, State(rulesets, case["anchor"]), msgspec.convert(case["desired"], Desired)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_case(path: Path) -> None:
    case, state, desired = read_case(path)
    planned = planning.plan(state, desired)
    shown = [
        [each.family.value if each.family else "inet", each.table, list(each.lines) if each.family else None]
        for each in planned.transactions
    ]
    assert shown == case["transactions"]
    assert bool(planned.drift) == bool(case["transactions"])
    notes = planning.notes(state, desired)
    assert len(notes) == len(case["notes"]), notes
    for note, words in zip(sorted(notes), sorted(case["notes"]), strict=True):
        assert words in note or any(words in other for other in notes)
    after = State({family: restore(ruleset, planned) for family, ruleset in state.rulesets.items()}, True)
    assert planning.plan(after, desired) == Plan()


def test_the_anchor_replaces_itself_in_one_transaction() -> None:
    """nft -f is one transaction; "table" first, so that "delete" never fails."""
    state = State({Family.IPV4: Ruleset(Family.IPV4)}, False)
    first = planning.plan(state, Desired(families=(Family.IPV4,))).transactions[0]
    assert first.argv == ["nft", "-f", "-"]
    assert first.lines[:2] == ("table inet appliance_anchor", "delete table inet appliance_anchor")


def test_a_transaction_never_flushes_what_is_not_ours() -> None:
    """Without --noflush iptables-restore empties the whole table."""
    for path in CASES:
        _, state, desired = read_case(path)
        for each in planning.plan(state, desired).transactions:
            if each.family:
                assert "--noflush" in each.argv and each.argv[-2:] == ["-w", "5"]
                assert all(line.split()[0].startswith(":APPLIANCE-") for line in each.lines if line.startswith(":"))
                assert each.text.startswith(f"*{each.table}\n") and each.text.endswith("\nCOMMIT\n")


@pytest.mark.parametrize(
    ("weight", "steps"),
    [(0, 0), (100, 2**31), (50, 2**30), (5, 107374182), (1e-12, 0), (100 / 2**31, 1), (99.9999999999, 2**31)],
)
def test_weights_are_whole_steps_of_the_kernel(weight: float, steps: int) -> None:
    """xt_statistic: probability * 2**31, rounded. 5 % is what iptables-save prints as 0.04999999981 (of 2**31)."""
    assert Desired(weight=weight, run="1").steps == steps


def test_rules_of_a_weight_are_read_back_as_that_weight() -> None:
    for weight in (0, 0.1, 5, 33.3, 99.9, 100):
        desired = Desired(weight=weight, run="r-1.2:3")
        nat = Table("nat", {"APPLIANCE-CANARY": Chain("APPLIANCE-CANARY")})
        nat.chains["APPLIANCE-CANARY"].rules = [Rule(tokens) for tokens in rules.weight_rules(desired)]
        found = rules.weighted(Ruleset(Family.IPV4, {"nat": nat}))
        assert (found.weight, found.run) == (pytest.approx(weight), desired.run if weight else None)


def test_rules_that_are_not_ours_have_no_weight() -> None:
    for text in ("-j APPLIANCE-TO-CANARY", "-m statistic --mode random --probability x -j APPLIANCE-TO-CANARY", "-j X"):
        nat = Table("nat", {"APPLIANCE-CANARY": Chain("APPLIANCE-CANARY", None, [Rule(split(text))])})
        assert rules.weighted(Ruleset(Family.IPV4, {"nat": nat})) == Weighted(None, None, 0, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"weight": -1, "run": "1"}, {"weight": 100.1, "run": "1"}, {"weight": float("nan"), "run": "1"},
        {"weight": 5}, {"run": "a b"}, {"run": 'x" -j ACCEPT'}, {"run": ""}, {"run": "r\n"}, {"port": 0},
        {"canary_port": 65536}, {"port": 8001}, {"families": ()}, {"families": (Family.IPV4, Family.IPV4)},
    ],
)  # fmt: skip
def test_what_cannot_be_desired(wrong: dict[str, Any]) -> None:
    with pytest.raises(NetfilterError):
        Desired(**wrong)


def test_counters_that_started_anew_are_added_not_subtracted() -> None:
    before = {Family.IPV4: (10, 100), Family.IPV6: (5, 7)}
    after = {Family.IPV4: (2, 101), Family.IPV6: (6, 7)}
    assert planning.observed(before, after) == {"canary": 3, "stable": 1}
    assert planning.observed({}, after) == {"canary": 8, "stable": 108}


# -- an interpreter of iptables-restore --noflush, as far as plans need it
def restore(ruleset: Ruleset, planned: Plan) -> Ruleset:
    """The ruleset after the transactions of its family. Fails where iptables-restore would: nothing to delete, a chain
    that is not there or still referred to, a number past the end."""
    tables = {name: _copy(table) for name, table in ruleset.tables.items()}
    for each in planned.transactions:
        if each.family is ruleset.family:
            table = tables.setdefault(each.table, Table(each.table))
            for builtin in ("INPUT", "OUTPUT", *(["PREROUTING"] if each.table == "nat" else [])):
                table.chains.setdefault(builtin, Chain(builtin, "ACCEPT"))
            _apply(table, each)
    return Ruleset(ruleset.family, tables)


def _copy(table: Table) -> Table:
    return Table(table.name, {c.name: Chain(c.name, c.policy, list(c.rules)) for c in table.chains.values()})


def _apply(table: Table, transaction: Transaction) -> None:
    for line in transaction.lines:
        verb, *tokens = split(line)
        if verb.startswith(":"):
            table.chains[verb[1:]] = Chain(verb[1:])
            continue
        name, *arguments = tokens
        chain = table.chains[name]
        if verb == "-A":
            chain.rules.append(Rule(tuple(arguments)))
        elif verb == "-I":
            assert 1 <= int(arguments[0]) <= len(chain.rules) + 1, line
            chain.rules.insert(int(arguments[0]) - 1, Rule(tuple(arguments[1:])))
        elif verb == "-D":
            chain.rules.remove(next(rule for rule in chain.rules if rule.tokens == tuple(arguments)))
        elif verb == "-X":
            assert not chain.rules and chain.policy is None
            assert not [rule for other in table.chains.values() for rule in other.rules if rule.target == name], line
            del table.chains[name]
        else:
            raise AssertionError(line)


FOREIGN = r"""
-j DOCKER
-p tcp -m tcp --dport 8000 -j ACCEPT
-p tcp -m multiport --dports 22,8000 -j DOCKER
-p udp -j DROP
-p tcp -m tcp --dport 8000:8001 -j DROP
-m comment --comment "a \"b\"" -j ACCEPT
-p tcp -m tcp ! --dport 8000 -j DROP
-s 10.0.0.0/8 -p tcp -m tcp --sport 7000:8000 -g DOCKER
-p tcp -m tcp --dport 9000 -j DNAT --to-destination :1
""".strip().splitlines()
BUILTIN = {"nat": ("PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"), "filter": ("INPUT", "FORWARD", "OUTPUT")}


def _ours(desired: Desired) -> list[tuple[str, ...]]:
    twin = (
        "-p",
        "tcp",
        "-m",
        "tcp",
        "--dport",
        "8001",
        "-m",
        "comment",
        "--comment",
        "appliance canary: twin",
        "-j",
        "X",
    )
    own = [rules.jump(desired, "PREROUTING"), rules.jump(desired, "OUTPUT"), rules.guard_jump(desired), twin]
    own += rules.weight_rules(desired) + rules.guard_rules(desired)
    return own + [rule for chain in rules.target_rules(desired).values() for rule in chain]


DESIRED = st.builds(
    Desired,
    weight=st.sampled_from([0, 5, 50, 99.9, 100]),
    run=st.just("9"),
    local_clients=st.booleans(),
    families=st.just((Family.IPV4,)),
    canary_port=st.sampled_from([8001, 9001]),
)


@st.composite
def hosts(draw: st.DrawFn) -> Ruleset:
    """Tables with rules of others and of ours, of other weights and ports, anywhere."""
    own = _ours(draw(DESIRED))
    rule = st.sampled_from([*map(split, FOREIGN), *own]).map(Rule)
    ruleset = Ruleset(Family.IPV4)
    for name, ours in (("nat", NAT_CHAINS), ("filter", FILTER_CHAINS)):
        if draw(st.integers(0, 9)) == 0:
            continue
        table = Table(name)
        for chain in [*BUILTIN[name], "DOCKER", *(each for each in ours if draw(st.booleans()))]:
            found = draw(st.lists(rule, max_size=4))
            table.chains[chain] = Chain(chain, "ACCEPT" if chain in BUILTIN[name] else None, found)
        ruleset.tables[name] = table
    return ruleset


def foreign(ruleset: Ruleset) -> dict[str, list[Rule]]:
    return {
        f"{table.name} {chain.name}": [rule for rule in chain.rules if not rule.ours]
        for table in ruleset.tables.values()
        for chain in table.chains.values()
        if not chain.name.startswith("APPLIANCE-") and any(not rule.ours for rule in chain.rules)
    }


def test_what_somebody_put_into_our_chains_leads_nowhere() -> None:
    """DOCKER would be reached by the guard chain's jump alone, which goes: its rule needs no twin (found by the test
    below)."""
    ruleset = Ruleset(Family.IPV4)
    ruleset.tables["filter"] = Table("filter", {name: Chain(name, "ACCEPT", []) for name in BUILTIN["filter"]})
    chains = ruleset.tables["filter"].chains
    chains["DOCKER"] = Chain("DOCKER", None, [Rule(split("-p tcp -m tcp --dport 8000 -j ACCEPT"))])
    chains["APPLIANCE-GUARD"] = Chain("APPLIANCE-GUARD", None, [Rule(split("-j DOCKER"))])
    desired = Desired(weight=0, run="9", local_clients=False, families=(Family.IPV4,), canary_port=8001)
    chains["INPUT"].rules.append(Rule(rules.guard_jump(desired)))
    after = restore(ruleset, planning.plan(State({Family.IPV4: ruleset}, True), desired))
    assert len(after.table("filter").rules("DOCKER")) == 1
    assert planning.plan(State({Family.IPV4: after}, True), desired) == Plan()


@given(hosts(), DESIRED)
@settings(max_examples=EXAMPLES, deadline=None)
def test_any_host_becomes_what_is_desired_and_others_rules_stay(ruleset: Ruleset, desired: Desired) -> None:
    state = State({Family.IPV4: ruleset}, True)
    after = restore(ruleset, planning.plan(state, desired))
    assert planning.plan(State({Family.IPV4: after}, True), desired) == Plan()
    assert foreign(after) == foreign(ruleset)
    assert rules.weighted(after).steps == desired.steps
    first = after.table("nat").rules("PREROUTING")[0]
    assert first.target == "APPLIANCE-CANARY" and "--tcp-flags" in first.tokens
    assert sum(rule.ours for rule in after.table("nat").rules("PREROUTING")) == 1


@given(hosts())
@settings(max_examples=EXAMPLES, deadline=None)
def test_removal_leaves_what_others_have_and_nothing_else(ruleset: Ruleset) -> None:
    after = restore(ruleset, planning.removal(State({Family.IPV4: ruleset}, True), anchor=True))
    assert foreign(after) == foreign(ruleset)
    names = [chain for table in after.tables.values() for chain in table.chains]
    assert not [name for name in names if name.startswith("APPLIANCE-")]
    assert not [rule for table in after.tables.values() for c in table.chains.values() for rule in c.rules if rule.ours]
    assert planning.removal(State({Family.IPV4: after}, False), anchor=True) == Plan()


def test_a_rollback_writes_only_what_is_declared_in_it() -> None:
    """The blind transaction: `:CHAIN` makes or empties the chain, whatever was there."""
    (only,) = planning.change_weight(Desired(families=(Family.IPV4,)))
    assert only.lines[0] == ":APPLIANCE-CANARY - [0:0]"
    assert [line.split()[0] for line in only.lines[1:]] == ["-A"]
