"""One thread for what takes long (engines, hooks, gateways), so that the controller's loop never waits: an abort is
heard at once. Jobs run one after another; a cancelled job is asked to end, and its result is still delivered."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Any

from appliance.launcher.loop import READ, Loop

Job = Callable[[threading.Event], Any]


class Worker:
    """`done(key, result or exception)` is called in the loop's thread."""

    def __init__(self, loop: Loop, name: str, done: Callable[[str, Any], None]) -> None:
        self._loop, self._done = loop, done
        self._jobs: queue.SimpleQueue[tuple[str, Job, threading.Event] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._pending: dict[str, threading.Event] = {}
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        loop.watch(self._wake, READ, self._collect)
        # A daemon: a job that hangs in the kernel must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return bool(self._pending)

    def submit(self, key: str, job: Job) -> None:
        """Nothing happens if a job of that name is waiting or in work."""
        if key not in self._pending:
            self._pending[key] = cancelled = threading.Event()
            self._jobs.put((key, job, cancelled))

    def cancel_others(self, key: str | None) -> None:
        """Asks all jobs but `key` to end; one that has not begun never does."""
        for name, cancelled in self._pending.items():
            if name != key:
                cancelled.set()

    def close(self) -> None:
        self.cancel_others(None)
        self._jobs.put(None)
        self._loop.unwatch(self._wake)

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            key, job, cancelled = item
            result: Any
            try:
                result = Cancelled() if cancelled.is_set() else job(cancelled)
            except Exception as error:  # told to the loop, which knows what it means
                result = error
            self._results.put((key, result))
            os.eventfd_write(self._wake, 1)

    def _collect(self) -> None:
        os.eventfd_read(self._wake)
        while True:
            try:
                key, result = self._results.get_nowait()
            except queue.Empty:
                return
            del self._pending[key]
            self._done(key, result)


class Cancelled(Exception):
    """A job ended because it was asked to."""
