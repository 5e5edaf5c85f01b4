"""A gateway's view of a stream: events with their ids over the Unix socket, cut anywhere, put together again."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from multidict import CIMultiDictProxy

RELAY = {"X-Appliance-Relay": "1"}
PINNED = ("X-Appliance-Seed", "X-Appliance-Created", "X-Request-Id")


@dataclass
class Stream:
    """The answer to one streaming request, in complete SSE blocks (without the empty line)."""

    status: int
    headers: CIMultiDictProxy[str]
    blocks: list[str] = field(default_factory=list)

    @property
    def pinned(self) -> dict[str, str]:
        return {name: self.headers[name] for name in PINNED}


def session(socket: Path) -> aiohttp.ClientSession:
    connector = aiohttp.UnixConnector(path=str(socket), limit=0)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60))


async def post(http: aiohttp.ClientSession, path: str, body: dict[str, Any], **headers: str) -> Stream:
    """POST with stream: true; of an error the JSON text is the only block."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    async with http.post("http://engine" + path, json=body | {"stream": True}, headers=RELAY | names) as response:
        text = (await response.read()).decode()
        stream = Stream(response.status, response.headers)
    if stream.status == 200:
        assert text.endswith("\n\n")
        stream.blocks = text[:-2].split("\n\n")
    else:
        stream.blocks = [text]
    return stream


def last_ids(blocks: list[str]) -> dict[str, str]:
    """What a gateway keeps: the last id of each index, unparsed."""
    ids = {}
    for block in blocks:
        for line in block.split("\n"):
            if line.startswith("id: "):
                index, _, state = line[4:].partition(":")
                ids[index] = state
    return ids


def resume_header(blocks: list[str]) -> str:
    return ",".join(f"{index}:{state}" for index, state in last_ids(blocks).items())


async def resume(
    http: aiohttp.ClientSession, path: str, body: dict[str, Any], first: Stream, sent: list[str]
) -> Stream:
    """The stream that goes on behind `sent`, the blocks of `first` (and of earlier resumptions) that went out."""
    return await post(http, path, body, X_Appliance_Resume=resume_header(sent), **first.pinned)


def assemble(blocks: list[str]) -> dict[str, Any]:
    """What a client has in the end: deltas merged by choice, everything else as it came. Asserts the event format."""
    heads: list[dict[str, Any]] = []
    choices: dict[int, dict[str, Any]] = {}
    usage, done = [], 0
    for block in blocks:
        *before, data = block.split("\n")
        if data.startswith(":"):
            continue
        assert data.startswith("data: ") and not done, block
        if data == "data: [DONE]":
            assert not before
            done += 1
            continue
        payload = json.loads(data[6:])
        assert "error" not in payload, payload
        assert len(before) == 1 and before[0].startswith("id: "), block
        got = payload.pop("choices")
        used = payload.pop("usage", None)
        if payload not in heads:
            heads.append(payload)
        if not got:
            usage.append(used)
        for choice in got:
            assert before[0].startswith(f"id: {choice['index']}:")
            _merge(choices.setdefault(choice["index"], {"text": "", "logprobs": {}, "roles": []}), choice)
    return {"heads": heads, "choices": choices, "usage": usage, "done": done}


def _merge(into: dict[str, Any], choice: dict[str, Any]) -> None:
    assert "finish_reason" not in into, "something came behind the finish reason"
    delta = choice.get("delta", {"content": choice.get("text")})
    if "role" in delta:
        into["roles"].append(delta["role"])
    into["text"] += delta.get("content") or ""
    for name, entries in (choice["logprobs"] or {}).items():
        if entries is not None:
            into["logprobs"].setdefault(name, []).extend(entries)
    if choice["finish_reason"] is not None:
        into["finish_reason"], into["stop_reason"] = choice["finish_reason"], choice["stop_reason"]


async def check_every_cut(
    first_engine: aiohttp.ClientSession, second_engine: aiohttp.ClientSession, path: str, body: dict[str, Any]
) -> Stream:
    """Cut after every event, go on on the second engine, all cuts at once: the client always has the same answer.

    Both engines have the prompt in their prefix caches: until a choice's first token nothing fixes `cached_tokens`."""
    for http in (first_engine, second_engine):
        await post(http, path, body)
    whole = await post(first_engine, path, body)
    assert whole.status == 200, whole.blocks
    expected = assemble(whole.blocks)
    assert expected["done"] == 1

    async def one(cut: int) -> None:
        sent = whole.blocks[:cut]
        rest = await resume(second_engine, path, body, whole, sent)
        assert rest.status == 200, (cut, rest.blocks)
        assert rest.pinned == whole.pinned
        assert assemble(sent + rest.blocks) == expected, cut

    await asyncio.gather(*map(one, range(len(whole.blocks))))
    return whole
