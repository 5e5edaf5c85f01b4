"""What a launcher shows: its state file and its one line for systemctl status."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.launcher.lifecycle import State
from appliance.statefile import write_state

if TYPE_CHECKING:
    from appliance.launcher.engine_process import EngineProcess
    from appliance.launcher.launcher import Launcher

SCHEMA = 1


def say(text: str) -> None:
    """One line for the journal (sd-daemon(3): "<3>" in front is an error). A journal that is gone ends nobody."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


class StateFile:
    """state.json under /run: replaced whenever what it says has changed; not durable, as /run is not."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: dict[str, Any] | None = None
        self._failed = False

    def write(self, state: dict[str, Any]) -> bool:
        """False if it could not be written (said once); the caller tries again."""
        if state == self._written:
            return True
        try:
            write_state(self._path, state, schema=SCHEMA, durable=False)
        except OSError as error:
            if not self._failed:
                say(f"<3>cannot write {self._path}: {error.strerror}; it is out of date")
            self._failed = True
            return False
        self._written, self._failed = state, False
        return True

    def remove(self) -> None:
        """No file: no launcher."""
        with contextlib.suppress(OSError):
            self._path.unlink()


def status_text(launcher: Launcher) -> str:
    """For people: what it is doing, the worst first."""
    parts = []
    if launcher.holds:
        parts.append(f"held by {launcher.holds.text()}")
        if not launcher.holds.saved:
            parts.append("the hold is NOT SAVED (see the journal)")
    elif launcher.holds.share < 1:
        parts.append(f"at {launcher.holds.share:.0%} of its share")
    parts += [_engine_text(engine) for engine in launcher.engines.values()]
    if not launcher.holds and not launcher.engines:
        parts.append("no release: see `appliance release use`" if not launcher.desired() else "starting")
    return "; ".join(parts)


def _engine_text(engine: EngineProcess) -> str:
    text = f"{engine.release} {engine.state}"
    if engine.state is State.LOADING and engine.progress is not None:
        text += f" {100 * engine.progress:.0f} %"
    elif engine.state is State.READY and engine.problem is not None:
        text += f" but {engine.problem}"
    elif engine.state in (State.BACKOFF, State.FAILED):
        text += f": {engine.last_exit}"
    if engine.unknown and engine.live:
        text += f" ({', '.join(engine.unknown)})"
    return text
