"""Runs the programs of netfilter: `Netfilter` reads the rules, changes them as plan.py says, and reads them back.

Only iptables-nft: rules of iptables-legacy live beside those of nft, both see each packet, and who wins is a matter of
chance. Exit codes are never passed on: of a restore, 1 means "changed since it was read" (read again), 2 "this iptables
does not know that", 4 "no right, or busy"; of a listing, 1 means "not there".
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from appliance import command
from appliance.command import Result, Runner
from appliance.paths import Paths
from appliance.statefile import state_lock
from canary.netfilter import plan as planning
from canary.netfilter import rules
from canary.netfilter.model import (
    ANCHOR,
    Conflict,
    Desired,
    Family,
    NetfilterError,
    Plan,
    Refused,
    State,
    Transaction,
)
from canary.netfilter.parse import (
    Connection,
    parse_anchor,
    parse_base_chains,
    parse_conntrack,
    parse_save,
)

TIMEOUT_SECONDS = 10.0  # of one program
_BUSY_SECONDS = 5.0  # how long a busy kernel is asked again
_ATTEMPTS = 5  # to bring the rules to what they shall be while others change them
_CONNTRACK_BYTES = 64 << 20
_LEGACY_HINT = (
    "switch this host to the nft backend: `update-alternatives --set iptables /usr/sbin/iptables-nft` (and ip6tables), "
    "move legacy rules over (`iptables-legacy-save | iptables-nft-restore`, then `iptables-legacy -F`), or reboot"
)
_INSTALL_HINT = "install the packages iptables, nftables and conntrack"


@dataclass(frozen=True, slots=True)
class Use:
    """How full conntrack is: a full table drops new connections of the whole host."""

    count: int
    max: int

    @property
    def percent(self) -> float:
        return 100.0 * self.count / self.max if self.max else 0.0


@dataclass(frozen=True, slots=True)
class Reading:
    """The kernel's rules, understood."""

    weight: float | None  # percent; None: our rules are not there, which is weight 0. Families differ: the larger
    run: str | None
    drift: tuple[str, ...]  # what differs from what they shall be
    canary: int  # new connections, as Netfilter.counters
    stable: int
    anchor: bool
    conntrack_percent: float | None  # None: unknown
    state: State


