"""From the bytes of a request to a validated struct: size, type, UTF-8, depth, JSON, in that order, each bounded."""

from __future__ import annotations

import difflib
import json
import re
from typing import TypeVar, get_args, get_type_hints

import msgspec
from aiohttp import web

from engine.api.config import Limits
from engine.api.errors import ApiError, bad_request
from engine.api.reading import read_bounded
from engine.api.schema import UNSUPPORTED, Request
from engine.api.service import CONTEXT, SERVICE
from engine.jsonfile import lone_surrogate

T = TypeVar("T", bound=Request)

_INLINE_BYTES = 16 << 10  # larger bodies are parsed off the event loop
_DEPTH_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*(?:"|\Z)|[\[\]{}]', re.DOTALL)
_WHERE = re.compile(r"(?P<key>`key` in )?`\$\.?(?P<path>[^`]*)`", re.DOTALL)
_QUOTED_CHARS = 200  # of the client's own text in an answer
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)


async def read_body(request: web.Request, max_bytes: int | None = None) -> bytes:
    """The whole body, at most `max_bytes` (413), within the body timeout (408), counted on what really arrives."""
    service = request.app[SERVICE]
    limit = service.config.limits.max_body_bytes if max_bytes is None else max_bytes
    if request.headers.get("Content-Encoding", "identity").strip().lower() not in ("identity", ""):
        raise ApiError(415, "compressed bodies are not accepted; send the JSON as it is", param="Content-Encoding")
    context = request[CONTEXT]
    seconds = service.config.timeouts.body
    body = await read_bounded(
        request, limit=limit, seconds=seconds, reserve=lambda size: service.reserve(context, size)
    )
    return bytes(body)


async def no_expect(request: web.Request) -> None:
    """Route hook: `100 Continue` is sent when the body is wanted, not before the key and the size were looked at."""


async def read_json(request: web.Request, kind: type[T]) -> T:
    """The body as `kind`; ApiError 400/413/415 otherwise."""
    service = request.app[SERVICE]
    if request.content_type != "application/json" or (request.charset or "utf-8").lower() not in ("utf-8", "utf8"):
        sent = request.headers.get("Content-Type", "nothing")[:100]
        raise ApiError(
            415, f"send the body as JSON in UTF-8 with 'Content-Type: application/json' (got {sent})", code="media_type"
        )
    raw = await read_body(request)
    if len(raw) <= _INLINE_BYTES:
        return parse(raw, kind, service.config.limits)
    service.check_large_backlog(len(raw))
    return await service.offload(parse, raw, kind, service.config.limits, size=len(raw))


def parse(raw: bytes, kind: type[T], limits: Limits) -> T:
    """Strict JSON: no coercion (`true` is not 1, `1.0` and "1" are no integers), unknown fields refused by name."""
    if not raw.isascii():
        try:
            raw.decode("utf-8")
        except UnicodeDecodeError as exc:
            raise bad_request(
                f"the body is not UTF-8: invalid byte 0x{raw[exc.start]:02x} at byte {exc.start}; "
                "POST the same bytes to /encoding/detect to learn what they probably are",
                code="invalid_utf8",
            ) from exc
    if not raw.strip(b" \t\r\n"):
        raise bad_request("the body is empty; a JSON object is needed", code="invalid_json")
    check_nesting(raw, limits.max_json_depth, limits.max_json_containers)
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as exc:
        raise _invalid_field(str(exc), kind) from exc
    except msgspec.DecodeError as exc:
        raise _invalid_json(raw, str(exc)) from exc


def check_nesting(raw: bytes, max_depth: int, max_containers: int) -> None:
    """Refuse deep nesting before anything recursive sees it, and masses of lists and objects before a decoder builds
    them while it holds the interpreter; brackets inside strings do not count."""
    if raw.count(b"[") + raw.count(b"{") <= max_depth:
        return
    depth = containers = 0
    for token in _DEPTH_TOKEN.finditer(raw):
        first = raw[token.start()]
        if first in b"[{":
            depth += 1
            containers += 1
            if containers > max_containers:
                raise bad_request(f"the JSON has more than {max_containers} lists and objects", code="too_complex")
            if depth > max_depth:
                raise bad_request(
                    f"the JSON is nested deeper than {max_depth} levels (byte {token.start()})", code="too_deep"
                )
        elif first in b"]}":
            depth -= 1


def _invalid_json(raw: bytes, message: str) -> ApiError:
    position = lone_surrogate(raw)
    if position is not None:
        return bad_request(
            f"a lone surrogate escape at byte {position} is not text; send both halves of the pair or U+FFFD",
            code="invalid_text",
        )
    return bad_request(f"the body is not valid JSON: {_where(raw) or message}", code="invalid_json")


def _where(raw: bytes) -> str | None:
    """Position and reason from the standard parser, which is slower but tells the exact byte; None if it sees none."""
    text = raw.decode()
    try:
        json.loads(text)
    except json.JSONDecodeError as exc:
        reason = exc.msg.removesuffix(" at")
        return f"{reason[0].lower()}{reason[1:]} at byte {len(text[: exc.pos].encode())}"
    except ValueError:
        return None  # a number of too many digits
    return None


def _short(text: str) -> str:
    """A msgspec message quotes what the client sent: enough of it to recognise, never megabytes. Ends are kept."""
    return text if len(text) <= _QUOTED_CHARS else f"{text[: _QUOTED_CHARS // 2]} ... {text[-_QUOTED_CHARS // 2 :]}"


def _is_plain(kind: type[Request], name: str) -> bool:
    """`kind` has this field and takes any bool, number or text in it: what is wrong is the type alone."""
    hint = get_type_hints(kind).get(name)
    return any(choice in (bool, int, float, str) for choice in get_args(hint) or (hint,))


def _invalid_field(message: str, kind: type[Request]) -> ApiError:
    what, separator, tail = message.rpartition(" - at ")
    found = _WHERE.fullmatch(tail) if separator else None
    what, path = (_short(what), _short(found["path"])) if found else (_short(message), "")
    unknown = _UNKNOWN.fullmatch(what)
    if unknown:
        name = unknown[1][:64]
        param = f"{path}.{name}" if path else name
        reason = UNSUPPORTED.get(name)
        if reason and not _is_plain(kind, name):  # the same name may be fine one level up
            return bad_request(f"`{param}` is not supported: {reason}", param, "unsupported_field")
        near = difflib.get_close_matches(name, kind.__struct_fields__, n=1) if not path else []
        hint = f"; did you mean `{near[0]}`?" if near else ""
        return bad_request(f"unknown field `{param}`{hint}", param, "unknown_field")
    top = re.split(r"[.\[]", path, maxsplit=1)[0]
    missing = re.fullmatch(r"Object missing required field `(\w+)`", what)
    if missing:
        param = f"{path}.{missing[1]}" if path else missing[1]
        return bad_request(f"`{param}` is required", param, "missing_field")
    if not path:
        return bad_request(f"the body must be a JSON object: {what}", None, "invalid_type")
    reason = UNSUPPORTED.get(path.rsplit(".", 1)[-1]) or UNSUPPORTED.get(top)
    if reason and not _is_plain(kind, path):
        return bad_request(f"`{path}` is not supported: {reason}", path, "unsupported_field")
    if found and found["key"]:
        return bad_request(f"a key of `{path}` is wrong: {what}", path, "invalid_type")
    return bad_request(f"`{path}`: {what[0].lower()}{what[1:]}", path, "invalid_type")
