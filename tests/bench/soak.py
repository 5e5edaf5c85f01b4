"""Soak: many small requests of every kind, errors, aborts and disconnects included, against the real server.

`python -m tests.bench.soak [--requests 20000]`. It passes when at the end every KV page is free again, nothing is
running or waiting, no request was answered with a 5xx, and the memory of both processes is flat. Sends only to a
server that it started itself on a loopback port.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.serving import MODEL, Server
from tests.tiny import make_tiny_model

SETTLE_SECONDS = 30.0


@dataclass
class Result:
    outcomes: Counter[str] = field(default_factory=Counter)
    pages: tuple[int, int] = (0, 0)  # free at start, free at end
    memory_mib: list[tuple[int, float, float]] = field(default_factory=list)  # requests done, api, core
    growth_mib: dict[str, float] = field(default_factory=dict)
    server_errors: list[str] = field(default_factory=list)
    seconds: float = 0.0


def request_kinds(rng: random.Random) -> tuple[str, str, Any, str]:
    """One random request: (kind, path, body, behaviour). Behaviour: read, stream, drop (leave at once), leave (after
    some events)."""
    text = "".join(rng.choices("abcdefgh \n012é漢😀", k=rng.randint(1, 60)))
    shared = "You are a helpful assistant. " * rng.choice([0, 0, 6, 12])
    sampling = {"max_tokens": rng.randint(1, 12), "temperature": rng.choice([0, 0.7, 1.3])}
    completion = {"model": MODEL, "prompt": shared + text, **sampling}
    chat = {"model": MODEL, "messages": [{"role": "user", "content": shared + text}], **sampling}
    kind = rng.choices(
        ["completion", "chat", "stream", "chat_stream", "n", "stop", "infer", "tokenize", "logprobs",
         "leave", "drop", "drop_queued", "bad_json", "bad_field", "bad_id", "too_long", "bad_utf8", "no_model"],
        [10, 10, 10, 10, 4, 4, 4, 4, 4, 8, 6, 4, 3, 3, 3, 3, 2, 2],
    )[0]  # fmt: skip
    match kind:
        case "chat":
            return kind, "/v1/chat/completions", chat, "read"
        case "stream":
            return kind, "/v1/completions", {**completion, "stream": True}, "stream"
        case "chat_stream":
            return kind, "/v1/chat/completions", {**chat, "stream": True}, "stream"
        case "n":
            return kind, "/v1/completions", {**completion, "n": 3, "temperature": 1.0}, "read"
        case "stop":
            return kind, "/v1/completions", {**completion, "stop": ["e", "ab"], "max_tokens": 40}, "read"
        case "infer":
            return kind, "/infer", {"input": text}, "read"
        case "tokenize":
            return kind, "/tokenize", {"model": MODEL, "prompt": text}, "read"
        case "logprobs":
            return kind, "/v1/completions", {**completion, "logprobs": 3, "echo": True}, "read"
        case "leave":
            return kind, "/v1/completions", {**completion, "stream": True, "max_tokens": 400}, "leave"
        case "drop":
            return kind, "/v1/completions", {**completion, "max_tokens": 400}, "drop"
        case "drop_queued":
            return kind, "/v1/completions", {**completion, "prompt": "x" * 1500, "max_tokens": 300}, "drop"
        case "bad_json":
            return kind, "/v1/completions", b'{"model": "tiny", "prompt": ', "read"
        case "bad_field":
            return kind, "/v1/completions", {**completion, "temperature": "hot"}, "read"
        case "bad_id":
            return kind, "/v1/completions", {**completion, "prompt": [1, 2, 10**9]}, "read"
        case "too_long":
            return kind, "/v1/completions", {**completion, "prompt": "y" * 5000}, "read"
        case "bad_utf8":
            return kind, "/v1/completions", b'{"model": "tiny", "prompt": "\xff\xfe"}', "read"
        case "no_model":
            return kind, "/v1/completions", {**completion, "model": "other"}, "read"
    return kind, "/v1/completions", completion, "read"


async def one_request(session: aiohttp.ClientSession, url: str, rng: random.Random, result: Result) -> None:
    kind, path, body, behaviour = request_kinds(rng)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    timeout = aiohttp.ClientTimeout(total=rng.uniform(0.001, 0.05) if behaviour == "drop" else 120)
    try:
        async with session.post(
            url + path, data=data, headers={"Content-Type": "application/json"}, timeout=timeout
        ) as response:
            if response.status >= 500:
                result.server_errors.append(f"{kind}: {response.status} {(await response.text())[:300]}")
            if behaviour == "leave":
                await response.content.readany()
                response.close()
            else:
                text = await response.text()
                if '"error"' in text and response.status == 200:
                    result.server_errors.append(f"{kind}: error in a 200 answer: {text[-300:]}")
            result.outcomes[f"{kind} {response.status}"] += 1
    except TimeoutError:
        result.outcomes[f"{kind} left"] += 1
    except aiohttp.ClientError as error:
        result.outcomes[f"{kind} {type(error).__name__}"] += 1
        result.server_errors.append(f"{kind}: {type(error).__name__} {error}")


async def wait_idle(server: Server, session: aiohttp.ClientSession) -> int:
    """Pages free once nothing runs or waits; a leak shows as a number below the start's."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        busy = await server.metric(session, "appliance_requests_running") + await server.metric(
            session, "appliance_requests_waiting"
        )
        free = int(await server.metric(session, "appliance_kv_pages_free"))
        if busy == 0 or time.monotonic() > deadline:
            await asyncio.sleep(1.2)  # one more heartbeat, so that the numbers are of now
            return int(await server.metric(session, "appliance_kv_pages_free")) if busy == 0 else free
        await asyncio.sleep(0.2)


async def soak(requests: int, *, concurrency: int = 32, seed: int = 0, rounds: int = 10) -> Result:
    result = Result()
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        server = await Server.start(make_tiny_model(Path(directory) / MODEL), "--kv-tokens", "16384")
        started = time.monotonic()
        try:
            connector = aiohttp.TCPConnector(limit=concurrency)
            async with aiohttp.ClientSession(connector=connector) as session:
                free_at_start = await wait_idle(server, session)
                for round_index in range(rounds):
                    todo = iter(range(requests // rounds))

                    async def worker(source: Any = todo) -> None:
                        for _ in source:
                            await one_request(session, server.url, rng, result)

                    await asyncio.gather(*(worker() for _ in range(concurrency)))
                    free = await wait_idle(server, session)
                    api, core = server.memory_mib()
                    result.memory_mib.append(((round_index + 1) * (requests // rounds), round(api, 1), round(core, 1)))
                result.pages = (free_at_start, free)
        finally:
            result.seconds = round(time.monotonic() - started, 1)
            code = await server.stop()
    if code != 0:
        result.server_errors.append(f"the server ended with status {code}")
    settled = result.memory_mib[max(0, rounds * 4 // 10 - 1)]  # caches are full by then
    result.growth_mib = {
        "api": round(result.memory_mib[-1][1] - settled[1], 1),
        "core": round(result.memory_mib[-1][2] - settled[2], 1),
    }
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    result = asyncio.run(soak(args.requests, concurrency=args.concurrency, seed=args.seed))
    print(json.dumps({**result.__dict__, "outcomes": dict(sorted(result.outcomes.items()))}, indent=1))
    ok = result.pages[0] == result.pages[1] and not result.server_errors and max(result.growth_mib.values()) < 8
    print("soak: " + ("passed" if ok else "FAILED"))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
