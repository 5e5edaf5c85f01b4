"""What one launcher is asked, in order, again and again until it has done it.

Requests are of a kind ("place": hold, unhold, restart; "share"). A newer one of a kind replaces the one before, also
while that is under way: a hold of level stop does not wait for the drain it replaces. Kinds are done in the order they
came, so a share is in force before the unhold that was asked for after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from appliance.launcher.loop import Loop, Timer
from appliance.log import ExitCode
from healthcheck.asking import Asking

FIRST_DELAY, MAX_DELAY = 0.5, 15.0  # seconds before it is asked again
_REPLY_GRACE = 5.0

Done = Callable[[dict[str, Any]], None]
"""Gets a reply that is ok, or a refusal of a request that does not `insist`."""


@dataclass(slots=True)
class _Request:
    kind: str
    request: dict[str, Any]
    seconds: float
    insist: bool
    done: Done
    trouble: Callable[[str], None]
    delay: float = FIRST_DELAY


class Lane:
    """The launcher of one slot."""

    def __init__(self, loop: Loop, path: Path) -> None:
        self._loop, self._path = loop, path
        self._queue: list[_Request] = []
        self._asking: Asking | None = None
        self._again: Timer | None = None

    def ask(
        self,
        kind: str,
        request: dict[str, Any],
        seconds: float,
        done: Done,
        *,
        insist: bool = True,
        trouble: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`seconds`: of one attempt. Without `insist` a refusal ends it; no answer never does. `trouble`: hears why it
        is not done yet, at each attempt."""
        if self._queue and self._queue[0].kind == kind:
            self._stop()
        self._queue = [other for other in self._queue if other.kind != kind]
        self._queue.append(_Request(kind, request, seconds, insist, done, trouble))
        self._next()

    def drop(self, kind: str) -> None:
        """Nothing of this kind is wanted any more."""
        if self._queue and self._queue[0].kind == kind:
            self._stop()
        self._queue = [other for other in self._queue if other.kind != kind]
        self._next()

    @property
    def idle(self) -> bool:
        return not self._queue

    def _stop(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None
        if self._again is not None:
            self._again.cancel()
            self._again = None

    def _next(self) -> None:
        if not self._queue or self._asking is not None or self._again is not None:
            return
        first = self._queue[0]
        seconds = first.seconds + _REPLY_GRACE
        self._asking = Asking(self._loop, self._path, first.request, seconds, partial(self._answer, first))

    def _answer(self, first: _Request, reply: dict[str, Any] | None) -> None:
        self._asking = None
        if reply is not None and (reply["ok"] or self._final(first, reply)):
            self._queue.remove(first)
            self._next()
            first.done(reply)
            return
        error = "the launcher does not answer" if reply is None else str(reply.get("error"))
        self._again = self._loop.later(first.delay, self._try_again)
        first.delay = min(2 * first.delay, MAX_DELAY)
        first.trouble(error)

    @staticmethod
    def _final(first: _Request, reply: dict[str, Any]) -> bool:
        return not first.insist and reply.get("exit_code") not in (ExitCode.INCONCLUSIVE, ExitCode.BUSY)

    def _try_again(self) -> None:
        self._again = None
        self._next()
