"""What the NVML child and its parent say to each other: JSON lines on the child's stdin and stdout.

    {"id": 1, "op": "read", "known": {PCI: UUID}, "skip": [UUID]}
        -> {"id": 1, "begin": {"stage": "nvml"|"index N"|UUID, "uuid": UUID|null}}   before each call that may hang
           {"id": 1, "gpu": {"uuid", "at", "fields", "unknown", "error"}}             as soon as a GPU has been read
           {"id": 1, "done": {"ok", "error", "detail", "driver", "unread", "deaf"}}   the end of this answer
    {"id": 2, "op": "close"}  -> {"id": 2, "done": {"ok": true}}   nvmlShutdown: no GPU is held until the next read
    {"id": 3, "op": "quit"}, end of stdin, or the parent's death: it ends
    unasked:                     {"event": {"uuid", "kind", "xid"?, "data"?, "at"}}

One line for each GPU and one before it, so that a GPU that hangs hides no other one and is known by name. `serve` is
the child's side, for NVML (nvml_child.py) and for the script of tests (scripted_nvml.py) alike.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Protocol

import msgspec

MAX_REQUEST_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 20  # of the child's lines
_PR_SET_PDEATHSIG = 1

Value = float | int | str | bool | None


class Begin(msgspec.Struct, frozen=True):
    """What is called next: after a hang this is what hung."""

    stage: str
    uuid: str | None = None


class Gpu(msgspec.Struct, frozen=True):
    """types.GpuReading as it travels."""

    uuid: str
    at: float
    fields: dict[str, Value] = {}
    unknown: dict[str, str] = {}
    error: str | None = None


class Done(msgspec.Struct, frozen=True):
    """The end of an answer."""

    ok: bool
    error: str | None = None  # of the library as a whole: driver_mismatch, driver_not_loaded, library_not_found, nvml_N
    detail: str = ""
    driver: str | None = None
    unread: dict[str, str] = {}  # "index N" -> error: which GPU that is could not be found out
    deaf: dict[str, str] = {}  # UUID -> why it sends no events


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something happened. Kinds: nvml_read.EVENTS, and "events_lost" (uuid null): from now on there may be gaps."""

    kind: str
    at: float  # UTC seconds
    uuid: str | None = None
    xid: int | None = None  # only where kind is "xid"; 999: NVML does not know which
    data: int | None = None


class Request(msgspec.Struct, frozen=True):
    id: int
    op: str
    known: dict[str, str] = {}
    skip: list[str] = []


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the child: of an answer (id and one of begin, gpu, done), or an event."""

    id: int | None = None
    begin: Begin | None = None
    gpu: Gpu | None = None
    done: Done | None = None
    event: Event | None = None


class LibraryError(Exception):
    """NVML as a whole did not work; `error` is a word of Done.error."""

    def __init__(self, error: str, detail: str) -> None:
        super().__init__(detail)
        self.error, self.detail = error, detail


class Backend(Protocol):
    """NVML, or a script that stands in for it."""

    @property
    def poll_seconds(self) -> float | None:
        """How often `events` is worth a call; None: not at all."""

    def read(self, known: Mapping[str, str], skip: Set[str], begin: Callable[[Begin], None],
             gpu: Callable[[Gpu], None]) -> Done:  # fmt: skip
        """Opens NVML where it is closed, and reads all GPUs but those in `skip`. LibraryError."""

    def close(self) -> None:
        """No GPU is held afterwards; fine if it is closed."""

    def events(self) -> Iterable[Event]:
        """What has happened since; returns at once."""


def die_with_parent() -> None:
    """SIGKILL when the parent ends: a child in the middle of a call does not see the end of its stdin."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def serve(backend: Backend, requests: int, answers: int) -> None:
    """Until the end of `requests` or "quit"; NVML is closed then."""
    buffer = b""
    try:
        while True:
            readable, _, _ = select.select([requests], [], [], backend.poll_seconds)
            if not readable:
                for event in backend.events():
                    _send(answers, Message(event=event))
                continue
            data = os.read(requests, 4096)
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                if not _answer(backend, line, answers):
                    return
            if not data or len(buffer) > MAX_REQUEST_BYTES:
                return
    except BrokenPipeError:
        return  # nobody listens any more
    finally:
        backend.close()


def _answer(backend: Backend, line: bytes, answers: int) -> bool:
    """False: it was asked to end."""
    try:
        request = msgspec.json.decode(line, type=Request)
    except (msgspec.DecodeError, ValueError) as error:
        _send(answers, Message(done=Done(False, "bad_request", str(error))))
        return True
    if request.op == "quit":
        return False
    number = request.id
    if request.op == "read":
        try:
            done = backend.read(
                request.known, frozenset(request.skip),
                lambda begin: _send(answers, Message(number, begin=begin)),
                lambda gpu: _send(answers, Message(number, gpu=gpu)),
            )  # fmt: skip
        except LibraryError as error:
            backend.close()  # opened anew at the next request
            done = Done(False, error.error, error.detail)
    elif request.op == "close":
        backend.close()
        done = Done(True)
    else:
        done = Done(False, "bad_request", f"unknown op {request.op[:40]!r}")
    _send(answers, Message(number, done=done))
    return True


def _send(fd: int, message: Message) -> None:
    data = msgspec.json.encode(message) + b"\n"
    while data:
        data = data[os.write(fd, data) :]
