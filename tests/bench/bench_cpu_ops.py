"""How near the CPU ops come to the machine: `python tests/bench/bench_cpu_ops.py [MODEL_DIR] [--threads N] [--json]`.

Prints the read bandwidth (numpy's maximum over 256 MB, one slice a thread), then per matrix of SmolLM2-135M the
bandwidth of one row (decode, matrices not in cache) and GFLOP/s of 128 rows (prefill) beside numpy's OpenBLAS on the
same shapes; with a model directory also tokens per second of the whole runner at batch 1 and of a 512-token prefill.
The best of several short runs, so that other load on the machine hurts least; both sides run in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from engine.types import StepBatch
from kernels import cpu_ops as ops

SHAPES = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "lm_head": (49152, 576)}


def best_seconds(*calls: Callable[[], object], repeats: int = 7) -> list[float]:
    """The shortest time of each call, all run in turn."""
    best = [float("inf")] * len(calls)
    for _ in range(repeats):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


def read_bandwidth(threads: int) -> float:
    """GB/s."""
    data = np.ones(64 << 20, np.float32)
    with ThreadPoolExecutor(threads) as pool:
        slices = np.array_split(data, threads)
        (seconds,) = best_seconds(lambda: list(pool.map(np.max, slices)))
    return data.nbytes / seconds / 1e9


def bench_matrices(threads: int) -> dict[str, dict[str, float]]:
    rng = np.random.default_rng(0)
    results = {}
    for name, (n, k) in SHAPES.items():
        w = rng.standard_normal((n, k), dtype=np.float32)
        row = {}
        for rows in (1, 128) if name != "lm_head" else (1,):
            x = rng.standard_normal((rows, k), dtype=np.float32)
            out, peer = np.empty((rows, n), np.float32), np.empty((rows, n), np.float32)
            cold = [w.copy() for _ in range(max(1, min(16, (64 << 20) // w.nbytes)))] if rows == 1 else [w]

            def ours(x=x, out=out, cold=cold) -> None:
                for matrix in cold:
                    ops.matmul(out, x, matrix, num_threads=threads)

            def openblas(x=x, peer=peer, cold=cold) -> None:
                for matrix in cold:
                    np.matmul(x, matrix.T, out=peer)

            for label, seconds in zip(("ours", "openblas"), best_seconds(ours, openblas)):
                if rows == 1:
                    row[f"decode_{label}_gb_s"] = w.nbytes * len(cold) / seconds / 1e9
                else:
                    row[f"prefill_{label}_gflop_s"] = 2 * rows * n * k / seconds / 1e9
        results[name] = row
    return results


def bench_model(directory: str, threads: int) -> dict[str, float]:
    from engine.config import ModelConfig
    from engine.loader import load_weights
    from engine.runner import ModelRunner

    config = ModelConfig.from_dir(directory)
    weights = load_weights(Path(directory), config)
    runner = ModelRunner(config, weights, num_pages=8, num_threads=threads, max_batch_tokens=512, max_model_len=1024)
    tables = np.arange(8, dtype=np.int32)[None]

    def step(start: int, stop: int) -> None:
        positions = np.arange(start, stop, dtype=np.int32)
        last = np.array([stop - start - 1], np.int32)
        runner.forward(StepBatch(positions % 1000, positions, np.zeros_like(positions), tables, last))

    decode, prefill = best_seconds(lambda: step(16, 17), lambda: step(0, 512), repeats=5)
    return {
        "decode_tokens_s": 1 / decode,
        "decode_weights_gb_s": weights.arena_bytes / decode / 1e9,
        "prefill_512_tokens_s": 512 / prefill,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="directory of a model in Hugging Face form")
    parser.add_argument("--threads", type=int, default=min(os.cpu_count() or 1, 8))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    report: dict[str, object] = {"threads": args.threads, "read_gb_s": read_bandwidth(args.threads)}
    report["matrices"] = bench_matrices(args.threads)
    if args.model:
        report["model"] = bench_model(args.model, args.threads)
    if args.json:
        print(json.dumps(report))
        return
    print(f"{args.threads} threads, read bandwidth {report['read_gb_s']:.1f} GB/s")
    for name, row in report["matrices"].items():  # type: ignore[attr-defined]
        print(f"{name:8s}", "  ".join(f"{key} {value:.1f}" for key, value in row.items()))
    for key, value in (report.get("model") or {}).items():  # type: ignore[attr-defined]
        print(f"{key} {value:.1f}")


if __name__ == "__main__":
    main()
