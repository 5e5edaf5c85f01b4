"""What HTTP costs: one request, and one streamed token at 64 concurrent streams.

`python -m tests.bench.bench_http [--streams 64] [--json]`. The model is tiny, so that engine-api is the bottleneck.
Measured in one run:
  ours      engine-api's CPU time a request and a token (the two processes are separate, so this is all that HTTP,
            JSON, detokenizer and the ring cost), and the wall rate of tokens through 64 SSE streams
  engine    the same work on the Engine in this process, no HTTP: what is left to compare with
  peer      a bare aiohttp handler that writes prepared events to 64 streams: the floor of this library
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from aiohttp import web

from engine.core_config import CoreConfig
from engine.engine import Engine
from engine.messages import Generate, Tokens
from engine.types import SamplingParams
from tests.serving import MODEL, Server
from tests.tiny import make_tiny_model

TOKENS = 200
REQUESTS = 400


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


async def stream_all(url: str, streams: int, body: dict[str, Any]) -> tuple[float, int]:
    """Wall seconds until every stream has ended, and the number of SSE events they carried."""

    async def one(session: aiohttp.ClientSession) -> int:
        events = 0
        async with session.post(url, json=body) as response:
            assert response.status == 200, await response.text()
            async for chunk in response.content.iter_any():
                events += chunk.count(b"data: ")
        return events

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300)) as session:
        started = time.perf_counter()
        counts = await asyncio.gather(*(one(session) for _ in range(streams)))
        return time.perf_counter() - started, sum(counts)


async def measure_ours(model_dir: Path, streams: int) -> dict[str, float]:
    async with await Server.start(model_dir, "--max-batch-seqs", str(streams), "--max-batch-tokens", "512") as server:
        pid = server.process.pid
        body = {"model": MODEL, "prompt": "abc", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
        url = server.url + "/v1/completions"
        await stream_all(url, streams, {**body, "stream": True, "max_tokens": 20})  # warm
        before = cpu_seconds(pid)
        wall, events = await stream_all(url, streams, {**body, "stream": True})
        stream_cpu = cpu_seconds(pid) - before
        async with aiohttp.ClientSession() as session:
            latencies = []
            before = cpu_seconds(pid)
            for _ in range(REQUESTS):
                began = time.perf_counter()
                async with session.post(url, json={**body, "max_tokens": 1}) as response:
                    await response.read()
                latencies.append(time.perf_counter() - began)
            request_cpu = cpu_seconds(pid) - before
    total = streams * TOKENS
    return {
        "tokens_per_second": round(total / wall, 1),
        "events_per_token": round(events / total, 3),
        "api_cpu_us_per_token": round(stream_cpu / total * 1e6, 1),
        "api_cpu_us_per_request": round(request_cpu / REQUESTS * 1e6, 1),
        "request_ms_p50": round(sorted(latencies)[REQUESTS // 2] * 1e3, 3),
    }


def measure_engine(model_dir: Path, streams: int) -> dict[str, float]:
    engine = Engine.load(CoreConfig(model_dir=str(model_dir), max_batch_seqs=streams, max_batch_tokens=512))

    def run(requests: int, tokens: int) -> float:
        params = SamplingParams(seed=1, max_tokens=tokens, temperature=0, ignore_eos=True)
        for i in range(requests):
            engine.add(Generate(request_id=str(i), prompt_ids=[1, 2, 3], params=params))
        started, produced = time.perf_counter(), 0
        while engine.has_work:
            produced += sum(len(m.token_ids) for m in engine.step() if isinstance(m, Tokens))
        assert produced == requests * tokens
        return time.perf_counter() - started

    run(streams, 20)
    result = {
        "tokens_per_second": round(streams * TOKENS / run(streams, TOKENS), 1),
        "request_ms_p50": round(sorted(run(1, 1) for _ in range(REQUESTS))[REQUESTS // 2] * 1e3, 3),
    }
    engine.close()
    return result


async def measure_peer(streams: int) -> dict[str, float]:
    event = b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","choices":[{"index":0,"text":"a"}]}\n\n'

    async def handler(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(TOKENS):
            await response.write(event)
            await asyncio.sleep(0)
        return response

    app = web.Application()
    app.router.add_post("/", handler)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        await stream_all(f"http://127.0.0.1:{port}/", streams, {})
        wall, _ = await stream_all(f"http://127.0.0.1:{port}/", streams, {})
    finally:
        await runner.cleanup()
    return {"wall_us_per_event_with_client": round(wall / (streams * TOKENS) * 1e6, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model_dir = make_tiny_model(Path(directory) / MODEL)
        result: dict[str, Any] = {"bench": "http", "streams": args.streams}
        result["ours"] = asyncio.run(measure_ours(model_dir, args.streams))
        result["engine"] = measure_engine(model_dir, args.streams)
        result["peer"] = asyncio.run(measure_peer(args.streams))
    if args.json:
        print(json.dumps(result))
        return 0
    for part in ("ours", "engine", "peer"):
        print(f"{part:8} " + "  ".join(f"{name} {value}" for name, value in result[part].items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
