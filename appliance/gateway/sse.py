"""Server-sent events on their way through: cut into complete ones, and how far each choice has come.

Nothing is parsed that the client gets. Three line beginnings are looked at (engine/api/relay.py defines them): `id: `
(the state of a choice), `: error ` (the engine gives up; "retry" at its end: another may go on), `data: [DONE]`.
"""

from __future__ import annotations

import re

MAX_EVENT_BYTES = 64 << 20
"""Of one event: an echoed prompt with logprobs is large."""
_STATE = re.compile(rb"[0-9]{1,6}:[0-9a-f.-]{1,80}")
_MAX_STATE = 87
MAX_CHOICES = 1024


class EventError(Exception):
    """What comes is no event stream of ours."""


class Events:
    """One engine's stream. `ids` is shared with the next one, when this one is cut."""

    def __init__(self, ids: dict[bytes, bytes]) -> None:
        self.ids = ids  # INDEX -> INDEX:STATE of what has been passed on
        self.done = False  # [DONE] was passed on
        self.broken: str | None = None  # the code of an error that another engine may mend; its event is kept back
        self.error: str | None = None  # the code of an error that was passed on
        self.broken_event = b""
        self._rest: list[bytes] = []  # the beginning of an event
        self._rest_bytes = 0

    def feed(self, data: bytes) -> bytes:
        """The events that are now complete, to be passed on; may be empty."""
        if not data:
            return b""  # as last piece of an event it would hide the line's end before it
        if self._rest:
            last = self._rest[-1]
            self._rest.append(data)
            if b"\n\n" not in data and not (last.endswith(b"\n") and data.startswith(b"\n")):
                return self._wait(len(data))
            data = b"".join(self._rest)
            self._rest.clear()
            self._rest_bytes = 0
        if not data.endswith(b"\n\n"):
            cut = data.rfind(b"\n\n") + 2
            self._rest.append(data[cut:] if cut > 1 else data)
            if cut == 1:
                return self._wait(len(data))
            self._rest_bytes = len(data) - cut
            data = data[:cut]
        if data.startswith(b"id: ") and data.find(b"\n\n") == len(data) - 2:  # the usual case: one token
            self._note(data, 0)
            return data
        return self._several(data)

    def _wait(self, size: int) -> bytes:
        self._rest_bytes += size
        if self._rest_bytes > MAX_EVENT_BYTES:
            raise EventError(f"an event is over {MAX_EVENT_BYTES} bytes")
        return b""

    def _several(self, data: bytes) -> bytes:
        if self.broken is not None:
            return b""
        start = 0
        while start < len(data):
            end = data.index(b"\n\n", start) + 2
            if data.startswith(b"id: ", start):
                self._note(data, start)
            elif data.startswith(b": error ", start):
                code, _, verdict = data[start + 8 : data.index(b"\n", start)].decode("latin-1").partition(" ")
                if verdict == "retry":
                    self.broken, self.broken_event = code, data[start:end]
                    return data[:start]
                self.error = code
            elif data.startswith(b"data: [DONE]", start):
                self.done = True
            start = end
        return data

    def _note(self, data: bytes, start: int) -> None:
        entry = data[start + 4 : min(data.index(b"\n", start), start + 4 + _MAX_STATE + 1)]
        if len(self.ids) <= MAX_CHOICES:  # one more than there can be: never resumed, and no more memory
            self.ids[entry.partition(b":")[0]] = entry


def resume_value(ids: dict[bytes, bytes]) -> str | None:
    """The list of X-Appliance-Resume, or None where an id is not what an engine gives."""
    if len(ids) > MAX_CHOICES or not all(_STATE.fullmatch(entry) for entry in ids.values()):
        return None
    return ",".join(entry.decode() for entry in ids.values())
