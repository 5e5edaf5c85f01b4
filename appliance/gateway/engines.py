"""Which engines there are, and which of them gets a request.

The launchers say what runs (their state files), the slot pointer says which release is ours. Both are looked at every
POLL_SECONDS. An engine is a candidate when its launcher admits it and its socket answers. A file that cannot be read
changes nothing: unknown never drains a GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec

from appliance.gateway.sharing import Load
from appliance.gateway.upstream import Connection, Pool, UpstreamError
from appliance.log import ApplianceError
from appliance.paths import RELEASE_NAME, Paths
from appliance.slots import SlotError, pointer
from appliance.statefile import read_state
from engine.log import log_event

logger = logging.getLogger(__name__)

SCHEMA = 1  # of the launchers' state files and of the host drain
POLL_SECONDS = 0.1
REST_SECONDS = 0.5  # an engine that failed or said 503 gets nothing for so long
PROBE_SECONDS = 2.0
_GPU_DIRECTORY = re.compile(r"gpu(\d{1,4})")
_PROBE = b"GET /livez HTTP/1.1\r\nHost: engine\r\n\r\n"
MAX_REASON_CHARS = 1000  # shown to everybody by /readyz
_REMEMBERED = 8  # earlier releases of the pointer


Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Scalar = str | float | int | bool | None
_NO_FILE = (FileNotFoundError, NotADirectoryError)
"""Of all errors these two say that something is not there; the others (no descriptors left, a disk that fails) say
nothing of it."""


class EngineEntry(msgspec.Struct, kw_only=True, frozen=True):
    """One engine in a launcher's state file."""

    release: Annotated[str, msgspec.Meta(pattern=f"^{RELEASE_NAME.pattern}$")]
    state: str
    socket: str | None = None  # None: it could not even be planned
    admitted: bool = False
    pid: Number | None = None
    restarts: Number = 0
    last_exit: str | None = None
    progress: float | None = None
    model: str | None = None
    engine_version: str | None = None


class LauncherState(msgspec.Struct, kw_only=True, frozen=True):
    """What a launcher says of its GPU; keys that a gateway does not need are left alone."""

    gpu: Number
    uuid: str = ""
    status: str = ""
    admitted: bool = False
    share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0  # of its usual load; less on probation
    holds: dict[str, dict[str, Scalar]] = {}  # flat: what is shown must not be able to nest without end
    engines: list[EngineEntry] = []


class Engine:
    """One engine process that has been admitted: its connections and what we know of it."""

    def __init__(self, gpu: int, entry: EngineEntry, load: Load | None = None) -> None:
        self.load = load
        self.gpu, self.release, self.pid = gpu, entry.release, entry.pid
        assert entry.socket is not None
        self.pool = Pool(entry.socket)
        self.in_flight = 0
        self.share = 1.0  # what its launcher allows
        self.reachable: bool | None = None  # None: not known yet
        self.rests_until = 0.0  # loop time
        self.gone = False  # its launcher admits it no more (or runs another process in its place)

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """While a request of ours is there."""
        self.in_flight += 1
        if self.load is not None:
            self.load.add(self.gpu, 1)
        try:
            yield
        finally:
            self.in_flight -= 1
            if self.load is not None:
                self.load.add(self.gpu, -1)

    @property
    def pressure(self) -> int:
        """Requests in flight there, from all workers of this gateway."""
        return self.in_flight if self.load is None else self.load.of(self.gpu)

    @property
    def fullness(self) -> float:
        """`pressure` for its share: at a quarter of the share one request weighs as much as four elsewhere."""
        return self.pressure / self.share if self.share > 0 else math.inf

    def usable(self, now: float) -> bool:
        return not self.gone and self.reachable is not False and self.rests_until <= now


