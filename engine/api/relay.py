r"""The trusted headers between a gateway and this engine, and the exact resumption of a stream that was cut.

Only on the Unix socket; on any other listener a request with one of these headers is refused (400 `relay_header`).

Request headers, each at most once:
  X-Appliance-Tenant: LABEL     1 to 256 characters of UTF-8. Part of the prefix cache's salt, so tenants never share
                                pages; `key` of the log line. Every generating route, elsewhere without effect.
  X-Appliance-Relay: 1          asks for what is listed under "Answers". Every route.
  X-Appliance-Seed: N           0 <= N < 2**64, the seed of a request that gives none (or -1). 400 if it gives another.
  X-Appliance-Created: N        unix seconds, `created` of the answer. /v1/completions and /v1/chat/completions.
  X-Request-Id: ID              as anybody may send it; it makes the answer's `id`.
  X-Appliance-Resume: LIST      needs Relay, Seed, Created, X-Request-Id and the first attempt's body ("stream": true).
                                LIST = INDEX:STATE joined by commas, no spaces, each INDEX once, in any order. An INDEX
                                that is left out has sent nothing; an empty LIST is fine.

Answers to a request with X-Appliance-Relay: 1
  Headers of a 200: X-Appliance-Seed, X-Appliance-Created (the two /v1 routes), X-Request-Id; on streams and on JSON. A
  stream's headers come together with its first event: before them nothing was sent that would have to be resumed.
  Every event that moves a choice begins with one id line and is otherwise what it is without Relay:
      id: INDEX:STATE\n
      data: {...}\n
      \n
  INDEX = [0-9]{1,6}: the choice's index; the usage event (include_usage) has INDEX = the number of choices.
  STATE = [0-9a-f.-]{1,80}: opaque. Of the ids of one INDEX the last one counts. Without an id: comments (": ping"),
  `data: [DONE]`, and error events. An error event ends a stream that gets no [DONE], and begins with a comment line:
      : error CODE retry\n      an engine of the same release may go on (engine_dead, shutting_down, engine_error ...)
      : error CODE final\n      pass it on (deadline_exceeded, resume_diverged ...)
      data: {"error": {...}}\n
      \n
  An answer with status >= 400 has the same words in a header: X-Appliance-Error: CODE retry|final.

Resuming: the engine computes everything again (same bits), checks that what was sent is the beginning of it (STATE
holds a CRC), leaves that out, and goes on. The events before the cut and then those of the second stream give what one
undisturbed stream gives: text, logprobs, finish reasons, usage, id, created. A LIST that cannot belong to the request:
400 `bad_resume`. What was sent is not what is computed: 409 `resume_diverged` (an error event if other choices have
events already): one of the two devices computes wrongly, or it was another release.
"""

from __future__ import annotations

import re
import struct
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.api.errors import ApiError, bad_request

if TYPE_CHECKING:
    from multidict import CIMultiDictProxy

    from engine.api.choice import Delta
    from engine.types import TokenLogprob

TENANT_HEADER = "X-Appliance-Tenant"
RELAY_HEADER = "X-Appliance-Relay"
SEED_HEADER = "X-Appliance-Seed"
CREATED_HEADER = "X-Appliance-Created"
RESUME_HEADER = "X-Appliance-Resume"
ERROR_HEADER = "X-Appliance-Error"  # of answers only
REQUEST_HEADERS = (TENANT_HEADER, RELAY_HEADER, SEED_HEADER, CREATED_HEADER, RESUME_HEADER)

MAX_TENANT_CHARS = 256
MAX_ENTRIES = 1024  # of a Resume; a header line of the server has at most 8190 bytes anyway
_NUMBER = re.compile(r"[0-9]{1,20}")
_ENTRY = re.compile(
    r"(?P<index>[0-9]{1,6}):(?P<text>[0-9]{1,12})\.(?P<logprobs>[0-9]{1,12})\.(?P<flags>[0-3])"
    r"\.(?P<cached>[0-9]{1,12}|-)\.(?P<text_crc>[0-9a-f]{8})(?P<logprobs_crc>[0-9a-f]{8})"
)
_ROLE, _FINISHED = 1, 2


