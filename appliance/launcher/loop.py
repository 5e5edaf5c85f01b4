"""A small event loop: descriptors, timers, children, signals; one thread. asyncio would cost each launcher 5 MB.

Callbacks run one after another and must not block. An exception in one ends the launcher: systemd starts it again, and
it then begins from what is on disk.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
Callback = Callable[[], None]
_FEW_TIMERS = 64


class Timer:
    """One call in the future; `cancel` is idempotent."""

    __slots__ = ("at", "callback")

    def __init__(self, at: float, callback: Callback) -> None:
        self.at = at
        self.callback: Callback | None = callback

    def cancel(self) -> None:
        self.callback = None


class Loop:
    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._sweep_at = _FEW_TIMERS
        self._running = False
        self._signals: dict[int, Callback] = {}
        self._wakeup: tuple[socket.socket, socket.socket] | None = None

    @staticmethod
    def time() -> float:
        """Seconds of CLOCK_MONOTONIC."""
        return time.monotonic()

    # -- descriptors
    def watch(self, fd: int, events: int, callback: Callback) -> None:
        """Calls back whenever `fd` is ready for `events` (READ, WRITE); replaces an earlier watch of it."""
        try:
            self._selector.modify(fd, events, callback)
        except KeyError:
            self._selector.register(fd, events, callback)

    def unwatch(self, fd: int) -> None:
        """Before `fd` is closed; fine if it was not watched."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(fd)

    # -- timers
    def later(self, seconds: float, callback: Callback) -> Timer:
        timer = Timer(self.time() + seconds, callback)
        if len(self._timers) >= self._sweep_at:  # cancelled ones: a wait may have been for a day
            self._timers = [entry for entry in self._timers if entry[2].callback is not None]
            heapq.heapify(self._timers)
            self._sweep_at = max(_FEW_TIMERS, 2 * len(self._timers))
        heapq.heappush(self._timers, (timer.at, next(self._order), timer))
        return timer

    # -- children
    def watch_child(self, pid: int, ended: Callable[[int], None]) -> None:
        """Calls `ended(returncode)` once when our child `pid` has ended (negative: the signal), and reaps it."""
        fd = os.pidfd_open(pid)

        def reap() -> None:
            reaped, status = os.waitpid(pid, os.WNOHANG)
            if reaped == pid:
                self.unwatch(fd)
                os.close(fd)
                ended(os.waitstatus_to_exitcode(status))

        self.watch(fd, READ, reap)

    # -- signals
    def on_signal(self, number: signal.Signals, callback: Callback) -> None:
        """Only in the main thread."""
        if self._wakeup is None:
            self._wakeup = ours, theirs = socket.socketpair()
            ours.setblocking(False)
            theirs.setblocking(False)
            signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
            self.watch(ours.fileno(), READ, self._signalled)
        self._signals[number] = callback
        signal.signal(number, lambda *_: None)  # the number arrives through the wakeup descriptor

    def _signalled(self) -> None:
        assert self._wakeup is not None
        with contextlib.suppress(BlockingIOError):
            for number in dict.fromkeys(self._wakeup[0].recv(4096)):
                if number in self._signals:
                    self._signals[number]()

    # -- running
    def run(self, until: Callable[[], bool] | None = None, timeout: float | None = None) -> bool:
        """Until stop(), or until `until()` is true; False if `timeout` seconds passed first."""
        self._running = True
        deadline = None if timeout is None else self.time() + timeout
        while self._running:
            if until is not None and until():
                return True
            now = self.time()
            if deadline is not None and now >= deadline:
                return False
            self._select(min(self._next_timer(now), deadline - now if deadline is not None else 3600.0))
            self._run_timers()
        return True

    def stop(self) -> None:
        self._running = False

    def close(self) -> None:
        if self._wakeup is not None:
            signal.set_wakeup_fd(-1)
            for sock in self._wakeup:
                sock.close()
        self._selector.close()

    def _next_timer(self, now: float) -> float:
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        return max(0.0, self._timers[0][0] - now) if self._timers else 3600.0

    def _select(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            if self._selector.get_map().get(key.fd) is key:  # else a callback before it closed this one
                key.data()

    def _run_timers(self) -> None:
        now = self.time()
        while self._timers and self._timers[0][0] <= now:
            callback = heapq.heappop(self._timers)[2].callback
            if callback is not None:
                callback()
