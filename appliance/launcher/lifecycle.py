"""The states of one engine and the ways between them. Pure.

```
gone -> starting -> loading -> ready -> draining -> stopping -> gone
            \\          \\________\\__________\\____ stopping -> backoff -> starting
             \\______________________________________\\______ -> failed  (gave up; until somebody asks)
```
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    GONE = "gone"  # no process; not wanted, or not yet
    STARTING = "starting"  # the child exists and waits for its scope
    LOADING = "loading"  # the engine runs and is not ready
    READY = "ready"
    DRAINING = "draining"  # asked to end; requests in flight finish
    STOPPING = "stopping"  # its processes are ending or are being killed
    BACKOFF = "backoff"  # ended by itself; started again at `retry_at`
    FAILED = "failed"  # gave up


NO_SCOPE = "no scope: "
"""How `last_exit` begins where systemd made no scope, mostly not in time: the host's doing, not the engine's or
its release's. The launcher tries again."""

LIVE = frozenset({State.STARTING, State.LOADING, State.READY, State.DRAINING, State.STOPPING})
"""Something of it may still hold the device."""

TRANSITIONS: dict[State, frozenset[State]] = {
    State.GONE: frozenset({State.STARTING, State.BACKOFF, State.FAILED}),
    State.STARTING: frozenset({State.LOADING, State.STOPPING}),
    State.LOADING: frozenset({State.READY, State.STOPPING}),
    State.READY: frozenset({State.DRAINING, State.STOPPING}),
    State.DRAINING: frozenset({State.STOPPING}),
    State.STOPPING: frozenset({State.GONE, State.BACKOFF, State.FAILED}),
    State.BACKOFF: frozenset({State.STARTING, State.GONE, State.BACKOFF, State.FAILED}),
    State.FAILED: frozenset({State.STARTING, State.GONE, State.BACKOFF, State.FAILED}),
}


def check_transition(before: State, after: State) -> None:
    """RuntimeError for one that must not be: the launcher would rather start afresh than go on from there."""
    if after not in TRANSITIONS[before]:
        raise RuntimeError(f"an engine cannot go from {before} to {after}")