@dataclass(slots=True)
class Progress:
    """How much of one choice was sent. Counts, and not tokens: a choice's text and logprobs are the same however they
    were cut into messages and events."""

    text: int = 0  # characters (code points), an echoed prompt's among them
    logprobs: int = 0  # entries
    role: bool = False  # the chat choice's first chunk
    finished: bool = False  # the finish reason; for the usage event: that event
    cached: int | None = None  # prompt tokens taken from the prefix cache, once known: usage repeats it
    text_crc: int = 0  # CRC-32 of the text in UTF-8
    logprobs_crc: int = 0  # CRC-32 of the token ids and logprobs

    def advance(self, text: str, logprobs: list[tuple[TokenLogprob, int]]) -> None:
        """Count what is sent now."""
        if text:
            self.text += len(text)
            self.text_crc = zlib.crc32(text.encode(), self.text_crc)
        if logprobs:
            self.logprobs += len(logprobs)
            flat = [number for entry, _ in logprobs for number in (float(entry.token_id), entry.logprob)]
            self.logprobs_crc = zlib.crc32(struct.pack(f"<{len(flat)}d", *flat), self.logprobs_crc)

    def id_line(self, index: int) -> bytes:
        """The line before the data line of an event of choice `index`."""
        flags = _ROLE * self.role + _FINISHED * self.finished
        cached = "-" if self.cached is None else self.cached
        crcs = f"{self.text_crc:08x}{self.logprobs_crc:08x}"
        return f"id: {index}:{self.text}.{self.logprobs}.{flags}.{cached}.{crcs}\n".encode()


@dataclass(slots=True, frozen=True)
class RelayHeaders:
    """What the trusted headers of one request say. All off: an ordinary request."""

    tenant: str | None = None
    relay: bool = False
    seed: int | None = None
    created: int | None = None
    resume: dict[int, Progress] | None = field(default=None)  # by index; None = a first attempt


NO_RELAY = RelayHeaders()


def parse_headers(headers: CIMultiDictProxy[str], *, trusted: bool, has_request_id: bool) -> RelayHeaders:
    """`trusted`: the request came over the Unix socket. ApiError 400 `relay_header` or `bad_resume`."""
    if not any(name in headers for name in REQUEST_HEADERS):
        return NO_RELAY
    given = {name: _single(headers, name) for name in REQUEST_HEADERS if name in headers}
    if not trusted:
        raise _wrong(next(iter(given)), "is taken on the Unix socket only")
    tenant, relay = given.get(TENANT_HEADER), given.get(RELAY_HEADER)
    if tenant is not None:
        _check_tenant(tenant)
    if relay not in (None, "1"):
        raise _wrong(RELAY_HEADER, "must be 1")
    seed = _number(given, SEED_HEADER, 2**64 - 1)
    created = _number(given, CREATED_HEADER, 2**53)
    resume = None
    if RESUME_HEADER in given:
        if relay is None or seed is None or created is None or not has_request_id:
            raise bad_resume(f"it needs {RELAY_HEADER}, {SEED_HEADER}, {CREATED_HEADER} and X-Request-Id")
        resume = parse_resume(given[RESUME_HEADER])
    return RelayHeaders(tenant, relay is not None, seed, created, resume)


def _single(headers: CIMultiDictProxy[str], name: str) -> str:
    values = headers.getall(name)
    if len(values) > 1:
        raise _wrong(name, "is given more than once")
    return values[0].strip()


def _check_tenant(tenant: str) -> None:
    if not 1 <= len(tenant) <= MAX_TENANT_CHARS:
        raise _wrong(TENANT_HEADER, f"must have 1 to {MAX_TENANT_CHARS} characters")
    try:
        tenant.encode()
    except UnicodeEncodeError:
        raise _wrong(TENANT_HEADER, "must be UTF-8") from None


def _number(given: dict[str, str], name: str, highest: int) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    if _NUMBER.fullmatch(text) is None or int(text) > highest:
        raise _wrong(name, f"must be an integer from 0 to {highest}")
    return int(text)


def _wrong(name: str, problem: str) -> ApiError:
    return bad_request(f"`{name}` {problem}", name, "relay_header")


def bad_resume(problem: str) -> ApiError:
    """400: this Resume cannot belong to this request."""
    return bad_request(f"`{RESUME_HEADER}` does not fit: {problem}", RESUME_HEADER, "bad_resume")