class Engines:
    """All engines of this host, seen from one slot. Gateway.keep_up polls it."""

    def __init__(self, paths: Paths, slot: str) -> None:
        self.slot = slot
        self.launchers: dict[int, LauncherState] = {}
        self.release: str | None = None  # the pointer's
        self.draining: str | None = None  # reason of a host drain
        self.load: Load | None = None  # shared with other workers, where there are any
        self._paths = paths
        self._pointer_error: str | None = None
        self._before: list[str] = []  # releases of the pointer before this one, newest first
        self._engines: dict[tuple[int, str, str | None, int | None], Engine] = {}
        self._stamps: dict[int, Stamp] = {}
        self._drain_stamp: Stamp | None = None
        self._change: asyncio.Event = asyncio.Event()
        self._probes: dict[Engine, asyncio.Task[None]] = {}

    # ---- what is there ---------------------------------------------------------------------------------------------

    @property
    def admitted(self) -> list[Engine]:
        return list(self._engines.values())

    def serving(self) -> str | None:
        """The release that requests go to: the pointer's, or, until one of its engines is admitted, the one before."""
        there = {engine.release for engine in self._engines.values()}
        return next((name for name in (self.release, *self._before) if name in there), self.release)

    def not_ready(self) -> tuple[str, str] | None:
        """(code, reason) why no request of this slot can be served now, or None."""
        if self.release is None:
            return "no_release", f"no release is set for the slot {self.slot}"
        release = self.serving()
        mine = [engine for engine in self._engines.values() if engine.release == release]
        if any(engine.reachable is not False for engine in mine):
            return None
        if mine:
            return "no_engine", f"no engine of {release} answers"
        return "no_engine", f"no engine of {release} is ready: {self._why(release)}"

    def _why(self, release: str | None) -> str:
        parts = []
        for gpu, state in sorted(self.launchers.items()):
            if state.holds:
                reason = "; ".join(f"held by {owner}" for owner in sorted(state.holds))
            else:
                entry = next((entry for entry in state.engines if entry.release == release), None)
                reason = entry.state if entry is not None else "not running there"
                if entry is not None and entry.progress is not None and entry.state in ("starting", "loading"):
                    reason += f" ({100 * entry.progress:.0f} %)"
            parts.append(f"GPU {gpu} {reason}")
        return ", ".join(parts) or "no launcher has reported"

    # ---- choosing --------------------------------------------------------------------------------------------------

    def pick(self, release: str | None = None, avoid: Iterable[Engine] = ()) -> Engine | None:
        """The usable engine with the fewest requests of ours for its share, ties at random, as likely as their shares;
        of `release`, else of the one served."""
        name = self.serving() if release is None else release
        now = asyncio.get_running_loop().time()
        usable = [e for e in self._engines.values() if e.release == name and e.usable(now) and e not in avoid]
        if len(usable) < 2:
            return usable[0] if usable else None
        fullness = [engine.fullness for engine in usable]
        least = min(fullness)
        tied = [engine for engine, number in zip(usable, fullness, strict=True) if number == least]
        weights = [engine.share for engine in tied]
        return random.choices(tied, weights)[0] if any(weights) else random.choice(tied)

    def suspect(self, engine: Engine) -> None:
        """It refused a connection or broke one: it gets nothing until its socket answers again."""
        engine.rests_until = asyncio.get_running_loop().time() + REST_SECONDS
        engine.reachable = False
        self._begin_probe(engine)

    def rest(self, engine: Engine) -> None:
        """It said that it cannot take requests now; its launcher's state file will say more in a moment."""
        engine.rests_until = asyncio.get_running_loop().time() + REST_SECONDS

    async def changed(self, seconds: float) -> None:
        """Returns when something has changed, at the latest after `seconds`."""
        try:
            async with asyncio.timeout(min(seconds, REST_SECONDS)):  # no event says that a rest is over
                await self._change.wait()
        except TimeoutError:
            pass

    def notify(self) -> None:
        """Wake everybody who waits for a change."""
        self._change.set()
        self._change = asyncio.Event()

    # ---- keeping up to date ----------------------------------------------------------------------------------------

    def close(self) -> None:
        for task in self._probes.values():
            task.cancel()
        for engine in self._engines.values():
            engine.pool.close()

    def poll(self) -> None:
        """Look once, at what has changed on disk."""
        changed = self._poll_pointer() | self._poll_launchers()
        with contextlib.suppress(OSError):  # unknown changes nothing; the next look is in a moment
            stamp = _stamp(self._paths.host_drain)
            if stamp != self._drain_stamp:
                self._drain_stamp, changed = self._read_drain(stamp), True
        if changed:
            self.notify()

    def _poll_pointer(self) -> bool:
        try:
            name = pointer(self._paths, self.slot)
            self._pointer_error = None
        except SlotError as error:  # what serves goes on, here as in the launchers
            if error.message != self._pointer_error:
                self._pointer_error = error.message
                log_event(logger, logging.ERROR, "slot_not_read", slot=self.slot, error=error.message)
            return False
        if name == self.release:
            return False
        if self.release is not None:
            self._before = [self.release, *(old for old in self._before if old != self.release)][:_REMEMBERED]
        words = f"the slot's release is {name or 'none'}, was {self.release or 'none'}"
        log_event(logger, logging.INFO, "slot_pointer", words, slot=self.slot, release=name, before=self.release)
        self.release = name
        return True

    def _poll_launchers(self) -> bool:
        changed = False
        seen = set()
        try:
            gpus = _gpus(self._paths.run)
        except OSError:  # what cannot be looked at is not gone
            return False
        for gpu in gpus:
            path = self._paths.launcher_state(gpu)
            try:
                stamp = _stamp(path)
            except OSError:
                seen.add(gpu)
                continue
            if stamp is not None:
                seen.add(gpu)
            if stamp != self._stamps.get(gpu) and stamp is not None:
                self._stamps[gpu] = stamp
                changed |= self._read_launcher(gpu, path)
        for gpu in self._stamps.keys() - seen:  # the file is gone: the launcher ended in order, or never ran
            del self._stamps[gpu]
            changed |= self.launchers.pop(gpu, None) is not None
        if changed:
            self._update()
        return changed

    def _read_launcher(self, gpu: int, path: Path) -> bool:
        try:
            raw = read_state(path, schema=SCHEMA)
            if raw is None:
                return False
            state = msgspec.convert(_showable(raw), LauncherState)
            if state.gpu != gpu:
                raise msgspec.ValidationError(f"it is of GPU {state.gpu}")
        except (ApplianceError, ValueError, RecursionError, OSError) as error:
            if isinstance(error, OSError):
                self._stamps[gpu] = _UNREAD  # not the file's fault: look again
            log_event(logger, logging.ERROR, "launcher_state", f"{path}: {error}; the last good one stays in force")
            return False
        self.launchers[gpu] = state
        return True

    def _update(self) -> None:
        """Engine objects for what is admitted now."""
        found = {
            (gpu, entry.release, entry.socket, entry.pid): entry
            for gpu, state in self.launchers.items()
            for entry in state.engines
            if entry.admitted and state.admitted and entry.socket is not None
        }
        for key in self._engines.keys() - found.keys():
            engine = self._engines.pop(key)
            engine.gone = True
            engine.pool.close()
        for key in found.keys() - self._engines.keys():
            engine = self._engines[key] = Engine(key[0], found[key], self.load)
            engine.pool.on_idle_lost = lambda engine=engine: self._begin_probe(engine)
            self._begin_probe(engine)
        for engine in self._engines.values():
            engine.share = self.launchers[engine.gpu].share

    def _read_drain(self, stamp: Stamp | None) -> Stamp | None:
        """Take over what the file says; what has been read now: `stamp`, or nothing."""
        try:
            state = read_state(self._paths.host_drain, schema=SCHEMA)
            reason = None if state is None else _showable(state.get("reason"))
        except (ApplianceError, ValueError, RecursionError, OSError) as error:
            log_event(logger, logging.ERROR, "host_drain", f"{error}; what was in force stays in force")
            return _UNREAD if isinstance(error, OSError) else stamp
        self.draining = None if state is None else str(reason or "no reason was given")[:MAX_REASON_CHARS]
        return stamp

    # ---- does its socket answer? -----------------------------------------------------------------------------------

    def _begin_probe(self, engine: Engine) -> None:
        if engine not in self._probes:
            task = self._probes[engine] = asyncio.get_running_loop().create_task(self._probe(engine))
            task.add_done_callback(lambda task: self._probed(engine, task))

    def _probed(self, engine: Engine, task: asyncio.Task[None]) -> None:
        del self._probes[engine]
        if not task.cancelled() and (error := task.exception()) is not None:
            log_event(logger, logging.ERROR, "probe_failed", repr(error))

    async def _probe(self, engine: Engine) -> None:
        """Ask until it answers or is gone. The connection stays: when the engine dies, its end is seen at once."""
        while not engine.gone:
            if await _answers(engine.pool):
                if engine.reachable is not True:
                    engine.reachable = True
                    self.notify()
                return
            if engine.reachable is not False:
                engine.reachable = False
                log_event(logger, logging.WARNING, "engine_unreachable", gpu=engine.gpu, release=engine.release)
                self.notify()
            await asyncio.sleep(POLL_SECONDS)


async def _answers(pool: Pool) -> bool:
    connection: Connection
    try:
        connection = await pool.acquire(fresh=True)
        exchange = connection.send(_PROBE, b"")
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await exchange.head
                exchange.attach(lambda data: None)
                await exchange.ended
        finally:
            exchange.close()
    except (UpstreamError, TimeoutError):
        return False
    return True


def _gpus(run: Path) -> list[int]:
    """OSError if it cannot be known."""
    try:
        names = os.listdir(run)
    except _NO_FILE:
        return []
    return [int(matched[1]) for name in names if (matched := _GPU_DIRECTORY.fullmatch(name))]


Stamp = tuple[int, int, int]
_UNREAD: Stamp = (-1, -1, -1)


def _stamp(path: Path) -> Stamp | None:
    """Changes with every replacement of the file; None: there is none. OSError if that cannot be known."""
    try:
        stat = os.stat(path)
    except _NO_FILE:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


def _showable(value: Any) -> Any:
    """`value` out of a state file, without lone surrogates: no answer of ours could carry them."""
    return json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
