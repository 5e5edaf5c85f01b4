"""Where runs are kept, and what the commands and the controller leave for each other on disk.

    canary.json          the present or last run (run.py), replaced at each transition before anything is done about it
    canary-runs/ID.json  runs that are over, the last KEPT of them
    canary-abort.json    a wish to end a run: written by `canary rollback`, whether or not a controller is there
    /run/.../canary.json the marker: tells the gateways that a run is on (and which slot drains)
    events.jsonl         one `canary_*` event a transition, numbered; a missing last one is added at the next start

The abort file and the commit exclude each other by one lock: whoever is first wins, and the other one sees it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from appliance.events import append_event, read_events
from appliance.fsutil import locked
from appliance.paths import Paths
from appliance.statefile import read_state, remove_state, state_lock, sync_directory, write_state
from canary.happenings import Abort, Refused
from canary.machine import no_way_back
from canary.marker import clear_marker, write_marker
from canary.run import SCHEMA, Run, RunError, from_state, to_state

KEPT = 100
_LOCK_SECONDS = 1.0
EVENT_PREFIX = "canary_"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def boot_id() -> str:
    """Another one after each boot (random(4))."""
    with open(_BOOT_ID) as file:
        return file.read().strip()


@dataclass(frozen=True, slots=True)
class AbortWish:
    run: str
    reason: str
    by: str
    drain: float  # seconds

    def event(self) -> Abort:
        return Abort(self.reason, self.by, self.drain)


@dataclass(slots=True)
class Store:
    paths: Paths

    # -- runs
    def load(self) -> Run | None:
        """The present or last run. StateError, RunError for a file that is not ours."""
        state = read_state(self.paths.canary_run, schema=SCHEMA)
        return None if state is None else from_state(state, str(self.paths.canary_run))

    def save(self, run: Run) -> None:
        """Durable on return."""
        write_state(self.paths.canary_run, to_state(run), schema=SCHEMA)

    def announce(self, run: Run) -> None:
        """The event of the last transition; called after `save`."""
        fields = dict(run.last_event)
        name = EVENT_PREFIX + str(fields.pop("event"))
        append_event(self.paths.events, name, run=run.id, release=run.release, stable=run.stable, **fields)

    def announce_missing(self, run: Run) -> None:
        """After a kill between `save` and `announce`."""
        if not run.last_event:
            return
        told = (event for event in self.events(run.id) if event.get("seq") == run.seq)
        if next(told, None) is None:
            self.announce(run)

    def events(self, run: str | None = None) -> Iterator[dict[str, Any]]:
        """The canary's events, oldest first; of one run where it is named."""
        for event in read_events(self.paths.events):
            if str(event.get("event", "")).startswith(EVENT_PREFIX) and run in (None, event.get("run")):
                yield event

    def archive(self, run: Run) -> None:
        """Keeps a run that is over; idempotent."""
        directory = self.paths.canary_runs
        if not directory.is_dir():
            directory.mkdir(mode=0o755, parents=True, exist_ok=True)
            sync_directory(directory.parent)
        write_state(directory / f"{run.id}.json", to_state(run), schema=SCHEMA)
        for old in self._numbers()[:-KEPT]:
            (directory / f"{old}.json").unlink(missing_ok=True)

    def _numbers(self) -> list[int]:
        try:
            names = os.listdir(self.paths.canary_runs)
        except FileNotFoundError:
            return []
        return sorted(int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdecimal())

    def history(self) -> list[Run]:
        """All runs that are known, oldest first, the present one last."""
        present = self.load()
        found = []
        for number in self._numbers():
            path = self.paths.canary_runs / f"{number}.json"
            with contextlib.suppress(RunError):
                state = read_state(path, schema=SCHEMA)
                if state is not None and (present is None or str(number) != present.id):
                    found.append(from_state(state, str(path)))
        return [*found, present] if present is not None else found

    def next_id(self) -> str:
        present = self.load()
        return str(max([0, *self._numbers(), *([int(present.id)] if present else [])]) + 1)

    # -- ending a run from outside
    def wish_abort(self, wish: AbortWish) -> Run:
        """Durable on return; the run as it was. Refused when it is over, or promoted and its old engines stop."""
        with self.commit_lock():
            run = self.load()
            if run is None or run.id != wish.run:
                raise Refused(f"run {wish.run} is not the present one", hint="`canary list`")
            if not run.abortable:
                raise no_way_back(run)
            value = {"run": wish.run, "reason": wish.reason, "by": wish.by, "drain": wish.drain, "at": time.time()}
            write_state(self.paths.canary_abort, value, schema=SCHEMA)
        return run

    def abort_wish(self, run: str) -> AbortWish | None:
        value = read_state(self.paths.canary_abort, schema=SCHEMA)
        if value is None or value.get("run") != run:
            return None
        drain = value.get("drain")
        return AbortWish(
            run, str(value.get("reason")), str(value.get("by")), drain if isinstance(drain, float | int) else 0.0
        )

    def clear_abort(self) -> None:
        remove_state(self.paths.canary_abort)

    @contextlib.contextmanager
    def commit_lock(self) -> Iterator[None]:
        with state_lock(self.paths.canary_abort):
            yield

    # -- who controls
    @contextlib.contextmanager
    def controlling(self) -> Iterator[None]:
        """At most one controller on this host: BusyError for a second one. Waits a little: a child of one that was just
        killed may hold the descriptor until it has become another program."""
        with locked(self.paths.state / ".canary.lock", "the canary", wait_seconds=_LOCK_SECONDS):
            yield

    # -- for the gateways, which show it as metrics (appliance/gateway/canary_gauges.py)
    def say_alive(self, **said: Any) -> None:
        """Not durable: after a reboot nobody has said anything yet."""
        write_state(self.paths.canary_alive, {"at": time.time()} | said, schema=SCHEMA, durable=False)

    # -- the marker
    def mark(self, run: str | None, draining_slot: Literal["canary"] | None) -> None:
        """For the gateways; None: no run is on."""
        if run is None:
            clear_marker(self.paths)
        else:
            write_marker(self.paths, run, draining=draining_slot)
