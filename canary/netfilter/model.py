"""What the rules are, as values: what iptables-save said (Ruleset), what we want (Desired), what to run (Transaction).

nat PREROUTING 1, OUTPUT 1 -> APPLIANCE-CANARY
    New TCP connections to `port` of a local address. `--syn`: a connection that conntrack picks up in mid-stream is
    "new" as well, and must not be moved. First: a DNAT rule before it (a published port of Docker) would hide it.
nat APPLIANCE-CANARY -> APPLIANCE-TO-CANARY with the probability of the weight, the rest -> APPLIANCE-TO-STABLE
    The only chain that a change of the weight writes.
nat APPLIANCE-TO-CANARY: DNAT to `canary_port`, same address. nat APPLIANCE-TO-STABLE: RETURN
    Their counters are numbers of connections, and no change of the weight zeroes them. Foreign rules go on to apply.
filter INPUT 1 -> APPLIANCE-GUARD
    New connections straight to `canary_port` are refused, except on lo.
filter, before each rule that names `port`: its twin (twins.py)
    The filter sees the port after NAT. What the admin says of `port` (networks, bans, limits) holds for the canary's
    connections too, no more and no less.
table inet appliance_anchor: a `ct` expression, an empty nat chain
    The kernel's hooks of conntrack and NAT are there while some rule uses them. Without a user that outlives a flush
    of iptables, every connection to the canary would end at once (Linux: nf_conntrack_proto.c:nf_ct_netns_put,
    nf_nat_core.c:nf_nat_unregister_fn).

The same for IPv6.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

import msgspec

from appliance.log import ApplianceError, ExitCode

CANARY = "APPLIANCE-CANARY"
TO_CANARY = "APPLIANCE-TO-CANARY"
TO_STABLE = "APPLIANCE-TO-STABLE"
GUARD = "APPLIANCE-GUARD"
ANCHOR = "appliance_anchor"
NAT_CHAINS = (CANARY, TO_CANARY, TO_STABLE)
FILTER_CHAINS = (GUARD,)

TAG = "appliance canary: "
"""Begins the comment of every rule of ours, so that what is ours is known without a state file."""

PROBABILITY_STEPS = 1 << 31  # of xt_statistic and of `meta random`
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}")


class NetfilterError(ApplianceError):
    """The rules could not be read or changed."""


class Refused(NetfilterError):
    """This host's netfilter cannot be used as it is; the hint has the fix."""

    exit_code = ExitCode.REFUSED


class Conflict(NetfilterError):
    """The rules belong to another run, or somebody else changes them all the time."""

    exit_code = ExitCode.BUSY


class Family(StrEnum):
    IPV4 = "ipv4"
    IPV6 = "ipv6"

    @property
    def prefix(self) -> str:
        """Of the program names: `iptables`-save, `ip6tables`-restore."""
        return "iptables" if self is Family.IPV4 else "ip6tables"


Tokens = tuple[str, ...]

KNOWN_RULES = 1 << 15
"""How many rules of a host are understood once and not each time: the rules are read every few seconds, and hosts of
Docker or Kubernetes have thousands that do not change."""


def options(tokens: Sequence[str]) -> Iterator[tuple[bool, str, Tokens]]:
    """(negated?, option, values) of each option of a rule, in order."""
    position, negated = 0, False
    while position < len(tokens):
        token = tokens[position]
        position += 1
        if token == "!":
            negated = True
            continue
        end = position
        while end < len(tokens) and not _is_option(tokens[end]):
            end += 1
        if token in ("--comment", "-j", "-g") and end == position:
            end = min(position + 1, len(tokens))  # a comment may look like an option
        yield negated, token, tuple(tokens[position:end])
        position, negated = end, False


def _is_option(token: str) -> bool:
    return token == "!" or (token.startswith("-") and len(token) > 1 and not token[1:2].isdigit())


