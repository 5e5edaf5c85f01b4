"""Where runs are kept, and what the commands and the controller leave for each other on disk.

    canary.json          the present or last run (run.py), replaced at each transition before anything is done about it
    canary-runs/ID.json  runs that are over, the last KEPT of them
    canary-abort.json    a wish to end a run: written by `canary rollback`, whether or not a controller is there; in
                         /run where this disk takes nothing. One that cannot be read is a wish all the same
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
from pathlib import Path
from typing import Any, Literal

from appliance.events import append_event, read_events
from appliance.fsutil import locked
from appliance.launcher.state import say
from appliance.log import ApplianceError
from appliance.paths import Paths
from appliance.statefile import StateError, read_state, remove_state, state_lock, sync_directory, write_state
from canary.happenings import Abort, Refused
from canary.machine import no_way_back
from canary.marker import clear_marker, write_marker
from canary.run import MAX_REASON_CHARS, RUN_ID, SCHEMA, Run, RunError, from_state, to_state

KEPT = 100
_DRAIN_SECONDS = 60.0  # for requests in work, where a wish does not say; as `canary rollback`
_MAX_DRAIN = 86400.0
_LOCK_SECONDS = 1.0
EVENT_PREFIX = "canary_"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def boot_id() -> str:
    """Another one after each boot (random(4))."""
    with open(_BOOT_ID) as file:
        return file.read().strip()


class Damaged(ApplianceError):
    """canary.json cannot be understood, or not be read: which run is on is not known."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"the state of the present run is lost: {why}",
            hint="`canary rollback` (or a restart of appliance-canary.service) sets the weight to 0 and moves it aside",
        )


def reason_of(error: OSError | ApplianceError) -> str:
    """Without the path, which is said beside it."""
    return error.message if isinstance(error, ApplianceError) else error.strerror or str(error)


@dataclass(frozen=True, slots=True)
class AbortWish:
    run: str
    reason: str
    by: str
    drain: float  # seconds

    def event(self) -> Abort:
        return Abort(self.reason, self.by, self.drain)

    def as_dict(self) -> dict[str, Any]:
        return {"run": self.run, "reason": self.reason, "by": self.by, "drain": self.drain, "at": time.time()}

    @classmethod
    def of(cls, value: dict[str, Any]) -> AbortWish:
        """Of a file; what makes no sense in it is left out."""
        drain = value.get("drain")
        if isinstance(drain, bool) or not isinstance(drain, float | int) or not 0 <= drain <= _MAX_DRAIN:
            drain = _DRAIN_SECONDS
        reason, by = (str(value.get(key))[:MAX_REASON_CHARS] for key in ("reason", "by"))
        return cls(str(value["run"]), reason, by, float(drain))


