"""One child that calls NVML, and its owner: asks, and kills it when it is late. Never blocks the loop.

Reader.ask -> Child (nvml_child.py, or scripted_nvml.py) -> _line -> the hooks, which nvml.py fills in.
A child that cannot even be killed stays behind; `Behind` knows where each of them hangs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from appliance.launcher.loop import Loop, Timer
from healthcheck.child import Child
from healthcheck.nvml_protocol import MAX_LINE_BYTES, Begin, Done, Event, Gpu, Message, Request

CLOSE_SECONDS = 10.0  # nvmlShutdown, then the child is killed
MAX_UNKILLABLE = 2
_RESTART_SECONDS = (1.0, 60.0)  # after a child's end: the first wait, doubled up to the longest

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Message).decode

Behind = Counter[str | None]
"""Children that could not be killed, by the GPU that they hang in (None: in none in particular)."""


@dataclass(frozen=True, slots=True)
class Round:
    """The end of one reading."""

    ok: bool
    error: str | None  # nvml_protocol.Done.error, or "bad_answer", "ended", "no_process"
    detail: str
    driver: str | None
    read: tuple[str, ...]  # UUIDs in this round, also those whose reading says that they are lost
    skipped: tuple[str, ...]  # hung lately: read by a child of their own
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


class Reader:
    """One child at a time. `ask` is cheap to call: what is under way is finished first, then it is read once more."""

    def __init__(self, loop: Loop, command: Sequence[str], deadline: float, behind: Behind) -> None:
        self._loop, self._command, self._deadline, self.behind = loop, list(command), deadline, behind
        self.crashes = 0  # since the start
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
        self._restarts = Backoff(_RESTART_SECONDS)

    # -- what the owner fills in
    def _request(self) -> tuple[dict[str, str], list[str]]:
        """(PCI -> UUID of the GPUs that are known, UUIDs to leave out)."""
        raise NotImplementedError

    def _gpu(self, gpu: Gpu) -> None:
        raise NotImplementedError

    def _event(self, event: Event) -> None:
        raise NotImplementedError

    def _hung(self, begun: Begin) -> None:
        """Its child was killed."""
        raise NotImplementedError

    def _round(self, ok: bool, error: str | None, detail: str, done: Done | None) -> None:
        raise NotImplementedError

    # -- asking
    @property
    def state(self) -> str:
        """closed | idle | reading | waiting (to start the child again) | stuck (children that cannot be killed)."""
        if self._closed:
            return "closed"
        if self._asked:
            return "reading"
        if self._child is None and self.behind[None] >= MAX_UNKILLABLE:
            return "stuck"
        return "idle" if self._restart is None else "waiting"

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child is not None else None

    def ask(self) -> bool:
        """Reads as soon as that is possible. False: not now (closed, or stuck)."""
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
        self._number += 1
        self._asked, self._wanted, self._seen = True, False, []
        self._begun = Begin("request")
        self._await()
        known, skip = self._request()
        self._child.send(_encode(Request(self._number, "read", known, skip)) + b"\n")

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
            self._event(message.event)
        elif not self._asked or message.id != self._number:
            self._broken("an answer that nobody waits for")
        elif message.done is not None:
            self._done(message.done)
        else:
            self._await()  # it makes progress
            if message.begin is not None:
                self._begun = message.begin
            if message.gpu is not None:
                self._seen.append(message.gpu.uuid)
                self._gpu(message.gpu)

    def _done(self, done: Done) -> None:
        self._over()
        self._begun = Begin("request")  # where it may hang now is no GPU's
        self._restarts.count = 0
        self._round(done.ok, done.error, done.detail, done)
        if self._wanted:
            self.ask()

    def _over(self) -> None:
        self._asked = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- what goes wrong
    def _late(self) -> None:
        self._kill()
        self._hung(self._begun)

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
        self._round(False, error, detail, None)

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
            self.ask()

    def _farewell(self) -> Callable[[bool], None]:
        """What follows the end of a child, or the discovery that it does not end."""
        given_up = False
        where = self._begun.uuid

        def gone(ended: bool) -> None:
            nonlocal given_up
            if not given_up:
                self._leaving -= 1
            if ended and given_up:
                self.behind[where] -= 1
            elif not ended:
                given_up = True
                self.behind[where] += 1
            self._closed_if_gone()

        return gone

    # -- closing
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