@lru_cache(KNOWN_RULES)
def _value(tokens: Tokens, option: str) -> str | None:
    return next((values[0] for _, name, values in options(tokens) if name == option and values), None)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule as saved: the arguments after `-A CHAIN`, unquoted."""

    tokens: tuple[str, ...]
    packets: int = 0
    bytes: int = 0

    @property
    def target(self) -> str | None:
        """Chain or target of -j or -g; None for a rule that only counts."""
        return self.value("-j") or self.value("-g")

    @property
    def comment(self) -> str:
        return self.value("--comment") or ""

    @property
    def ours(self) -> bool:
        """Written by us: by its comment, or because it leads to a chain of ours."""
        return self.comment.startswith(TAG) or self.target in (*NAT_CHAINS, *FILTER_CHAINS)

    def value(self, option: str) -> str | None:
        """What follows `option`; None where the rule has no such option."""
        return _value(self.tokens, option) if option in self.tokens else None


@dataclass(slots=True)
class Chain:
    name: str
    policy: str | None = None  # None: not built in
    rules: list[Rule] = field(default_factory=list)


@dataclass(slots=True)
class Table:
    name: str
    chains: dict[str, Chain] = field(default_factory=dict)

    def rules(self, chain: str) -> list[Rule]:
        """Of a chain; empty where it is not there (nft makes built-in chains when they are first used)."""
        found = self.chains.get(chain)
        return found.rules if found else []

    def reachable(self, *start: str) -> Iterator[Chain]:
        """The chains that packets of the `start` chains may come to; each once, loops do no harm. Not through ours:
        what somebody has put into them goes when they are written anew."""
        waiting, seen = list(start), set[str]()
        while waiting:
            name = waiting.pop(0)
            if name in seen or name not in self.chains or name in (*NAT_CHAINS, *FILTER_CHAINS):
                continue
            seen.add(name)
            yield self.chains[name]
            waiting += [rule.target for rule in self.chains[name].rules if rule.target]


@dataclass(slots=True)
class Ruleset:
    """What iptables-save -c of one family said."""

    family: Family
    tables: dict[str, Table] = field(default_factory=dict)
    backend: str | None = None  # "nf_tables"; "legacy"; None: it printed nothing, since there are no rules

    def table(self, name: str) -> Table:
        return self.tables.get(name) or Table(name)


@dataclass(frozen=True, slots=True)
class State:
    """Of this network namespace at one time."""

    rulesets: dict[Family, Ruleset]
    anchor: bool


class Desired(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`weight` percent of the new connections to `port` go to `canary_port`."""

    port: int = 8000
    canary_port: int = 8001
    weight: float = 0.0  # percent, 0 to 100
    run: str | None = None  # whose weight it is
    families: tuple[Family, ...] = (Family.IPV4, Family.IPV6)
    local_clients: bool = True  # also clients on this host

    def __post_init__(self) -> None:
        for port in (self.port, self.canary_port):
            if not 1 <= port <= 65535:
                raise NetfilterError(f"{port} is no port", hint="1 to 65535")
        if self.port == self.canary_port:
            raise NetfilterError(f"port and canary port are both {self.port}", hint="set gateway.canary_port")
        if not 0 <= self.weight <= 100:  # also NaN
            raise NetfilterError(f"{self.weight!r} is no weight", hint="percent: 0 to 100")
        if self.run is not None and not RUN_NAME.fullmatch(self.run):
            raise NetfilterError(f"{self.run!r} is no name of a run", hint="letters, digits and ._:- (at most 64)")
        if self.weight > 0 and self.run is None:
            raise NetfilterError("a weight above 0 without a run", hint="say whose it is")
        if not self.families or len(set(self.families)) != len(self.families):
            raise NetfilterError("families: each once, at least one", hint="ipv4, ipv6")

    @property
    def steps(self) -> int:
        """The weight as the kernel holds it: 0 to 2**31."""
        return round(self.weight / 100 * PROBABILITY_STEPS)


@dataclass(frozen=True, slots=True)
class Transaction:
    """One table of one family, changed as a whole or not at all. `family` None: a file for nft."""

    family: Family | None
    table: str
    lines: tuple[str, ...]

    @property
    def argv(self) -> list[str]:
        if self.family is None:
            return ["nft", "-f", "-"]
        return [f"{self.family.prefix}-restore", "--noflush", "-w", "5"]

    @property
    def text(self) -> str:
        body = self.lines if self.family is None else (f"*{self.table}", *self.lines, "COMMIT")
        return "\n".join(body) + "\n"


@dataclass(frozen=True, slots=True)
class Plan:
    """What makes the state the desired one; nothing to do where it already is."""

    transactions: tuple[Transaction, ...] = ()
    drift: tuple[str, ...] = ()
    """What differs, one line each, for events and `canary rules --diff`."""


@dataclass(frozen=True, slots=True)
class Weighted:
    """The weight that the rules of one family have."""

    steps: int | None  # of 2**31; None: the rules are not (or not all) there, or not ours
    run: str | None
    canary: int  # connections counted so far
    stable: int

    @property
    def weight(self) -> float | None:
        """Percent, rounded to the kernel's resolution."""
        return None if self.steps is None else round(self.steps / PROBABILITY_STEPS * 100, 7)