@dataclass(slots=True)
class Store:
    paths: Paths

    # -- runs
    def load(self) -> Run | None:
        """The present or last run; Damaged where that is not known."""
        try:
            return self._read(self.paths.canary_run)
        except OSError as error:
            raise Damaged(f"{self.paths.canary_run}: {reason_of(error)}") from None
        except (StateError, RunError) as error:
            raise Damaged(error.message) from None

    @staticmethod
    def _read(path: Path) -> Run | None:
        state = read_state(path, schema=SCHEMA)
        return None if state is None else from_state(state, str(path))

    def save(self, run: Run) -> None:
        """Durable on return."""
        write_state(self.paths.canary_run, to_state(run), schema=SCHEMA)

    def forget(self, last: Run | None) -> None:
        """Puts `last` back in the place of a run that is not to begin."""
        if last is None:
            remove_state(self.paths.canary_run)
        else:
            self.save(last)

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
        try:
            missing = next(told, None) is None
        except OSError as error:
            say(f"<3>{self.paths.events}: {reason_of(error)}")
            return
        if missing:
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
        """Of the files of runs that are over."""
        try:
            names = os.listdir(self.paths.canary_runs)
        except FileNotFoundError:
            return []
        return sorted(int(name[:-5]) for name in names if name.endswith(".json") and RUN_ID.fullmatch(name[:-5]))

    def history(self, skipped: list[str] | None = None) -> list[Run]:
        """All runs that are known, oldest first, the present one last. Files that cannot be used are left out; one line
        about each is added to `skipped`."""
        skipped = [] if skipped is None else skipped
        present = None
        try:
            present = self.load()
        except Damaged as error:
            skipped.append(error.message)
        try:
            numbers = self._numbers()
        except OSError as error:
            numbers = []
            skipped.append(f"{self.paths.canary_runs}: {reason_of(error)}")
        found = []
        for number in (str(number) for number in numbers):
            path = self.paths.canary_runs / f"{number}.json"
            if present is not None and number == present.id:
                continue
            try:
                if (run := self._read(path)) is None:
                    continue
                if run.id != number:
                    raise RunError(f"{path}: it is run {run.id}'s")
                found.append(run)
            except RunError as error:
                skipped.append(error.message)
            except (StateError, OSError) as error:
                skipped.append(reason_of(error) if isinstance(error, StateError) else f"{path}: {reason_of(error)}")
        return [*found, present] if present is not None else found

    def next_id(self) -> str:
        """Above every number that files or events have seen, also of a run whose file is lost. Refused where that
        cannot be known."""
        try:
            known = {0, *self._numbers()}
            known |= {int(run) for event in self.events() if RUN_ID.fullmatch(run := str(event.get("run")))}
        except OSError as error:
            raise Refused(
                f"which runs there were cannot be read: {reason_of(error)}", hint=f"look at {self.paths.state}"
            ) from None
        with contextlib.suppress(Damaged):
            if (present := self.load()) is not None:
                known.add(int(present.id))
        return str(max(known) + 1)

    def no_run(self) -> tuple[str, str]:
        """What to say, and what to do, where `load` knows of no run."""
        hint = "`canary list` shows the runs before it; `canary start RELEASE` begins a new one"
        path = self.paths.canary_run
        with contextlib.suppress(OSError):
            if kept := sorted(path.parent.glob(f"{path.name}.damaged-*")):  # named by the time
                return f"the state of the last run was damaged and set aside as {kept[-1]}: no run is on", hint
            if self._numbers():
                return f"{path} is not there, so which run was the last is not known: no run is on", hint
        return "there was no run on this host yet", "canary start RELEASE"

    # -- ending a run from outside
    def may_abort(self, run: Run | None, wanted: str | None = None) -> Run:
        """`run`, if it is the wanted one and can still be ended; else Refused: it is over, or promoted and its old
        engines stop."""
        if run is None:
            text, hint = self.no_run()
            raise Refused(text, hint=hint)
        if wanted not in (None, run.id):
            raise Refused(f"run {wanted} is not the present one", hint="`canary list`")
        if not run.abortable:
            raise no_way_back(run)
        return run

    def wish_abort(self, wish: AbortWish) -> Run:
        """Durable on return; the run as it was. Refused when it is over or committed; OSError, and nothing is written,
        where the disk takes nothing: then wish_abort_volatile."""
        with self.commit_lock():
            run = self.may_abort(self.load(), wish.run)
            write_state(self.paths.canary_abort, wish.as_dict(), schema=SCHEMA)
        return run

    def wish_abort_volatile(self, wish: AbortWish) -> None:
        """Until a reboot, which ends the run anyway. A commit may be under way; it needs the full disk as well."""
        write_state(self.paths.canary_abort_volatile, wish.as_dict(), schema=SCHEMA, durable=False)

    def abort_wish(self, run: str) -> AbortWish | None:
        """A file that cannot be read, or says no run, is taken as a wish: rolling back is the safe direction."""
        for path in (self.paths.canary_abort, self.paths.canary_abort_volatile):
            try:
                value = read_state(path, schema=SCHEMA)
            except (StateError, OSError) as error:
                why = f"{path}: {reason_of(error)}" if isinstance(error, OSError) else error.message
                return AbortWish(run, f"taken as a wish to end the run: {why}"[:MAX_REASON_CHARS], "?", _DRAIN_SECONDS)
            if value is None:
                continue
            if not isinstance(named := value.get("run"), str):
                return AbortWish(run, f"taken as a wish to end the run: {path} names no run", "?", _DRAIN_SECONDS)
            if named == run:
                return AbortWish.of(value)
        return None

    def clear_abort(self) -> None:
        """OSError where it stays."""
        for path in (self.paths.canary_abort, self.paths.canary_abort_volatile):
            try:
                remove_state(path)
            except (IsADirectoryError, PermissionError):  # a directory, of whoever: it must not end the next run
                path.rename(path.with_name(f"{path.name}.damaged-{time.time_ns()}"))

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