def diverged(index: int, problem: str) -> ApiError:
    """409: what was sent before the cut is not what this engine computes."""
    text = f"choice {index} cannot be resumed: {problem}; the device that began it or this one computes wrongly"
    return ApiError(409, text, param=RESUME_HEADER, code="resume_diverged")


def parse_resume(text: str) -> dict[int, Progress]:
    """`INDEX:STATE,INDEX:STATE` or nothing. ApiError 400 `bad_resume`."""
    out: dict[int, Progress] = {}
    entries = text.split(",") if text else []
    if len(entries) > MAX_ENTRIES:
        raise bad_resume(f"more than {MAX_ENTRIES} entries")
    for number, entry in enumerate(entries):
        found = _ENTRY.fullmatch(entry)
        if found is None:
            raise bad_resume(f"entry {number} is not an INDEX:STATE that this engine gave")
        index, flags = int(found["index"]), int(found["flags"])
        if index in out:
            raise bad_resume(f"index {index} is given twice")
        out[index] = Progress(
            text=int(found["text"]),
            logprobs=int(found["logprobs"]),
            role=bool(flags & _ROLE),
            finished=bool(flags & _FINISHED),
            cached=None if found["cached"] == "-" else int(found["cached"]),
            text_crc=int(found["text_crc"], 16),
            logprobs_crc=int(found["logprobs_crc"], 16),
        )
    return out


@dataclass(slots=True, frozen=True)
class Bounds:
    """The most that one choice can have sent."""

    text: int
    logprobs: int
    cached: int


def check_resume(resume: dict[int, Progress], bounds: list[Bounds], *, chat: bool, with_usage: bool) -> None:
    """Refuse what cannot be a position in this request's stream, as far as that can be told before computing it.

    `bounds`: of every choice. ApiError 400 `bad_resume`.
    """
    for index, sent in resume.items():
        if index == len(bounds) and with_usage:
            continue
        if index >= len(bounds):
            raise bad_resume(f"there is no choice {index}")
        most = bounds[index]
        if sent.text > most.text or sent.logprobs > most.logprobs or (sent.cached or 0) > most.cached:
            raise bad_resume(f"choice {index} can never have come that far")
        if sent.role != chat:
            raise bad_resume(f"the state of choice {index} is of the other route")
    if usage := resume.get(len(bounds)):
        complete = all(index in resume and resume[index].finished for index in range(len(bounds)))
        if not (usage.finished and complete):
            raise bad_resume("usage is said to be sent, but not every choice was finished")


class Replay:
    """One choice that is computed again: leaves out what was sent, and checks that it is the same."""

    def __init__(self, index: int, sent: Progress) -> None:
        self._index, self._sent, self._seen = index, sent, Progress()

    def cut(self, delta: Delta) -> None:
        """Take out of `delta` what the client has. ApiError 409 `resume_diverged`."""
        sent, seen = self._sent, self._seen
        text, logprobs = max(sent.text - seen.text, 0), max(sent.logprobs - seen.logprobs, 0)
        seen.advance(delta.text[:text], delta.logprobs[:logprobs])
        delta.text, delta.logprobs = delta.text[text:], delta.logprobs[logprobs:]
        if seen.text == sent.text and seen.text_crc != sent.text_crc:
            raise diverged(self._index, "its text differs")
        if seen.logprobs == sent.logprobs and seen.logprobs_crc != sent.logprobs_crc:
            raise diverged(self._index, "its logprobs differ")
        if sent.finished and (delta.text or delta.logprobs):
            raise diverged(self._index, "it was finished, but goes on here")
        if delta.finish_reason is not None:
            if seen.text < sent.text or seen.logprobs < sent.logprobs:
                raise diverged(self._index, "it ends here before it has come as far as was sent")
            if sent.finished:
                delta.finish_reason = delta.stop_reason = None


def error_words(error: ApiError) -> str:
    """`CODE retry` or `CODE final`: whether another engine of the release may do better."""
    return f"{error.code or 'error'} {'retry' if error.status in (429, 500, 503) else 'final'}"


def cache_salt(tenant: str | None, salt: str) -> str:
    """The prefix cache's salt. No two pairs give the same one, and a client alone cannot give a tenant's."""
    if tenant is not None:
        return f"\0{len(tenant)}:{tenant}{salt}"
    return f"\0:{salt}" if salt.startswith("\0") else salt
