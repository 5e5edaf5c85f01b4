"""`make bench-gpu`: our CUDA engine beside transformers, one run on one card; writes tests/bench/results/*.json.

    python -m tests.bench.gpu [--model DIR] [--peer-python PYTHON] [--without-peer]

Without --model it makes the 8B-shaped checkpoint of tests/bench/llama8b.py in a temporary directory (16 GB). Parts:
copy (bandwidth), engine (bench_cuda.py: decode and prefill, with the share of the ceiling: weights, keys and values
that a step must read, over that bandwidth), server (start to ready from the page cache; 64 SSE streams and what the GPU
waited for the host between two decode steps), peer (compiled transformers).
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.bench.__main__ import ROOT, _commit, run
from tests.bench.bench_http import stream_all
from tests.bench.llama8b import make_llama8b
from tests.serving import MODEL, Server

RESULTS = ROOT / "tests/bench/results"
STREAMS = 64
WEIGHTS_READ = 2 * (128256 * 4096 + 32 * (6144 * 4096 + 4096 * 4096 + 3 * 14336 * 4096))
"""Bytes of matrices that a decode step of the 8B shape reads (the embedding is a gather)."""

CONTEXT_GROWTH = 50  # tokens that a sequence has grown by, about half way through the measured steps


def card() -> dict[str, str]:
    fields = "name,driver_version,uuid,memory.total,clocks.max.sm"
    answer = subprocess.run(
        ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"], capture_output=True, text=True, check=True
    )
    return dict(zip(fields.split(","), (v.strip() for v in answer.stdout.splitlines()[0].split(",")), strict=True))


async def serve(model: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        ring = Path(directory) / "steps"
        began = time.monotonic()
        options = ("--max-batch-seqs", str(STREAMS), "--kv-tokens", "131072", "--step-ring", str(ring))
        async with await Server.start(model, *options, backend="cuda") as server:
            ready = time.monotonic() - began
            body = {"model": MODEL, "prompt": [7] * 64, "max_tokens": 400, "ignore_eos": True, "temperature": 0,
                    "stream": True}  # fmt: skip
            await stream_all(server.url + "/v1/completions", STREAMS, {**body, "max_tokens": 20})
            wall, events = await stream_all(server.url + "/v1/completions", STREAMS, body)
            summary = subprocess.run(
                [sys.executable, "-m", "engine.cuda.step_ring", str(ring), "--json"],
                cwd=ROOT, capture_output=True, text=True, check=True,
            )  # fmt: skip
    return {
        "start_to_ready_seconds": round(ready, 2), "streams": STREAMS,
        "tokens_per_second": round(STREAMS * 400 / wall, 1), "events": events, "steps": json.loads(summary.stdout),
    }  # fmt: skip


def measure(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Everything but the peer."""
    result: dict[str, Any] = {
        "card": card(),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv[1:],
    }
    result["copy"] = run(sys.executable, "-m", "tests.bench.gpu_copy")
    result["engine"] = run(sys.executable, "-m", "tests.bench.bench_cuda", "--json")
    for decode in result["engine"]["decode"]:
        tokens = decode["batch"] * (decode["context"] + CONTEXT_GROWTH)
        must_read = WEIGHTS_READ + tokens * result["engine"]["kv_bytes_per_token"]
        ideal_ms = must_read / result["copy"]["bytes_per_second"] * 1e3
        decode["ideal_ms"], decode["share_of_ceiling"] = round(ideal_ms, 4), round(ideal_ms / decode["wall_ms"], 4)
    result["server"] = asyncio.run(serve(model))
    return result


def peer(args: argparse.Namespace) -> dict[str, Any]:
    """The peer's figures, or why there are none: its trouble must not cost us ours."""
    command = [args.peer_python, "tests/bench/gpu_transformers_peer.py", "--budget", str(args.peer_budget)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=args.peer_budget + 90)
    except subprocess.TimeoutExpired:
        return {"error": f"not finished after {args.peer_budget + 90:g} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {"error": f"exit status {done.returncode}", "stderr": done.stderr[-2000:]}
    figures: dict[str, Any] = json.loads(lines[-1])
    return figures


def write(result: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="an 8B-shaped model directory")
    parser.add_argument("--peer-python", default=sys.executable, help="a Python with torch and transformers")
    parser.add_argument("--peer-budget", type=float, default=150.0)
    parser.add_argument("--without-peer", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        result = measure(args.model or make_llama8b(Path(directory) / "llama8b"), args)
    path = args.results / f"gpu-{result['date'].replace(':', '').replace('+0000', 'Z')}.json"
    write(result, path)
    if not args.without_peer:
        result["peer"] = peer(args)
        write(result, path)
    print(json.dumps(result, indent=1))
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
