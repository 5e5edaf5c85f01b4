"""Decode and prefill of the CUDA engine in Llama-3-8B shape (bf16, random weights), through Engine: scheduler, pages,
sampler and results included. `python -m tests.bench.bench_cuda [--json]`.

Device times are those of the step ring (CUDA events); wall times include everything the host does. The ceiling is
design.md's: weights and keys and values that a step must read, over the copy bandwidth measured here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import numpy as np

from engine.config import ModelConfig
from engine.cuda.step_ring import GAP_UNKNOWN, Kind, StepRingReader
from engine.engine import Engine
from engine.messages import Generate
from engine.types import SamplingParams
from tests.bench.cuda_world import LLAMA_8B, random_engine


def requests(engine: Engine, count: int, prompt_tokens: int, new_tokens: int, **params: Any) -> None:
    rng = np.random.default_rng(count)
    values = {"seed": 1, "temperature": 0.0, "ignore_eos": True, **params}
    for i in range(count):
        ids = rng.integers(5, engine.model.vocab_size, prompt_tokens).tolist()
        settings = SamplingParams(max_tokens=new_tokens, **values)
        engine.add(Generate(request_id=f"r{i}", prompt_ids=ids, params=settings))


def drain(engine: Engine) -> float:
    started = time.perf_counter()
    while engine.has_work:
        engine.step()
    return time.perf_counter() - started


def decode(
    engine: Engine, reader: StepRingReader, batch: int, prompt: int, steps: int, **params: Any
) -> dict[str, Any]:
    """Decode steps with all `batch` sequences running: device time, gap, wall time a step."""
    requests(engine, batch, prompt, steps + 2 * batch + 16, **params)  # the first wait for the last one's prefill
    before = reader.written
    while engine.scheduler.num_waiting or engine.scheduler.stats.running < batch:
        engine.step()
    for _ in range(4):
        engine.step()
    began, first = time.perf_counter(), engine._steps
    for _ in range(steps):
        engine.step()
    wall = (time.perf_counter() - began) / (engine._steps - first)
    assert engine.scheduler.stats.running == batch
    for i in range(batch):
        engine.abort(f"r{i}")
    drain(engine)
    entries = reader.read(since=before)
    full = entries[(entries["decodes"] == batch) & (entries["tokens"] == batch) & (entries["kind"] != Kind.KERNEL)]
    device = (full["end_ns"] - full["begin_ns"]) / 1e6
    gaps = full["gap_ns"][full["gap_ns"] != GAP_UNKNOWN] / 1e6
    return {
        "batch": batch,
        "context": prompt,
        "device_ms_p50": round(float(np.median(device)), 4),
        "device_ms_p99": round(float(np.percentile(device, 99)), 4),
        "gap_ms_p50": round(float(np.median(gaps)), 4),
        "gap_ms_p99": round(float(np.percentile(gaps, 99)), 4),
        "wall_ms": round(wall * 1e3, 4),
        "tokens_per_second": round(batch / wall, 1),
        "kind": Kind(int(full["kind"][0])).name.lower(),
    }


def prefill(engine: Engine, reader: StepRingReader, count: int, tokens: int, runs: int) -> dict[str, Any]:
    walls, devices = [], []
    for _ in range(runs):
        before = reader.written
        requests(engine, count, tokens, 1)
        walls.append(drain(engine))
        entries = reader.read(since=before)
        entries = entries[entries["kind"] != Kind.KERNEL]
        devices.append(float((entries["end_ns"][-1] - entries["begin_ns"][0]) / 1e6))
    return {
        "prompts": count,
        "tokens": tokens,
        "wall_ms": round(statistics.median(walls) * 1e3, 3),
        "device_ms": round(statistics.median(devices), 3),
    }


def kv_bytes(model: ModelConfig, tokens: int) -> int:
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * 2 * tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32, 64])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--profile-kernels", action="store_true")
    parser.add_argument("--no-cuda-graphs", action="store_true")
    args = parser.parse_args()
    started = time.perf_counter()
    engine = random_engine(
        LLAMA_8B,
        pages=64 * 8,
        profile_kernels=args.profile_kernels,
        cuda_graphs=not args.no_cuda_graphs,
    )
    engine.backend.warm_up()
    result: dict[str, Any] = {"bench": "cuda", "start_seconds": round(time.perf_counter() - started, 2)}
    ring = engine.backend._ring  # type: ignore[attr-defined]
    reader = StepRingReader(ring.readable_as)
    result["decode"] = []
    for batch in args.batches:
        result["decode"].append(decode(engine, reader, batch, 512, args.steps))
        print(json.dumps(result["decode"][-1]), file=sys.stderr, flush=True)
    result["decode_sampled"] = decode(engine, reader, 32, 512, args.steps, temperature=1.0, top_p=0.9, logprobs=5)
    print(json.dumps(result["decode_sampled"]), file=sys.stderr, flush=True)
    result["prefill"] = [prefill(engine, reader, 1, 512, 5), prefill(engine, reader, 32, 512, 2)]
    print(json.dumps(result["prefill"]), file=sys.stderr, flush=True)
    if args.profile_kernels:
        from engine.cuda.step_ring import kernel_times
        from kernels.launch import Op

        entries = reader.read()
        steps = entries[(entries["kind"] == Kind.DECODE_GRAPH)]
        for decodes in args.batches:
            wanted = steps[steps["decodes"] == decodes]["step"]
            of_batch = entries[(entries["kind"] == Kind.KERNEL) & np.isin(entries["step"], wanted)]
            print(f"batch {decodes}", file=sys.stderr)
            for op, (count, nanoseconds) in kernel_times(of_batch).items():
                each, a_step = nanoseconds / 1e3, count / max(len(wanted), 1)
                print(f"  {Op(op).name:12} {each:9.2f} us x {a_step:5.1f} = {each * a_step:9.1f} us", file=sys.stderr)
    result["weights_bytes"] = engine.backend.weights_bytes
    result["kv_bytes_per_token"] = kv_bytes(LLAMA_8B, 1)
    engine.close()
    print(json.dumps(result) if args.json else json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
