"""The watchdog's side of NVML: owns the child that calls it, asks, and kills it when it is late. Never blocks the loop.

NvmlProbe.read -> Child (nvml_child.py, or scripted_nvml.py) -> _line -> on_reading for each GPU -> on_round.
A GPU that hangs is named (the child says what it calls next), left out of the next rounds for a while, so that the
others are read as before, and then tried again. A child that cannot even be killed stays behind; a few of those, and
there are no more until one has ended: each holds what the driver holds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from appliance.launcher.loop import Loop, Timer
from healthcheck.child import Child
from healthcheck.nvml_protocol import MAX_LINE_BYTES, Begin, Done, Event, Gpu, Message, Request
from healthcheck.types import GpuReading

CLOSE_SECONDS = 10.0  # nvmlShutdown, then the child is killed
MAX_UNKILLABLE = 2
EVENT_SECONDS = 1.0  # between two readings that events bring about
_RESTART_SECONDS = (1.0, 60.0)  # after a child's end: the first wait, doubled up to the longest
_SKIP_SECONDS = (60.0, 600.0)  # a GPU that hung is left alone: likewise

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Message).decode


def child_command(script: str | None = None) -> list[str]:
    """argv of the child; with `script` of the one that stands in for NVML."""
    module = "healthcheck.nvml_child" if script is None else "healthcheck.scripted_nvml"
    return [sys.executable, "-P", "-m", module, *([] if script is None else [script])]


@dataclass(frozen=True, slots=True)
class Hang:
    """A call that did not return within the deadline."""

    uuid: str | None  # None: no GPU in particular (nvmlInit, the enumeration)
    stage: str  # "nvml", "index N", "events", a UUID; "request": it did not even begin
    seconds: float
    in_row: int  # of this GPU (or of none in particular), without a reading in between


@dataclass(frozen=True, slots=True)
class Round:
    """The end of one reading of all GPUs."""

    ok: bool
    error: str | None  # nvml_protocol.Done.error, or "bad_answer", "ended", "no_process"
    detail: str
    driver: str | None
    read: tuple[str, ...]  # UUIDs in this round, also those whose reading says that they are lost
    skipped: tuple[str, ...]  # hung lately
    unread: Mapping[str, str] = field(default_factory=dict)
    deaf: Mapping[str, str] = field(default_factory=dict)


class Backoff:
    """Waits that double up to the longest."""

    def __init__(self, first_and_longest: tuple[float, float]) -> None:
        self._first, self._longest = first_and_longest
        self.count = 0

    def next(self) -> float:
        self.count += 1
        return float(min(self._first * 2 ** min(self.count - 1, 20), self._longest))


class NvmlProbe:
    """One child at a time. `read` is cheap to call: what is under way is finished first, then it is read once more."""

    def __init__(
        self, loop: Loop, command: Sequence[str], deadline: float, on_reading: Callable[[GpuReading], None],
        on_event: Callable[[Event], None], on_hang: Callable[[Hang], None], *,
        on_round: Callable[[Round], None] = lambda _: None, known: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """`deadline`: seconds for one step, that is one GPU. A call that waits for a dead GSP returns after 45 s, and a
        GPU full of corrected errors has been seen to take as long: 60 is a good one. `known`: PCI -> UUID of the GPUs
        of this host, as the driver's /proc shows them; what NVML says is added."""
        self._loop, self._command, self._deadline = loop, list(command), deadline
        self._on_reading, self._on_event, self._on_hang, self._on_round = on_reading, on_event, on_hang, on_round
        self.readings: dict[str, GpuReading] = {}
        self.known = dict(known or {})
        self.hangs = self.crashes = self.unkillable = 0  # unkillable: now; the others since the start
        self._read_at: dict[str, float] = {}  # loop time
        self._child: Child | None = None
        self._leaving = 0
        self._closed = False
        self._close_done: list[Callable[[], None]] = []
        self._number = 0
        self._asked = self._wanted = False
        self._begun = Begin("request")
        self._seen: list[str] = []
        self._timer: Timer | None = None  # of the answer under way
        self._restart: Timer | None = None
        self._event_read: Timer | None = None
        self._event_read_at = -EVENT_SECONDS
        self._restarts = Backoff(_RESTART_SECONDS)
        self._skips: dict[str | None, Backoff] = {}
        self._skip_until: dict[str, float] = {}

    # -- asking
    @property
    def state(self) -> str:
        """closed | idle | reading | waiting (to start the child again) | stuck (children that cannot be killed)."""
        if self._closed:
            return "closed"
        if self._asked:
            return "reading"
        if self._child is None and self.unkillable >= MAX_UNKILLABLE:
            return "stuck"
        return "idle" if self._restart is None else "waiting"

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child is not None else None

    def age(self, uuid: str) -> float | None:
        """Seconds since this GPU was last read; None: never."""
        at = self._read_at.get(uuid)
        return None if at is None else self._loop.time() - at

    def read(self) -> bool:
        """Reads all GPUs as soon as that is possible. False: not now (closed, or stuck)."""
        if self._closed or self.state == "stuck":
            return False
        if self._asked or self._restart is not None:
            self._wanted = True
            return True
        if self._child is None and not self._start():
            return True
        self._ask()
        return True

    def _start(self) -> bool:
        try:
            self._child = Child(self._loop, self._command, MAX_LINE_BYTES, self._line, self._ended)
        except OSError as error:
            self._failed("no_process", f"{self._command[0]}: {error}")
            return False
        return True

    def _ask(self) -> None:
        assert self._child is not None
        now = self._loop.time()
        self._skip_until = {uuid: until for uuid, until in self._skip_until.items() if until > now}
        self._number += 1
        self._asked, self._wanted, self._seen = True, False, []
        self._begun = Begin("request")
        self._await()
        self._child.send(_encode(Request(self._number, "read", self.known, list(self._skip_until))) + b"\n")

    def _await(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.later(self._deadline, self._late)

    # -- what the child says
    def _line(self, line: bytes) -> None:
        try:
            message = _decode(line)
        except (msgspec.DecodeError, ValueError) as error:
            self._broken(f"{line[:100]!r}: {error}")
            return
        if message.event is not None:
            self._read_for_event()
            self._on_event(message.event)
        elif not self._asked or message.id != self._number:
            self._broken("an answer that nobody waits for")
        elif message.done is not None:
            self._done(message.done)
        else:
            self._await()  # it makes progress
            if message.begin is not None:
                self._begun = message.begin
            if message.gpu is not None:
                self._reading(message.gpu)

    def _read_for_event(self) -> None:
        """At once, but no more often than EVENT_SECONDS: the levels say what an event means."""
        if self._event_read is None:
            wait = max(0.0, self._event_read_at + EVENT_SECONDS - self._loop.time())
            self._event_read = self._loop.later(wait, self._event_reading)

    def _event_reading(self) -> None:
        self._event_read, self._event_read_at = None, self._loop.time()
        self.read()

    def _reading(self, gpu: Gpu) -> None:
        reading = GpuReading(gpu.uuid, gpu.at, dict(gpu.fields), dict(gpu.unknown), gpu.error)
        self._seen.append(gpu.uuid)
        self.readings[gpu.uuid] = reading
        self._read_at[gpu.uuid] = self._loop.time()
        self._skips.pop(gpu.uuid, None)
        pci = gpu.fields.get("pci")
        if isinstance(pci, str) and gpu.error != "not_found":
            self.known[pci] = gpu.uuid
        self._on_reading(reading)

    def _done(self, done: Done) -> None:
        self._over()
        self._restarts.count = 0
        self._skips.pop(None, None)
        self._on_round(
            Round(done.ok, done.error, done.detail, done.driver, tuple(self._seen), tuple(self._skip_until),
                  done.unread, done.deaf)
        )  # fmt: skip
        if self._wanted:
            self.read()

    def _over(self) -> None:
        self._asked = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- what goes wrong
    def _late(self) -> None:
        begun = self._begun
        self.hangs += 1
        counter = self._skips.setdefault(begun.uuid, Backoff(_SKIP_SECONDS))
        wait = counter.next()
        if begun.uuid is not None:
            self._skip_until[begun.uuid] = self._loop.time() + wait
        self._kill()
        self._wait_for_restart(_RESTART_SECONDS[0] if begun.uuid is not None else self._restarts.next())
        self._on_hang(Hang(begun.uuid, begun.stage, self._deadline, counter.count))

    def _broken(self, detail: str) -> None:
        self.crashes += 1
        self._kill()
        self._failed("bad_answer", detail)

    def _ended(self, code: int) -> None:
        self._child = None
        self.crashes += 1
        self._failed("ended", f"the child ended with {code}")

    def _failed(self, error: str, detail: str) -> None:
        self._over()
        self._wait_for_restart(self._restarts.next())
        self._on_round(Round(False, error, detail, None, tuple(self._seen), tuple(self._skip_until)))

    def _kill(self) -> None:
        self._over()
        child, self._child = self._child, None
        if child is not None:
            self._leaving += 1
            child.kill(self._farewell())

    def _wait_for_restart(self, seconds: float) -> None:
        """The round that did not end is done again then."""
        self._wanted = True
        if self._restart is None and not self._closed:
            self._restart = self._loop.later(seconds, self._restarted)

    def _restarted(self) -> None:
        self._restart = None
        if self._wanted:
            self.read()

    def _farewell(self) -> Callable[[bool], None]:
        """What follows the end of a child, or the discovery that it does not end."""
        given_up = False

        def gone(ended: bool) -> None:
            nonlocal given_up
            if not given_up:
                self._leaving -= 1
            if ended and given_up:
                self.unkillable -= 1
            elif not ended:
                given_up = True
                self.unkillable += 1
            self._closed_if_gone()

        return gone

    # -- closing, for a reset
    def close(self, done: Callable[[], None]) -> None:
        """Ends the child, so that NVML is closed for certain, and calls `done` once it has ended; later than
        CLOSE_SECONDS + child.KILL_SECONDS it does so anyway, and the GPU's holders will name the child that is left."""
        self._closed = True
        self._close_done.append(done)
        self._over()
        if self._restart is not None:
            self._restart.cancel()
            self._restart = None
        child, self._child = self._child, None
        if child is not None:
            self._leaving += 1
            child.leave(_encode(Request(0, "quit")) + b"\n", CLOSE_SECONDS, self._farewell())
        else:
            self._loop.later(0, self._closed_if_gone)

    def _closed_if_gone(self) -> None:
        if self._leaving == 0:
            waiting, self._close_done = self._close_done, []
            for done in waiting:
                done()

    def open(self) -> None:
        """Reads again, all GPUs: after a reset what hung before may not."""
        self._closed = False
        self._skips.clear()
        self._skip_until.clear()
        self._restarts.count = 0
        self.read()
