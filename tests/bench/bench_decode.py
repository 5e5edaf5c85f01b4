"""Decode and prefill speed of our engine, batch 1, the same shape as bench_transformers_peer.py: 128 prompt tokens, 64
new ones, greedy, random prompt; median over the runs. `python -m tests.bench.bench_decode MODEL_DIR [--json]`.

Measured through Engine (scheduler, KV pages, sampler included), not through the bare forward pass.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from engine.core_config import CoreConfig
from engine.engine import Engine
from engine.messages import Generate
from engine.types import SamplingParams


def one_run(engine: Engine, prompt: list[int], new_tokens: int, name: str) -> tuple[float, float]:
    """(prefill seconds, median seconds of a decode step)."""
    params = SamplingParams(seed=1, max_tokens=new_tokens, temperature=0, ignore_eos=True)
    engine.add(Generate(request_id=name, prompt_ids=prompt, params=params))
    steps = []
    while engine.has_work:
        began = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - began)
    decode = steps[-(new_tokens - 1) :]
    return sum(steps[: len(steps) - len(decode)]), statistics.median(decode)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    engine = Engine.load(
        CoreConfig(
            model_dir=str(args.model), num_threads=args.threads, kv_tokens=4096, prefix_cache=False, dtype=args.dtype
        )
    )
    rng = np.random.default_rng(0)
    prompt = [int(t) for t in rng.integers(5, engine.model.vocab_size, args.prompt_tokens)]
    runs = [one_run(engine, prompt, args.new_tokens, f"r{i}") for i in range(args.runs + 1)][1:]
    prefill, step = (statistics.median(values) for values in zip(*runs, strict=True))
    result = {
        "bench": "decode",
        "decode_tokens_per_second": round(1 / step, 2),
        "prefill_tokens_per_second": round(args.prompt_tokens / prefill, 1),
        "weights_gb_per_second": round(engine.backend.weights_bytes / step / 1e9, 2),
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
        "threads": args.threads,
        "dtype": args.dtype,
    }
    print(json.dumps(result) if args.json else "\n".join(f"{name:28} {value}" for name, value in result.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
