"""Asking an engine how it is: one HTTP request over its Unix socket, without blocking; and the judgement of stalls."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.launcher.loop import READ, WRITE, Loop
from appliance.log import printable

MAX_REPLY_BYTES = 1 << 20
_MAX_TEXT = 200  # characters; it goes into status lines, events and the journal
_MAX_COUNT = 1 << 53  # what every reader of JSON takes as it is


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: bytes

    def json(self) -> dict[str, Any] | None:
        """The object in the body, or None if it is none."""
        try:
            value = json.loads(self.body)
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None


def parse_reply(data: bytes, *, ended: bool) -> Reply | None:
    """The answer in `data`, None while it is incomplete (`ended`: nothing more will come). ValueError: no HTTP/1.x
    answer with Content-Length, or cut off."""
    head, separator, body = data.partition(b"\r\n\r\n")
    if separator:
        lines = head.decode("latin-1").split("\r\n")
        words = lines[0].split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not (words[1].isdecimal() and len(words[1]) == 3):
            raise ValueError("no HTTP answer")
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
        }
        length = headers.get("content-length", "")
        if not (length.isascii() and length.isdecimal()) or len(length) > 9 or int(length) > MAX_REPLY_BYTES:
            raise ValueError("an answer without Content-Length, or too long")
        if len(body) >= int(length):
            return Reply(int(words[1]), body[: int(length)])
    elif len(data) > MAX_REPLY_BYTES:
        raise ValueError("an endless header")
    if ended:
        raise ValueError("the answer was cut off")
    return None


class Question:
    """One request in flight. Calls back exactly once, with the reply or None (no answer), unless cancelled."""

    def __init__(
        self, loop: Loop, path: Path, request: str, timeout: float, done: Callable[[Reply | None], None]
    ) -> None:
        """request: "GET /readyz" or "POST /admin/drain"."""
        self._loop, self._done = loop, done
        self._out = f"{request} HTTP/1.1\r\nHost: appliance\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".encode()
        self._in = bytearray()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._timer = loop.later(timeout, lambda: self._finish(None))
        code = self._socket.connect_ex(os.fspath(path))
        if code:  # absent, refused, or its backlog is full: all of them are no answer
            self._timer.cancel()
            self._timer = loop.later(0, lambda: self._finish(None))
        else:
            loop.watch(self._socket.fileno(), WRITE, self._send)

    def cancel(self) -> None:
        self._done = lambda _: None
        self._finish(None)

    def _send(self) -> None:
        try:
            self._out = self._out[self._socket.send(self._out) :]
        except BlockingIOError:
            return
        except OSError:
            self._finish(None)
            return
        if not self._out:
            self._loop.watch(self._socket.fileno(), READ, self._receive)

    def _receive(self) -> None:
        try:
            chunk = self._socket.recv(1 << 16)
            self._in += chunk
            reply = parse_reply(bytes(self._in), ended=not chunk)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            self._finish(None)
            return
        if reply is not None:
            self._finish(reply)

    def _finish(self, reply: Reply | None) -> None:
        self._timer.cancel()
        if self._socket.fileno() < 0:
            return
        with contextlib.suppress(OSError):
            self._loop.unwatch(self._socket.fileno())
        self._socket.close()
        self._done(reply)


@dataclass(frozen=True, slots=True)
class Health:
    """What one /admin/state says, as far as the launcher needs it; None: not said."""

    ready: bool
    reason: str | None  # why not ready
    draining: bool
    backend: str | None
    uuid: str | None
    steps: int | None
    queued: int  # requests waiting or running
    progress: float | None  # of the load, 0..1
    in_flight: int | None  # HTTP requests in work


def read_health(state: dict[str, Any]) -> Health:
    """Tolerant of fields that an older or newer engine lacks: releases bring their own engine version. And of any
    values: an engine that is out of its mind, or in somebody else's hands, must not end its launcher."""
    engine, requests = _table(state, "engine"), _table(state, "requests")
    device, progress = _table(state, "device"), _table(state, "progress")
    status = state.get("status")
    steps = progress.get("steps", engine.get("steps"))
    queued = _count(progress.get("queued"))
    if queued is None:
        queued = sum(_count(requests.get(name)) or 0 for name in ("running", "waiting"))
    return Health(
        ready=status == "ready",
        reason=None if status == "ready" else _text(status) or f"its status is {type(status).__name__}",
        draining=state.get("draining") is not None,
        backend=_text(device.get("backend", engine.get("backend"))),
        uuid=_text(device.get("uuid")),
        steps=_count(steps),
        queued=queued,
        progress=_load_progress(state.get("loading")),
        in_flight=_count(requests.get("in_flight_http")),
    )


def _load_progress(loading: Any) -> float | None:
    """0..1, or the two byte counts of engines before that."""
    if isinstance(loading, dict):
        done, total = _count(loading.get("done_bytes")), _count(loading.get("total_bytes"))
        loading = done / total if done is not None and total else None
    if isinstance(loading, bool) or not isinstance(loading, (int, float)) or not 0 <= loading <= 1:
        return None
    return float(loading)


def _table(state: dict[str, Any], key: str) -> dict[str, Any]:
    value = state.get(key)
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str | None:
    return printable(value[:_MAX_TEXT]) if isinstance(value, str) else None


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= _MAX_COUNT else None


class StallWatch:
    """Whether a ready engine makes no progress. Clocks start at what was seen, never before: a launcher that was itself
    suspended for an hour has seen nothing yet."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._steps: int | None = None
        self._no_step_since: float | None = None
        self._silent_since: float | None = None
        self._silences = 0

    def answered(self, now: float, health: Health) -> str | None:
        """Why it counts as stalled, or None."""
        self._silent_since, self._silences = None, 0
        moved = health.steps is None or health.steps != self._steps
        self._steps = health.steps
        if moved or health.queued == 0:
            self._no_step_since = None
        elif self._no_step_since is None:
            self._no_step_since = now
        elif now - self._no_step_since >= self.timeout:
            return f"no step for {now - self._no_step_since:.0f} s while {health.queued} requests were queued"
        return None

    def silent(self, now: float) -> str | None:
        """A question got no answer. Two at least: one may be ours alone."""
        self._silences += 1
        if self._silent_since is None:
            self._silent_since = now
        elif self._silences > 2 and now - self._silent_since >= self.timeout:
            return f"no answer for {now - self._silent_since:.0f} s"
        return None
