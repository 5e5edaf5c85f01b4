"""Keeps other changes of releases off a host while a canary run is on. Only reads what the canary's controller has
written (canary/store.py), so it works while that is down; knows no more of a run than whether it is over."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.log import BusyError
from appliance.paths import Paths
from appliance.statefile import StateError, read_state

_SCHEMA = 1  # canary/run.py:SCHEMA
_ENDED = frozenset({"settled", "aborted", "failed"})  # canary/run.py:ENDED
_COMMITTED = "settling"


@dataclass(frozen=True, slots=True)
class RunOn:
    id: str
    release: str
    stable: str
    phase: str

    @property
    def way_out(self) -> str:
        """How it ends."""
        if self.phase == _COMMITTED:
            undo = f"{self.release} is promoted and settles: `canary undo` takes it back"
            return f"{undo}, or `canary status --wait`, then again"
        return f"end it with `canary rollback {self.id}`, or wait for it with `canary status --wait`"


def run_on(paths: Paths) -> RunOn | None:
    """The run that is not over, or None. StateError for a file that cannot be understood: whether one is on is then
    unknown."""
    value = read_state(paths.canary_run, schema=_SCHEMA)
    if value is None or value.get("phase") in _ENDED:
        return None
    texts = [value.get(name) for name in ("id", "release", "stable", "phase")]
    if not all(isinstance(text, str) for text in texts):
        raise StateError(
            f"{paths.canary_run} names no run that can be understood", hint="see `canary status` and `canary cleanup`"
        )
    return RunOn(*map(str, texts))


def refuse_during_run(paths: Paths, what: str) -> None:
    """BusyError (exit 5), with what to do, while a run is on."""
    run = run_on(paths)
    if run is None:
        return
    raise BusyError(
        f"the canary run {run.id} of {run.release} against {run.stable} is on ({run.phase}), so {what} is refused",
        hint=run.way_out,
    )
