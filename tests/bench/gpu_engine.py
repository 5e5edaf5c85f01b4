"""Speed of our CUDA engine on this GPU, through Engine (scheduler, sampler, messages): `... MODEL_DIR [--json]`.

Decode: B sequences with 512 tokens of context, greedy; the median time between two steps that each deliver B tokens.
Prefill: 1 and 32 prompts of 512 tokens, the time until the last first token. Copy bandwidth: device to device, bytes
read plus bytes written, by CUDA events. All in one process, weights loaded once.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from engine.core_config import CoreConfig
from engine.engine import Engine
from engine.messages import Generate, Tokens
from engine.types import SamplingParams


def copy_bandwidth() -> float:
    """Bytes per second, best of 10 copies of 4 GiB. Needs a current context: called while the engine lives."""
    import pycuda.driver as cuda

    size = 4 << 30
    source, target = cuda.mem_alloc(size), cuda.mem_alloc(size)
    cuda.memset_d32(source, 0x3F803F80, size // 4)
    times = []
    for _ in range(10):
        begin, end = cuda.Event(), cuda.Event()
        begin.record()
        cuda.memcpy_dtod(target, source, size)
        end.record()
        end.synchronize()
        times.append(begin.time_till(end) / 1e3)
    source.free()
    target.free()
    return 2 * size / min(times)


class Bench:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.rng = np.random.default_rng(0)
        self.count = 0

    def add(self, batch: int, prompt_tokens: int, new_tokens: int) -> None:
        params = SamplingParams(seed=1, max_tokens=new_tokens, temperature=0, ignore_eos=True)
        for _ in range(batch):
            prompt = [int(t) for t in self.rng.integers(5, self.engine.model.vocab_size, prompt_tokens)]
            self.count += 1
            self.engine.add(Generate(request_id=str(self.count), prompt_ids=prompt, params=params))

    def drain(self) -> list[tuple[float, int]]:
        """(time, tokens delivered) of each step that delivered any."""
        delivered = []
        while self.engine.has_work:
            tokens = 0
            for message in self.engine.step():
                if isinstance(message, Tokens):
                    if message.error:
                        raise SystemExit(f"bench: {message.error} {message.error_where}")
                    tokens += len(message.token_ids)
            if tokens:
                delivered.append((time.perf_counter(), tokens))
        return delivered

    def decode(self, batch: int, prompt_tokens: int, new_tokens: int = 96) -> dict[str, float]:
        self.add(batch, prompt_tokens, new_tokens)
        times = [t for t, tokens in self.drain() if tokens == batch]
        steps = [b - a for a, b in itertools.pairwise(times[8:])]
        step = statistics.median(steps)
        return {"step_ms": round(step * 1e3, 3), "tokens_per_second": round(batch / step, 1), "steps": len(steps),
                "p90_ms": round(statistics.quantiles(steps, n=10)[-1] * 1e3, 3)}  # fmt: skip

    def prefill(self, batch: int, prompt_tokens: int, repeats: int) -> dict[str, float]:
        walls = []
        for _ in range(repeats):
            self.add(batch, prompt_tokens, 1)
            began = time.perf_counter()
            walls.append(self.drain()[-1][0] - began)
        return {"wall_ms": round(statistics.median(walls) * 1e3, 2), "best_ms": round(min(walls) * 1e3, 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    began = time.monotonic()
    engine = Engine.load(
        CoreConfig(model_dir=str(args.model), backend="cuda", max_batch_tokens=16384, max_batch_seqs=64,
                   prefill_chunk=512, prefix_cache=False, kv_tokens=65536)
    )  # fmt: skip
    result: dict[str, Any] = {
        "bench": "gpu_engine", "load_to_ready_seconds": round(time.monotonic() - began, 2),
        "weights_load_seconds": round(engine.ready.load_seconds, 3), "weights_bytes": engine.ready.weights_bytes,
        "prompt_tokens": args.prompt_tokens,
    }  # fmt: skip
    bench = Bench(engine)
    bench.decode(2, 64, 16)  # warm
    bandwidth = copy_bandwidth()
    result["copy_tb_per_second"] = round(bandwidth / 1e12, 3)
    result["decode"] = {str(b): bench.decode(b, args.prompt_tokens) for b in args.batches}
    result["prefill"] = {
        f"{b} x {args.prompt_tokens}": bench.prefill(b, args.prompt_tokens, 10 if b == 1 else 5) for b in (1, 32)
    }
    kv_bytes = 131072 * (args.prompt_tokens + 50)  # of one sequence, Llama-3-8B: 8 KV heads x 128 x 2 x 2 B x 32 layers
    for batch, figures in result["decode"].items():
        floor = (15.01e9 + int(batch) * kv_bytes) / bandwidth
        figures["share_of_ceiling"] = round(floor / (figures["step_ms"] / 1e3), 3)
    engine.close()
    print(json.dumps(result) if args.json else json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
