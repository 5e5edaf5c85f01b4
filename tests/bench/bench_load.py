"""Load time of a model directory beside safetensors' own loader, in one run.

    python tests/bench/bench_load.py MODEL_DIR [--runs 5] [--threads N] [--json]

Both read the same files from a warm page cache and the runs alternate, so that a busy machine hurts both; best of all
runs is reported. The peer is safetensors.numpy.load_file, which only makes arrays as stored (for bfloat16, which numpy
lacks, safetensors.deserialize of the file's bytes); ours also fuses, converts where asked and computes the checksum.
`copy` is a memcpy of as many bytes into memory touched before: the bound on a warm machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import deserialize
from safetensors.numpy import load_file

from engine.checkpoint import Checkpoint
from engine.config import ModelConfig
from engine.loader import HostArena, arena_checksum, execute_plan, load_weights, plan_load

if TYPE_CHECKING:
    from collections.abc import Callable


def seconds(action: Callable[[], object]) -> tuple[float, float]:
    """(wall, CPU of all threads)."""
    gc.collect()
    start, cpu = time.perf_counter(), time.process_time()
    result = action()
    elapsed = time.perf_counter() - start, time.process_time() - cpu
    del result
    return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    config = ModelConfig.from_dir(args.model)
    with Checkpoint.open(args.model) as checkpoint:
        plan = plan_load(checkpoint, config)
        paths = [file.path for file in checkpoint.files]

    has_bfloat16 = any(op.source_dtype == "BF16" for op in plan.ops)

    def peer_load(path: Path) -> object:
        return deserialize(path.read_bytes()) if has_bfloat16 else load_file(path)

    def copy_only() -> HostArena:
        with Checkpoint.open(args.model) as checkpoint:
            arena = HostArena(plan.arena_bytes)
            execute_plan(checkpoint, plan, arena, num_threads=args.threads)
        return arena

    arena = copy_only()
    source, target = np.frombuffer(arena.buffer, np.uint8), np.ones(plan.arena_bytes, np.uint8)
    actions: dict[str, Callable[[], object]] = {
        "safetensors": lambda: [peer_load(path) for path in paths],
        "ours, as stored": lambda: load_weights(args.model, config, num_threads=args.threads),
        "ours, without checksum": copy_only,
        "ours, to float32": lambda: load_weights(args.model, config, dtype="float32", num_threads=args.threads),
        "ours, to bfloat16": lambda: load_weights(args.model, config, dtype="bfloat16", num_threads=args.threads),
        "checksum alone": lambda: arena_checksum(arena.buffer, num_threads=args.threads),
        "copy": lambda: np.copyto(target, source),
    }
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in actions}
    for _ in range(args.runs):
        for name, action in actions.items():
            runs[name].append(seconds(action))
    best = {name: min(wall for wall, _ in pairs) for name, pairs in runs.items()}
    cpu = {name: min(used for _, used in pairs) for name, pairs in runs.items()}
    peer = best["safetensors"]
    if args.json:
        print(json.dumps({"read_bytes": plan.read_bytes, "seconds": best, "cpu_seconds": cpu, "peer_seconds": peer}))
        return
    print(f"{plan.read_bytes / 1e6:.0f} MB in {len(plan.ops)} copies, {args.threads} threads, best of {args.runs}")
    for name, value in best.items():
        rate = plan.read_bytes / 1e9 / value
        print(
            f"{name:24} {value * 1e3:8.1f} ms {rate:6.2f} GB/s {peer / value:5.2f} x peer, CPU {cpu[name] * 1e3:.0f} ms"
        )


if __name__ == "__main__":
    main()
