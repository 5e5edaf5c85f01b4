"""Reads what this network namespace has: rules of both families, the anchor, connections. Changes nothing.

Only iptables-nft: rules of iptables-legacy live beside those of nft, both see each packet, and who wins is a matter of
chance.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from appliance import command
from appliance.command import Result, Runner
from canary.netfilter.model import ANCHOR, Desired, Family, NetfilterError, Refused, Ruleset, State
from canary.netfilter.parse import Connection, parse_anchor, parse_base_chains, parse_conntrack, parse_save

TIMEOUT_SECONDS = 10.0  # of one program
_CONNTRACK_BYTES = 64 << 20  # a full table of one port
_LEGACY_HINT = (
    "switch this host to the nft backend: `update-alternatives --set iptables /usr/sbin/iptables-nft` (and ip6tables), "
    "move legacy rules over (`iptables-legacy-save | iptables-nft-restore`, then `iptables-legacy -F`), or reboot"
)


@dataclass(frozen=True, slots=True)
class Use:
    """How full conntrack is: a full table drops new connections of the whole host."""

    count: int
    max: int

    @property
    def percent(self) -> float:
        return 100.0 * self.count / self.max if self.max else 0.0


class Reader:
    """`proc` is of a process in the network namespace that `runner` runs its programs in."""

    def __init__(self, runner: Runner = command.run, proc: Path = Path("/proc/self")) -> None:
        self._run = runner
        self._proc = proc
        self._checked: set[Family] = set()

    def families(self) -> tuple[Family, ...]:
        """IPv4, and IPv6 where this kernel has it."""
        return tuple(Family) if (self._proc / "net" / "if_inet6").exists() else (Family.IPV4,)

    def state(self, wanted: Iterable[Family]) -> State:
        """The rules of these families. Refused where this host's netfilter cannot be used; NetfilterError where it
        cannot be read."""
        return State({family: self._ruleset(family) for family in wanted}, self._anchor())

    def foreign_base_chains(self) -> list[str]:
        """Chains of nft, not of iptables, that drop what comes in unless a rule takes it."""
        return parse_base_chains(self._output(["nft", "-j", "list", "chains"], "cannot list the chains of nft"))

    def connections(self, desired: Desired) -> list[Connection] | None:
        """Open connections that the rules sent to the canary; None: unknown (neither conntrack(8) nor its /proc)."""
        found: list[Connection] = []
        for family in desired.families:
            argv = ["conntrack", "-L", "-f", family.value, "-p", "tcp", "--orig-port-dst", str(desired.port)]
            argv += ["--reply-port-src", str(desired.canary_port)]
            result = self._run(argv, timeout=TIMEOUT_SECONDS, limit=_CONNTRACK_BYTES)
            if not result.ok:
                return self._connections_by_proc(desired)
            found += _of_canary(result.text.splitlines(), desired)
        return found

    def _connections_by_proc(self, desired: Desired) -> list[Connection] | None:
        try:
            with open(self._proc / "net" / "nf_conntrack", errors="replace") as lines:
                return list(_of_canary(lines, desired))
        except OSError:
            return None

    def conntrack_use(self) -> Use | None:
        """Of the namespace that this process is in. None: unknown, as where conntrack is not loaded."""
        folder = Path("/proc/sys/net/netfilter")
        try:
            return Use(*(int((folder / f"nf_conntrack_{name}").read_text()) for name in ("count", "max")))
        except (OSError, ValueError):
            return None

    # -- inside
    def _ruleset(self, family: Family) -> Ruleset:
        self._refuse_legacy_programs(family)
        save = f"{family.prefix}-save"
        ruleset = parse_save(self._output([save, "-c"], f"cannot read the {family} rules"), family)
        if ruleset.backend not in (None, "nf_tables"):
            raise Refused(f"{save} is the legacy backend", hint=_LEGACY_HINT)
        self._refuse_legacy_rules(family)
        return ruleset

    def _refuse_legacy_programs(self, family: Family) -> None:
        """Once: what iptables-save prints says it again each time."""
        if family in self._checked:
            return
        for program in (f"{family.prefix}-restore", f"{family.prefix}-save"):
            result = self._run([program, "-V"], timeout=TIMEOUT_SECONDS)
            if not result.ok:
                raise Refused(f"cannot use {program}: {result.why()}", hint=hint(result))
            if "nf_tables" not in result.text:
                raise Refused(f"{program} is the legacy backend ({result.text.strip()[:80]})", hint=_LEGACY_HINT)
        self._checked.add(family)

    def _refuse_legacy_rules(self, family: Family) -> None:
        """The kernel's list of legacy tables is empty on most hosts; a table without a rule does no harm."""
        names = self._proc / "net" / ("ip_tables_names" if family is Family.IPV4 else "ip6_tables_names")
        try:
            if not names.read_text().split():
                return
        except OSError:  # no legacy in this kernel
            return
        result = self._run([f"{family.prefix}-legacy-save"], timeout=TIMEOUT_SECONDS)
        if not result.ok:
            raise Refused(f"there are legacy {family} tables; {result.why()}", hint=_LEGACY_HINT)
        used = [
            table.name
            for table in parse_save(result.text, family).tables.values()
            if any(chain.rules or chain.policy not in (None, "ACCEPT") for chain in table.chains.values())
        ]
        if used:
            raise Refused(f"there are legacy {family} rules (tables {', '.join(used)})", hint=_LEGACY_HINT)

    def _anchor(self) -> bool:
        result = self._run(["nft", "-j", "list", "table", "inet", ANCHOR], timeout=TIMEOUT_SECONDS)
        if result.code == 1 and b"No such file" in result.stderr:
            return False
        if not result.ok:
            raise NetfilterError(f"cannot read nft's tables: {result.why()}", hint=hint(result))
        return parse_anchor(result.text)

    def _output(self, argv: list[str], doing: str) -> str:
        result = self._run(argv, timeout=TIMEOUT_SECONDS)
        if not result.ok:
            raise NetfilterError(f"{doing}: {result.why()}", hint=hint(result))
        return result.text


def _of_canary(lines: Iterable[str], desired: Desired) -> Iterator[Connection]:
    for found in map(parse_conntrack, lines):
        if (
            found is not None
            and found.open
            and (found.to_port, found.served_port) == (desired.port, desired.canary_port)
        ):
            yield found


def denied(result: Result) -> bool:
    """The kernel said no for want of a right."""
    return b"Permission denied" in result.stderr or b"Operation not permitted" in result.stderr


def hint(result: Result) -> str:
    """What to do about a program of netfilter that failed."""
    if result.code == command.NOT_FOUND:
        return "install the packages iptables, nftables and conntrack"
    if denied(result):
        return "root, or CAP_NET_ADMIN in this network namespace, is needed"
    if result.code == 2:
        return "iptables 1.8 or newer with tcp, addrtype, statistic, conntrack, comment, DNAT and REJECT is needed"
    return "`canary rules --diff` shows what was wanted; `journalctl -k` may say why"
