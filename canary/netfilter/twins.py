"""Twins: the host's own filter rules for the stable port, said again for connections that NAT sent to the canary.

The filter table sees the port after NAT, so an admin's `--dport 8000` does not match a connection that the canary
serves on 8001. One ACCEPT for all of 8001 would be the wrong remedy: it lets in whom the rules for 8000 keep out. So
each rule that names the port gets a twin right before it, the same but for the port, and only for connections that came
to the stable port (`--ctorigdstport`). Accepted networks, bans, limits and policies then hold for both alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from canary.netfilter.model import FILTER_CHAINS, TAG, Chain, Desired, Rule, Table, Tokens, options

TWIN = TAG + "twin"
_SINGLE = ("--dport", "--sport")
_SEVERAL = ("--dports", "--sports", "--ports")
_OPTIONS = (*_SINGLE, *_SEVERAL)


def twin(rule: Rule, desired: Desired) -> Tokens | None:
    """The twin of a rule; None where it needs none: it does not name the port, or names both."""
    if rule.ours or not _is_tcp(rule):
        return None
    changed: list[str] = []
    needed = False
    for negated, option, values in options(rule.tokens):
        if option == "--comment":
            continue
        if option in _OPTIONS and not negated and values and _names(values[0], desired.port):
            if not _names(values[0], desired.canary_port):
                needed = True
                values = (str(desired.canary_port), *values[1:])
        elif option in _OPTIONS and negated and values and _names(values[0], desired.port):
            return None  # see unclear
        changed += [*(["!"] if negated else []), option, *values]
    if not needed:
        return None
    return _with_match(_without_comment_module(changed), desired)


def unclear(table: Table, desired: Desired) -> list[str]:
    """Rules that exclude the port (`! --dport 8000 -j DROP`): there is no twin for them; the admin has to look."""
    found = []
    for chain in table.reachable("INPUT", "OUTPUT"):
        for rule in chain.rules:
            if not rule.ours and any(
                negated and option in _OPTIONS and values and _names(values[0], desired.port)
                for negated, option, values in options(rule.tokens)
            ):
                found.append(f"-A {chain.name} {' '.join(rule.tokens)}")
    return found


def layout(chain: Chain, desired: Desired, first: Tokens | None = None) -> list[Rule | Tokens]:
    """What the chain shall be: `first` (our jump), then the host's rules in their order, each after its twin."""
    wanted: list[Rule | Tokens] = [] if first is None else [first]
    for rule in chain.rules:
        if rule.ours:
            continue
        if made := twin(rule, desired):
            wanted.append(made)
        wanted.append(rule)
    return wanted


def chains(table: Table) -> list[Chain]:
    """Where rules for the port may stand: what packets of and to this host may come to."""
    return [chain for chain in table.reachable("INPUT", "OUTPUT") if chain.name not in FILTER_CHAINS]


def names_port(rule: Rule, port: int) -> bool:
    """Does the rule match on the destination port, this one among them?"""
    return any(
        option in ("--dport", "--dports", "--ports") and not negated and bool(values) and _names(values[0], port)
        for negated, option, values in options(rule.tokens)
    )


def _is_tcp(rule: Rule) -> bool:
    return any(
        option in ("-p", "--protocol") and not negated and values and values[0] in ("tcp", "6")
        for negated, option, values in options(rule.tokens)
    )


def _names(ports: str, port: int) -> bool:
    """Is `port` in 8000, 8000:8010 or 22,8000:8010?"""
    for part in ports.split(","):
        low, colon, high = part.partition(":")
        try:
            first = int(low or 0)
            if first <= port <= (int(high or 65535) if colon else first):
                return True
        except ValueError:
            return False
    return False


def _without_comment_module(tokens: Sequence[str]) -> list[str]:
    kept: list[str] = []
    for token in tokens:
        if token == "comment" and kept and kept[-1] == "-m":
            kept.pop()
        else:
            kept.append(token)
    return kept


def _with_match(tokens: Sequence[str], desired: Desired) -> Tokens:
    """Our condition and comment, before the target: what follows -j belongs to it."""
    at = next((index for index, token in enumerate(tokens) if token in ("-j", "-g")), len(tokens))
    ours = ("-m", "conntrack", "--ctorigdstport", str(desired.port), "-m", "comment", "--comment", TWIN)
    return (*tokens[:at], *ours, *tokens[at:])
