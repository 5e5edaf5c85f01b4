"""What the launchers say of their engines (their state files), read again only when a file has changed. Unknown is not
"none": a launcher that has no file, or one that cannot be read, says nothing of its engines.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance.log import ApplianceError, printable
from appliance.paths import Paths
from appliance.statefile import read_state

_SCHEMA = 1  # of the launchers' state files
_MAX_TEXT = 300


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine as its launcher shows it."""

    release: str
    model: str | None
    socket: Path | None
    state: str  # appliance/launcher/lifecycle.py
    admitted: bool  # takes requests
    problem: str | None  # ready, but not on this GPU
    pid: int | None
    since: float  # UTC seconds: when it came into this state
    restarts: int
    last_exit: str | None

    @property
    def ready(self) -> bool:
        return self.state == "ready" and self.problem is None and self.socket is not None


@dataclass(frozen=True, slots=True)
class LauncherView:
    """One launcher. `wanted`: releases that should have an engine, as far as slots name them."""

    gpu: int
    uuid: str
    engines: tuple[EngineView, ...]
    wanted: frozenset[str]
    holds: dict[str, str]  # owner -> level
    share: float

    def settled(self, after: float = 0.0) -> bool:
        """Every engine that a slot names is ready, and no other is on its way. `after`: started anew since then."""
        there = {engine.release for engine in self.engines}
        return self.wanted <= there and all(engine.ready and engine.since >= after for engine in self.engines)

    def starting(self, after: float) -> bool:
        """All engines are on their way, or have come up since `after`."""
        begun = (engine.state in ("starting", "loading") or engine.since >= after for engine in self.engines)
        return bool(self.engines) and all(begun) and self.failed(after) is None

    def stopped_by_others(self, owner: str) -> str | None:
        """Who, besides `owner`, wants no engine here; it will not start until they let go."""
        others = sorted(name for name, level in self.holds.items() if level == "stop" and name != owner)
        return ", ".join(others) or None

    @property
    def serves(self) -> bool:
        return any(engine.admitted for engine in self.engines)

    def failed(self, after: float = 0.0) -> EngineView | None:
        """One that its launcher has given up since `after`."""
        gone = (engine for engine in self.engines if engine.state == "failed" and engine.since >= after)
        return next(gone, None)


@dataclass(slots=True)
class Launchers:
    """`views`: the launchers that have a readable state file, as of the last `look`."""

    paths: Paths
    views: dict[int, LauncherView] = field(default_factory=dict)
    _stamps: dict[int, tuple[int, int]] = field(default_factory=dict)

    def look(self, gpus: list[int]) -> None:
        """Brings `views` up to date."""
        for gpu in gpus:
            path = self.paths.launcher_state(gpu)
            try:
                stat = path.stat()
                stamp = stat.st_mtime_ns, stat.st_ino
                if stamp == self._stamps.get(gpu):
                    continue
                state = read_state(path, schema=_SCHEMA)
            except (OSError, ApplianceError):
                state = None
            if state is None or state.get("gpu") != gpu:
                self.views.pop(gpu, None)
                self._stamps.pop(gpu, None)
                continue
            self._stamps[gpu] = stamp
            self.views[gpu] = _launcher(gpu, state)


def _launcher(gpu: int, state: dict[str, Any]) -> LauncherView:
    slots, holds, share = state.get("slots"), state.get("holds"), state.get("share")
    entries = state.get("engines")
    return LauncherView(
        gpu=gpu,
        uuid=_text(state.get("uuid")) or "",
        engines=tuple(_engine(entry) for entry in entries if isinstance(entry, dict)) if entries else (),
        wanted=frozenset(map(str, slots.values())) if isinstance(slots, dict) else frozenset(),
        holds={str(name): _level(hold) for name, hold in holds.items()} if isinstance(holds, dict) else {},
        share=float(share) if isinstance(share, (int, float)) else 1.0,
    )


def _level(hold: Any) -> str:
    return str(hold.get("level")) if isinstance(hold, dict) else "?"


def _engine(entry: dict[str, Any]) -> EngineView:
    pid, restarts, socket, since = (entry.get(key) for key in ("pid", "restarts", "socket", "since"))
    return EngineView(
        release=_text(entry.get("release")) or "?",
        model=_text(entry.get("model")),
        socket=Path(socket) if isinstance(socket, str) else None,
        state=_text(entry.get("state")) or "?",
        admitted=entry.get("admitted") is True,
        problem=_text(entry.get("problem")),
        pid=pid if type(pid) is int else None,
        since=float(since) if isinstance(since, (int, float)) else 0.0,
        restarts=restarts if type(restarts) is int else 0,
        last_exit=_text(entry.get("last_exit")),
    )


def _text(value: Any) -> str | None:
    return printable(value[:_MAX_TEXT]) if isinstance(value, str) else None
