"""A load run against the real server: N clients, mixed lengths, disconnects; what users would feel, and what is left.

    python -m tests.bench.load --backend cuda --model DIR [--seconds 420] [--clients 64] [-- SERVER OPTIONS]

Prompts have 1 to 4,000 tokens and answers 1 to 256 (both log-uniform), 80 % streamed, 5 % of the clients hang up in the
middle. Prints p50 / p99 of the time to first token (TTFT) and between tokens (ITL), and one JSON line. Exit status 0
when no request failed and every KV page is free again at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.bench.soak import wait_idle
from tests.serving import MODEL, Server

LEAVE_SHARE = 0.05


@dataclass
class Figures:
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0


def log_uniform(rng: random.Random, low: int, high: int) -> int:
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


async def stream(session: aiohttp.ClientSession, url: str, body: dict[str, Any], leave: bool, out: Figures) -> str:
    """One streamed completion; the times of its events. Events may carry several tokens under load (usage counts)."""
    sent = last = time.perf_counter()
    events = 0
    leave_after = random.randint(0, 8)
    async with session.post(url, json={**body, "stream": True, "stream_options": {"include_usage": True}}) as response:
        if response.status != 200:
            out.failures.append(f"{response.status} {(await response.text())[:200]}")
            return f"stream {response.status}"
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                return "stream done"
            event = json.loads(line[6:])
            if "error" in event:
                out.failures.append(json.dumps(event)[:300])
                return "stream error"
            if event.get("usage"):
                out.tokens += event["usage"]["completion_tokens"]
            if not event["choices"]:
                continue
            now = time.perf_counter()
            if events == 0:
                out.ttft.append(now - sent)
            else:
                out.itl.append(now - last)
            last, events = now, events + 1
            if leave and events > leave_after:
                response.close()
                return "left"
    out.failures.append("a stream ended without [DONE]")
    return "stream cut"


async def client(
    server: Server, session: aiohttp.ClientSession, vocab: int, seed: int, end: float, out: Figures
) -> None:
    rng = random.Random(seed)
    while time.monotonic() < end:
        length = log_uniform(rng, 1, 4000)
        body = {
            "model": MODEL, "prompt": [rng.randrange(vocab) for _ in range(length)],
            "max_tokens": log_uniform(rng, 1, 256), "temperature": rng.choice([0, 0.8]), "ignore_eos": True,
            "seed": rng.randrange(2**32),
        }  # fmt: skip
        leave = rng.random() < LEAVE_SHARE
        out.prompt_tokens += length
        try:
            if leave or rng.random() < 0.8:
                out.outcomes[await stream(session, server.url + "/v1/completions", body, leave, out)] += 1
                continue
            async with session.post(server.url + "/v1/completions", json=body) as response:
                answer = await response.json()
                out.outcomes[f"whole {response.status}"] += 1
                if response.status != 200:
                    out.failures.append(f"{response.status} {json.dumps(answer)[:200]}")
                elif answer["usage"]["completion_tokens"] != body["max_tokens"]:
                    out.failures.append(f"asked for {body['max_tokens']} tokens, got {answer['usage']}")
                else:
                    out.tokens += answer["usage"]["completion_tokens"]
        except (aiohttp.ClientError, TimeoutError) as error:
            out.failures.append(f"{type(error).__name__}: {error}")


def quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        f"p{q:g}_ms": round(ordered[min(len(ordered) - 1, int(len(ordered) * q / 100))] * 1e3, 2)
        for q in (50, 90, 99, 99.9)
    } if ordered else {}  # fmt: skip


async def load(model: Path, backend: str, seconds: float, clients: int, options: list[str]) -> dict[str, Any]:
    vocab = min(json.loads((model / "config.json").read_text())["vocab_size"], 100_000)
    figures = Figures()
    began = time.monotonic()
    server = await Server.start(model, *options, backend=backend)
    ready_seconds = time.monotonic() - began
    try:
        timeout = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
            free_at_start = await wait_idle(server, session)
            began = time.monotonic()
            end = began + seconds
            await asyncio.gather(*(client(server, session, vocab, i, end, figures) for i in range(clients)))
            wall = time.monotonic() - began
            free_at_end = await wait_idle(server, session)
            preemptions = await server.metric(session, "appliance_preemptions_total")
    finally:
        status = await server.stop()
    return {
        "bench": "load", "backend": backend, "seconds": round(wall, 1), "clients": clients,
        "ready_seconds": round(ready_seconds, 2), "outcomes": dict(sorted(figures.outcomes.items())),
        "output_tokens_per_second": round(figures.tokens / wall, 1),
        "prompt_tokens_per_second": round(figures.prompt_tokens / wall, 1),
        "ttft": quantiles(figures.ttft), "itl": quantiles(figures.itl), "preemptions": preemptions,
        "pages_free": [free_at_start, free_at_end], "exit_status": status, "failures": figures.failures[:20],
        "num_failures": len(figures.failures),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--backend", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--seconds", type=float, default=420.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("options", nargs="*", help="of the server, after --")
    args = parser.parse_args()
    result = asyncio.run(load(args.model, args.backend, args.seconds, args.clients, args.options))
    print(json.dumps(result))
    ok = not result["num_failures"] and len(set(result["pages_free"])) == 1 and result["exit_status"] == 0
    print(f"load: {'passed' if ok else 'FAILED'}; TTFT {result['ttft']}, ITL {result['itl']}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
