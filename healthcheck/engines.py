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
    """One launcher. Engines of the stable release vouch for the GPU. Those of another release are on trial (a canary;
    golden answers being recorded) or on their way out: what is wrong with them may be the release."""

    gpu: int
    uuid: str
    engines: tuple[EngineView, ...]
    wanted: frozenset[str]  # releases that should have an engine here
    stable: str | None  # the one that the stable slot names
    holds: dict[str, str]  # owner -> level
    share: float

    def vouches(self, release: str) -> bool:
        return release == self.stable

    @property
    def vouched(self) -> bool:
        """An engine that vouches for this GPU should be here."""
        return self.stable in self.wanted

    def settled(self, after: float = 0.0) -> bool:
        """The engine that vouches is ready; where none should be here: the others are, or have been given up.
        `after`: started anew since then."""
        there = {engine.release: engine for engine in self.engines if engine.since >= after}
        if self.vouched:
            return any(self.vouches(release) and engine.ready for release, engine in there.items())
        done = {release for release, engine in there.items() if engine.ready or engine.state in ("failed", "backoff")}
        return self.wanted <= done

    def starting(self, after: float) -> bool:
        """The engines that vouch (all, where none does) are on their way, or have come up since `after`."""
        looked = [engine for engine in self.engines if self.vouches(engine.release) or not self.vouched]
        begun = (engine.state in ("starting", "loading") or engine.since >= after for engine in looked)
        return bool(looked) and all(begun) and self.failed(after) is None

    def stopped_by_others(self, owner: str) -> str | None:
        """Who, besides `owner`, wants no engine here; it will not start until they let go."""
        others = sorted(name for name, level in self.holds.items() if level == "stop" and name != owner)
        return ", ".join(others) or None

    @property
    def serves(self) -> bool:
        return any(engine.admitted for engine in self.engines)

    def failed(self, after: float = 0.0) -> EngineView | None:
        """One that vouches and that its launcher has given up since `after`."""
        vouching = (engine for engine in self.engines if self.vouches(engine.release))
        gone = (engine for engine in vouching if engine.state == "failed" and engine.since >= after)
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
    entries, wanted = state.get("engines"), state.get("wanted")
    pointed = slots if isinstance(slots, dict) else {}
    return LauncherView(
        gpu=gpu,
        uuid=_text(state.get("uuid")) or "",
        engines=tuple(_engine(entry) for entry in entries if isinstance(entry, dict)) if entries else (),
        # A launcher of before "wanted" (it runs on until the upgrade restarts it) wants what the slots name.
        wanted=frozenset(map(str, wanted if isinstance(wanted, list) else pointed.values())),
        stable=_text(pointed.get("stable")),
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