class Netfilter:
    """The rules of this network namespace. One process changes them at a time (a lock file in /run/appliance).

    desired: ports, families and whether clients on this host take part; the weight and run of the last set_weight.
    proc:    of a process in that network namespace.
    """

    def __init__(
        self,
        runner: Runner = command.run,
        *,
        desired: Desired | None = None,
        lock: Path | None = None,
        proc: Path = Path("/proc/self"),
    ) -> None:
        self.desired = desired or Desired(families=families(proc))
        self._run = runner
        self._lock = lock or Paths.default().run / "netfilter"
        self._proc = proc
        self._adopted = desired is not None and desired.run is not None
        self._checked = False
        self._totals = {"canary": 0, "stable": 0}
        self._last: dict[Family, tuple[int, int]] = {}

    # -- reading
    def read(self) -> Reading:
        """The rules as they are. Refused where this host's netfilter cannot be used; NetfilterError where it cannot be
        read."""
        return self._understood(self._read_state())

    def _understood(self, state: State) -> Reading:
        self._count(state)
        found = [rules.weighted(state.rulesets[family]) for family in self.desired.families]
        known = [one for one in found if one.weight is not None]
        most = max(known, key=lambda one: one.steps or 0, default=None)
        use = self.conntrack_use()
        return Reading(
            weight=most.weight if most else None,
            run=most.run if most else None,
            drift=planning.plan(state, self._wanted(state)).drift,
            canary=self._totals["canary"],
            stable=self._totals["stable"],
            anchor=state.anchor,
            conntrack_percent=use.percent if use else None,
            state=state,
        )

    def counters(self) -> dict[str, int]:
        """New connections by the kernel's counters, of all families: {"canary": n, "stable": n}. Counts on where
        somebody zeroed them; what came between the last reading and that is lost."""
        self._count(self._read_state())
        return dict(self._totals)

    def diff(self) -> str:
        """What repair would change, for people; empty if nothing."""
        state = self._read_state()
        todo = planning.plan(state, self._wanted(state))
        runs = [f"# {' '.join(one.argv)}\n{one.text}" for one in todo.transactions]
        return "\n".join([*(f"- {line}" for line in todo.drift), *runs])

    def notes(self) -> list[str]:
        """Rules of others that the canary cannot do justice to, for `canary check`."""
        found = planning.notes(self._read_state(), self.desired)
        result = self._run(["nft", "-j", "list", "chains"], timeout=TIMEOUT_SECONDS)
        for chain in parse_base_chains(command.check(result, "cannot list the chains of nft").text):
            found.append(
                f"nft chain {chain} drops what it has no rule for: unless it takes `ct status dnat` (firewalld does),"
                f" add `tcp dport {self.desired.canary_port} ct original proto-dst {self.desired.port} accept`"
            )
        return found

    def connections(self) -> list[Connection] | None:
        """Open connections that the rules sent to the canary; None: unknown (neither conntrack(8) nor its /proc)."""
        found: list[Connection] = []
        for family in self.desired.families:
            argv = ["conntrack", "-L", "-f", family.value, "-p", "tcp", "--orig-port-dst", str(self.desired.port)]
            argv += ["--reply-port-src", str(self.desired.canary_port)]
            result = self._run(argv, timeout=TIMEOUT_SECONDS, limit=_CONNTRACK_BYTES)
            if not result.ok:
                return self._connections_by_proc()
            found += self._ours(result.text.splitlines())
        return found

    def draining(self) -> int | None:
        """How many of those; 0 once the canary may be stopped."""
        found = self.connections()
        return None if found is None else len(found)

    def conntrack_use(self) -> Use | None:
        """None: unknown, as where conntrack is not loaded."""
        try:
            count, most = (
                int(Path("/proc/sys/net/netfilter", f"nf_conntrack_{name}").read_text()) for name in ("count", "max")
            )
        except (OSError, ValueError):
            return None
        return Use(count, most)

    # -- changing
    def up(self) -> list[str]:
        """Anchor, guard and jumps; a weight that is there stays. Says what it changed."""
        with self._locked():
            return self._converge(self._wanted)[0]

    def set_weight(self, run: str, weight: float) -> Reading:
        """`weight` percent of the new connections go to the canary of `run`, as read back when this returns; those that
        are there are left alone. 0 is in effect before anything is looked at or waited for, whosever the weight was.

        Conflict: another run has a weight now. NetfilterError: it did not come to that; repair() tries again.
        """
        wanted = msgspec.structs.replace(self.desired, run=run, weight=weight)
        Desired(**msgspec.structs.asdict(wanted))  # replace() checks nothing
        if wanted.steps == 0:
            self._stop_now(wanted)

        def mine(state: State) -> Desired:
            if wanted.steps:
                self._refuse_other(run, state)
            self.desired, self._adopted = wanted, True
            return wanted

        with self._locked():
            _, state = self._converge(mine)
            return self._understood(state)

    def repair(self) -> list[str]:
        """Puts back what others changed; says what that was. Before the first set_weight the weight stays as it is."""
        with self._locked():
            return self._converge(self._wanted)[0]

    def remove(self, *, force: bool = False) -> int:
        """Takes away all of it. The anchor only once no connection to the canary is open, or with `force`: without it
        they would end. Returns how many those are (so 0: all is gone)."""
        with self._locked():
            for _ in range(_ATTEMPTS):
                state = self._read_state(every_family=True)
                self._count(state)
                todo = planning.removal(state, anchor=False)
                if not todo.transactions:
                    break
                self._apply(todo)
            else:
                raise Conflict("our rules come back as they are removed", hint="is a controller running?")
            left = 0 if force else self._left()
            if not left:
                self._apply(planning.removal(state, anchor=True))
            return left

    # -- inside
    def _wanted(self, state: State) -> Desired:
        """`desired`; until somebody set a weight, with the one that the rules have."""
        if self._adopted:
            return self.desired
        found = [rules.weighted(state.rulesets[family]) for family in self.desired.families]
        if len({(one.steps, one.run) for one in found}) != 1 or not found[0].steps:
            return self.desired  # none, or the families differ: 0 is the safe one
        return msgspec.structs.replace(self.desired, weight=found[0].weight, run=found[0].run)

    def _converge(self, wanted: planning.Wanted) -> tuple[list[str], State]:
        """Reads, applies what is missing, until nothing is: (what was, the rules as read back)."""
        changed: list[str] = []
        for _ in range(_ATTEMPTS):
            state = self._read_state()
            self._count(state)
            todo = planning.plan(state, wanted(state))
            if not todo.transactions:
                return changed, state
            changed += [line for line in todo.drift if line not in changed]
            refused = self._apply(todo)
        raise Conflict(
            f"after {_ATTEMPTS} attempts the rules are still not ours: {refused.why() if refused else changed[-1]}",
            hint="does another tool rewrite iptables all the time? `canary rules --diff` shows what is wanted",
        )

    def _stop_now(self, wanted: Desired) -> None:
        """Weight 0 without a look first. What fails here is done by what follows, or said by it."""
        for transaction in planning.change_weight(wanted):
            self._run(transaction.argv, timeout=TIMEOUT_SECONDS, stdin=transaction.text.encode())

    def _refuse_other(self, run: str, state: State) -> None:
        for family in self.desired.families:
            other = rules.weighted(state.rulesets[family])
            if other.steps and other.run != run:
                raise Conflict(
                    f"run {other.run} has {other.weight:g} % of the connections now",
                    hint=f"`canary rollback {other.run}`",
                )

    def _apply(self, todo: Plan) -> Result | None:
        """None if all of it was taken. Else the caller reads again: rules changed under our hands."""
        for transaction in todo.transactions:
            if refused := self._commit(transaction):
                return refused
        return None

    def _commit(self, transaction: Transaction) -> Result | None:
        """The answer where the rules are no longer those that the transaction was made for; None: done."""
        deadline = time.monotonic() + _BUSY_SECONDS
        while True:
            result = self._run(transaction.argv, timeout=TIMEOUT_SECONDS, stdin=transaction.text.encode())
            if result.ok:
                return None
            if result.code == 1 and not result.timed_out:
                if transaction.family is None:
                    raise NetfilterError(f"the anchor of conntrack: {result.why()}", hint=_hint(result))
                return result
            if result.code != 4 or _denied(result) or time.monotonic() >= deadline:
                what = f"{transaction.family or 'inet'} {transaction.table}"
                raise NetfilterError(f"cannot change the rules ({what}): {result.why()}", hint=_hint(result))
            time.sleep(0.05)

    def _read_state(self, *, every_family: bool = False) -> State:
        wanted = tuple(Family) if every_family else self.desired.families
        usable = [family for family in wanted if family in self.desired.families or family in families(self._proc)]
        if not self._checked:
            self._check_backend(usable)
        rulesets = {}
        for family in usable:
            result = self._run([f"{family.prefix}-save", "-c"], timeout=TIMEOUT_SECONDS)
            if not result.ok:
                raise NetfilterError(f"cannot read the {family} rules: {result.why()}", hint=_hint(result))
            rulesets[family] = parse_save(result.text, family)
            if rulesets[family].backend not in (None, "nf_tables"):
                raise Refused(f"{family.prefix}-save is the legacy backend", hint=_LEGACY_HINT)
            self._refuse_legacy_rules(family)
        return State(rulesets, self._read_anchor())

    def _check_backend(self, wanted: list[Family]) -> None:
        for family in wanted:
            for program in (f"{family.prefix}-restore", f"{family.prefix}-save"):
                result = self._run([program, "-V"], timeout=TIMEOUT_SECONDS)
                if not result.ok:
                    raise Refused(f"cannot use {program}: {result.why()}", hint=_hint(result))
                if "nf_tables" not in result.text:
                    raise Refused(f"{program} is the legacy backend ({result.text.strip()[:80]})", hint=_LEGACY_HINT)
        self._checked = True

    def _refuse_legacy_rules(self, family: Family) -> None:
        """The kernel's list of legacy tables is empty on most hosts; a table without a rule does no harm."""
        names = self._proc / "net" / ("ip_tables_names" if family is Family.IPV4 else "ip6_tables_names")
        with contextlib.suppress(OSError):  # no legacy in this kernel
            if not names.read_text().split():
                return
            result = self._run([f"{family.prefix}-legacy-save"], timeout=TIMEOUT_SECONDS)
            if not result.ok:
                raise Refused(
                    f"there are legacy {family} tables, and no look into them: {result.why()}", hint=_LEGACY_HINT
                )
            tables = parse_save(result.text, family).tables.values()
            used = [
                table.name
                for table in tables
                if any(chain.rules or chain.policy not in (None, "ACCEPT") for chain in table.chains.values())
            ]
            if used:
                raise Refused(f"there are legacy {family} rules ({', '.join(used)})", hint=_LEGACY_HINT)

    def _read_anchor(self) -> bool:
        result = self._run(["nft", "-j", "list", "table", "inet", ANCHOR], timeout=TIMEOUT_SECONDS)
        if result.code == 1 and b"No such file" in result.stderr:
            return False
        if not result.ok:
            raise NetfilterError(f"cannot read nft's tables: {result.why()}", hint=_hint(result))
        return parse_anchor(result.text)

    def _count(self, state: State) -> None:
        """Called before each change of the rules and at each reading."""
        now = {}
        for family in self.desired.families:
            found = rules.weighted(state.rulesets[family])
            now[family] = (found.canary, found.stable)
        for side, new in planning.observed(self._last, now).items():
            self._totals[side] += new
        self._last = now

    def _left(self) -> int:
        """Open connections to the canary; unknown counts as one."""
        found = self.draining()
        return 1 if found is None else found

    def _connections_by_proc(self) -> list[Connection] | None:
        try:
            with open(self._proc / "net" / "nf_conntrack", errors="replace") as lines:
                return list(self._ours(lines))
        except OSError:
            return None

    def _ours(self, lines: Iterator[str] | list[str]) -> Iterator[Connection]:
        for line in lines:
            found = parse_conntrack(line)
            if (
                found is not None
                and found.open
                and (found.to_port, found.served_port) == (self.desired.port, self.desired.canary_port)
            ):
                yield found

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self._lock.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with state_lock(self._lock):
            yield


def families(proc: Path = Path("/proc/self")) -> tuple[Family, ...]:
    """IPv4, and IPv6 where this kernel has it."""
    return tuple(Family) if (proc / "net" / "if_inet6").exists() else (Family.IPV4,)


def _denied(result: Result) -> bool:
    return b"Permission denied" in result.stderr or b"Operation not permitted" in result.stderr


def _hint(result: Result) -> str:
    if result.code == command.NOT_FOUND:
        return _INSTALL_HINT
    if _denied(result):
        return "root, or CAP_NET_ADMIN in this network namespace, is needed"
    if result.code == 2:
        return "iptables 1.8 or newer with the matches tcp, addrtype, statistic, conntrack, comment is needed"
    return "`canary rules --diff` shows what was wanted; `journalctl -k` may say why"
