"""plan(state, desired) -> Plan: pure. Every transaction is whole or not at all, and harmless if repeated.

Order: the anchor, then the guard and the twins before connections come, then the weight; where the weight falls it
comes first. A transaction never names what is not there, so that none fails for want of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from canary.netfilter import rules, twins
from canary.netfilter.model import (
    ANCHOR,
    CANARY,
    FILTER_CHAINS,
    GUARD,
    NAT_CHAINS,
    Chain,
    Desired,
    Family,
    Plan,
    Rule,
    Ruleset,
    State,
    Table,
    Tokens,
    Transaction,
)
from canary.netfilter.parse import join

Wanted = Callable[[State], Desired]

# An expression takes hold of conntrack when it is made, reached by packets or not (nft_ct.c:nft_ct_get_init); an empty
# base chain of type nat takes hold of NAT (nft_chain_nat.c). "table, delete, table" replaces it in one transaction.
_ANCHOR = (
    f"table inet {ANCHOR}",
    f"delete table inet {ANCHOR}",
    f"table inet {ANCHOR} {{",
    "    chain conntrack {",
    "        ct state new",
    "    }",
    "    chain nat {",
    "        type nat hook prerouting priority -100; policy accept;",
    "    }",
    "}",
)


def plan(state: State, desired: Desired) -> Plan:
    """What to run so that `state` becomes `desired`; nothing where it already is."""
    drift: list[str] = []
    anchor: list[Transaction] = []
    filters: list[Transaction] = []
    nats: list[Transaction] = []
    if not state.anchor:
        drift.append("the anchor of conntrack is missing")
        anchor.append(Transaction(None, ANCHOR, _ANCHOR))
    falls = False
    for family in desired.families:
        ruleset = state.rulesets[family]
        before = rules.weighted(ruleset).steps or 0
        falls |= desired.steps < before
        for name, make, into in (("filter", _filter, filters), ("nat", _nat, nats)):
            lines, found = make(ruleset.table(name), desired)
            drift += [f"{family} {name}: {line}" for line in found]
            if lines:
                into.append(Transaction(family, name, tuple(lines)))
    ordered = [*nats, *filters] if falls else [*filters, *nats]
    return Plan((*anchor, *ordered), tuple(drift))


def change_weight(desired: Desired) -> list[Transaction]:
    """Only the weight, without looking first: for a rollback, which must not wait or fail for anything else.
    Fails as a whole where the other chains are not there; then no connection goes to the canary anyway."""
    lines = (f":{CANARY} - [0:0]", *(f"-A {CANARY} {join(rule)}" for rule in rules.weight_rules(desired)))
    return [Transaction(family, "nat", lines) for family in desired.families]


def removal(state: State, *, anchor: bool) -> Plan:
    """Takes away all that is ours, of any version and run; with `anchor` also that."""
    transactions: list[Transaction] = []
    for family, ruleset in state.rulesets.items():
        for name, own in (("nat", NAT_CHAINS), ("filter", FILTER_CHAINS)):
            if lines := _remove(ruleset.table(name), own):
                transactions.append(Transaction(family, name, tuple(lines)))
    transactions.sort(key=lambda transaction: transaction.table == "filter")  # the weight first
    if anchor and state.anchor:
        transactions.append(Transaction(None, ANCHOR, (f"delete table inet {ANCHOR}",)))
    return Plan(tuple(transactions))


def bare(state: State) -> Plan:
    """Takes away tables of iptables that hold nothing: no rule, no chain of anybody's own, all may pass. Our first rule
    made them where there were none; whoever needs one makes it again with its first rule."""
    found = []
    for family, ruleset in state.rulesets.items():
        for name in ("nat", "filter"):
            table = ruleset.tables.get(name)
            if table is None or any(chain.rules or chain.policy != "ACCEPT" for chain in table.chains.values()):
                continue
            nft = f"table {'ip6' if family is Family.IPV6 else 'ip'} {name}"
            found.append(
                Transaction(None, name, (nft, f"delete {nft}"))
            )  # made first: somebody may just have removed it
    return Plan(tuple(found))


def _nat(table: Table, desired: Desired) -> tuple[list[str], list[str]]:
    hooks = {"PREROUTING": rules.jump(desired, "PREROUTING")}
    if desired.local_clients:
        hooks["OUTPUT"] = rules.jump(desired, "OUTPUT")
    own = {**rules.target_rules(desired), CANARY: rules.weight_rules(desired)}
    heads, bodies, drift = _own_chains(table, own)
    for chain in table.chains.values():
        if chain.name not in NAT_CHAINS:
            wanted = _after_first(chain, hooks.pop(chain.name, None))
            _arrange(chain, wanted, bodies, drift)
    for name, jump in hooks.items():  # a built-in chain that nobody has used yet
        _arrange(Chain(name), [jump], bodies, drift)
    return heads + bodies, drift


def _after_first(chain: Chain, first: Tokens | None) -> list[Rule | Tokens]:
    foreign: list[Rule | Tokens] = [rule for rule in chain.rules if not rule.ours]
    return foreign if first is None else [first, *foreign]


def _filter(table: Table, desired: Desired) -> tuple[list[str], list[str]]:
    heads, bodies, drift = _own_chains(table, {GUARD: rules.guard_rules(desired)})
    watched = {chain.name for chain in twins.chains(table)}
    for chain in (*table.chains.values(), *([] if "INPUT" in table.chains else [Chain("INPUT")])):
        if chain.name in FILTER_CHAINS:
            continue
        first = rules.guard_jump(desired) if chain.name == "INPUT" else None
        if chain.name in watched or first:
            wanted = twins.layout(chain, desired, first)
        else:
            wanted = _after_first(chain, None)
        _arrange(chain, wanted, bodies, drift)
    return heads + bodies, drift


def _own_chains(table: Table, own: dict[str, list[Tokens]]) -> tuple[list[str], list[str], list[str]]:
    """(`:CHAIN` lines, rule lines, what differs). Under --noflush, `:CHAIN` makes or empties that chain only."""
    heads: list[str] = []
    bodies: list[str] = []
    drift: list[str] = []
    for name, wanted in own.items():
        if name in table.chains and rules.same_rules(table.rules(name), wanted):
            continue
        drift.append(_difference(name, table, wanted))
        heads.append(f":{name} - [0:0]")
        bodies += [f"-A {name} {join(tokens)}" for tokens in wanted]
    return heads, bodies, drift


def _difference(name: str, table: Table, wanted: Sequence[Tokens]) -> str:
    if name not in table.chains:
        return f"{name} is missing"
    there = "; ".join(join(rule.tokens) for rule in table.rules(name)) or "empty"
    return f"{name} is [{there}], wanted [{'; '.join(map(join, wanted))}]"


def _arrange(chain: Chain, wanted: Sequence[Rule | Tokens], lines: list[str], drift: list[str]) -> None:
    """Our rules of a chain that is not ours: taken out and put in anew, if any is missing, elsewhere or too much.
    Inserted in ascending order, so that each number is right when its turn comes."""
    if len(chain.rules) == len(wanted) and all(map(_is, chain.rules, wanted)):
        return
    ours = [rule for rule in chain.rules if rule.ours]
    new = [(number, tokens) for number, tokens in enumerate(wanted, 1) if not isinstance(tokens, Rule)]
    if len(ours) == len(new):
        drift.append(f"{chain.name}: our rules are not in their places, or not as they should be")
    else:
        drift.append(f"{chain.name} has {len(ours)} rules of ours, and should have {len(new)}")
    lines += [f"-D {chain.name} {join(rule.tokens)}" for rule in ours]
    lines += [f"-I {chain.name} {number} {join(tokens)}" for number, tokens in new]


def _is(rule: Rule, wanted: Rule | Tokens) -> bool:
    return rule is wanted if isinstance(wanted, Rule) else rules.same(rule, wanted)


def _remove(table: Table, own: Sequence[str]) -> list[str]:
    """`:CHAIN` empties first, so that nothing refers to a chain when it goes."""
    there = [name for name in own if name in table.chains]
    lines = [f":{name} - [0:0]" for name in there]
    for chain in table.chains.values():
        if chain.name not in own:
            lines += [f"-D {chain.name} {join(rule.tokens)}" for rule in chain.rules if rule.ours]
    return lines + [f"-X {name}" for name in there]


def notes(state: State, desired: Desired) -> list[str]:
    """What an operator should know: rules of others that the canary cannot do justice to."""
    found = []
    for family in desired.families:
        ruleset = state.rulesets[family]
        found += [f"{family}: {line}" for line in _bypasses(ruleset, desired)]
        for line in twins.unclear(ruleset.table("filter"), desired):
            found.append(
                f"{family}: `{line}` excludes port {desired.port}, so it applies to the canary's connections: add a"
                f" rule before it for --dport {desired.canary_port} -m conntrack --ctorigdstport {desired.port}"
            )
    return found


def _bypasses(ruleset: Ruleset, desired: Desired) -> list[str]:
    """Foreign NAT: from another port to ours (those connections never come to our jump), or of our port (those that
    are not for the canary go where it says, not to our stable gateway)."""
    found = []
    for chain in ruleset.table("nat").reachable("PREROUTING", "OUTPUT"):
        if chain.name in NAT_CHAINS:
            continue
        for rule in chain.rules:
            if rule.target not in ("REDIRECT", "DNAT"):
                continue
            text = f"`-A {chain.name} {join(rule.tokens)}`"
            to = (rule.value("--to-ports") or rule.value("--to-destination") or "").rpartition(":")[2]
            if twins.names_port(rule, desired.port):
                found.append(f"{text} sends connections to port {desired.port} elsewhere, but for the canary's")
            elif to == str(desired.port):
                found.append(f"{text}: the canary gets nothing of the connections that this rule brings")
    return found


def observed(before: dict[Family, tuple[int, int]], after: dict[Family, tuple[int, int]]) -> dict[str, int]:
    """New connections since, of all families: {"canary": n, "stable": n}; a counter that went down started anew."""
    total = {"canary": 0, "stable": 0}
    for family, counts in after.items():
        for side, was, now in zip(total, before.get(family, (0, 0)), counts, strict=True):
            total[side] += now - was if now >= was else now
    return total
