"""`Netfilter`: reads the rules, changes them as plan.py says, and reads them back.

Exit codes of iptables-restore are never passed on: 1 means "changed since it was read" (read again), 2 "this iptables
does not know that", 4 "no right, or busy".
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
from canary.netfilter.model import Conflict, Desired, Family, NetfilterError, Plan, State, Transaction
from canary.netfilter.parse import Connection
from canary.netfilter.read import TIMEOUT_SECONDS, Reader, Use, denied, hint

_BUSY_SECONDS = 5.0  # how long a busy kernel is asked again
_ATTEMPTS = 5  # to bring the rules to what they shall be while others change them


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

    families:      default: IPv4, and IPv6 where the kernel has it
    local_clients: also what clients on this host connect to
    proc:          of a process in the network namespace that `runner` runs its programs in
    `desired` has the weight and run of the last set_weight.
    """

    def __init__(
        self,
        runner: Runner = command.run,
        *,
        port: int = 8000,
        canary_port: int = 8001,
        families: tuple[Family, ...] | None = None,
        local_clients: bool = True,
        lock: Path | None = None,
        proc: Path = Path("/proc/self"),
    ) -> None:
        self._reader = Reader(runner, proc)
        self.desired = Desired(
            port=port,
            canary_port=canary_port,
            families=families or self._reader.families(),
            local_clients=local_clients,
        )
        self._run = runner
        self._lock = lock or Paths.default().run / "netfilter"
        self._adopted = False  # a weight was set through us
        self._totals = {"canary": 0, "stable": 0}
        self._last: dict[Family, tuple[int, int]] = {}

    # -- reading
    def read(self) -> Reading:
        """The rules as they are. Refused where this host's netfilter cannot be used; NetfilterError where it cannot be
        read."""
        return self._understood(self._reader.state(self.desired.families))

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
        self._count(self._reader.state(self.desired.families))
        return dict(self._totals)

    def diff(self) -> str:
        """What repair would change, for people; empty if nothing."""
        state = self._reader.state(self.desired.families)
        todo = planning.plan(state, self._wanted(state))
        runs = [f"# {' '.join(one.argv)}\n{one.text}" for one in todo.transactions]
        return "\n".join([*(f"- {line}" for line in todo.drift), *runs])

    def notes(self) -> list[str]:
        """Rules of others that the canary cannot do justice to, for `canary check`."""
        found = planning.notes(self._reader.state(self.desired.families), self.desired)
        for chain in self._reader.foreign_base_chains():
            found.append(
                f"nft chain {chain} drops what it has no rule for: unless it takes `ct status dnat` (firewalld does),"
                f" let its rules for tcp dport {self.desired.port} also take"
                f" `tcp dport {self.desired.canary_port} ct original proto-dst {self.desired.port}`"
            )
        return found

    def connections(self) -> list[Connection] | None:
        """Open connections that the rules sent to the canary; None: unknown."""
        return self._reader.connections(self.desired)

    def draining(self) -> int | None:
        """How many of those; 0 once the canary may be stopped."""
        found = self.connections()
        return None if found is None else len(found)

    def conntrack_use(self) -> Use | None:
        """None: unknown."""
        return self._reader.conntrack_use()

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
                state = self._reader.state(dict.fromkeys((*self.desired.families, *self._reader.families())))
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
            if force:
                self._apply(planning.bare(self._reader.state(tuple(state.rulesets))))
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
            state = self._reader.state(self.desired.families)
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
                    raise NetfilterError(f"the anchor of conntrack: {result.why()}", hint=hint(result))
                return result
            if result.code != 4 or denied(result) or time.monotonic() >= deadline:
                what = f"{transaction.family or 'inet'} {transaction.table}"
                raise NetfilterError(f"cannot change the rules ({what}): {result.why()}", hint=hint(result))
            time.sleep(0.05)

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

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self._lock.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with state_lock(self._lock):
            yield
