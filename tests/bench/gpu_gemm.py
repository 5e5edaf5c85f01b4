"""The weight chain of a decode step on this GPU: 129 products of the Llama-3-8B shape over 15 GB, one CUDA graph.

    python -m tests.bench.gpu_gemm [--rows 1 8 32] [--alone]

Prints milliseconds and TB/s of weights for the plans that kernels/gemm.py makes and for variations of them, beside a
device-to-device copy in the same run. --alone: each of the five shapes by itself too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.cuda.graphs import capture
from kernels.gemm import DecodePlan, Epilogue, decode_launch, decode_plan, make_decode_plan
from kernels.launch import Launch, Op
from tests.gpu.device import Gpu

LAYERS = 32
SHAPES: tuple[tuple[str, Epilogue, int, int], ...] = (
    ("qkv", "f32", 6144, 4096), ("o", "add", 4096, 4096), ("gate_up", "swiglu", 28672, 4096),
    ("down", "add", 4096, 14336),
)  # fmt: skip
HEAD: tuple[str, Epilogue, int, int] = ("lm_head", "f32", 128256, 4096)

Planner = Callable[[int, int, int], DecodePlan]  # rows, N, K


@dataclass
class Memory:
    weights: int
    x: int
    out: int


def total_elements() -> int:
    return sum(n * k for _, _, n, k in SHAPES) * LAYERS + HEAD[2] * HEAD[3]


def chain(memory: Memory, rows: int, planner: Planner, only: str | None = None) -> tuple[list[Launch], int]:
    """Launches and the bytes of weights they read; `only`: this product of every layer."""
    launches, at, read = [], memory.weights, 0
    for name, epilogue, n, k in [*SHAPES * LAYERS, HEAD]:
        if only in (None, name):
            ld_out = n // 2 if epilogue == "swiglu" else n
            launches.append(
                decode_launch(
                    planner(rows, n, k),
                    epilogue,
                    memory.x,
                    at,
                    memory.out,
                    num_rows=rows,
                    num_outputs=n,
                    k_pad=k,
                    ld_x=k,
                    ld_out=ld_out,
                    op=Op.QKV,
                )  # fmt: skip
            )
            read += 2 * n * k
        at += 2 * n * k
    return launches, read


class Timer:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.cuda, self.stream = gpu, gpu.context.cuda, gpu.context.compute

    def milliseconds(self, launches: list[Launch], repeats: int = 15) -> float:
        """Median of a graph's replays, by events."""
        prepared = [self.gpu.executor.prepare(launch) for launch in launches]
        graph = capture(self.gpu.context, self.stream, lambda: self.gpu.executor.launch_all(prepared))
        times = []
        for _ in range(repeats + 3):
            begin, end = self.cuda.Event(), self.cuda.Event()
            begin.record(self.stream)
            graph.launch(self.stream)
            end.record(self.stream)
            end.synchronize()
            times.append(begin.time_till(end))
        graph.destroy()
        return float(sorted(times[3:])[repeats // 2])

    def copy_tb_per_second(self, source: int, target: int, size: int) -> float:
        times = []
        for _ in range(8):
            begin, end = self.cuda.Event(), self.cuda.Event()
            begin.record(self.stream)
            self.cuda.memcpy_dtod_async(target, source, size, self.stream)
            end.record(self.stream)
            end.synchronize()
            times.append(begin.time_till(end))
        return 2 * size / min(times) / 1e9


def variations(multiprocessors: int) -> dict[str, Planner]:
    def planned(rows: int, n: int, k: int) -> DecodePlan:
        return decode_plan(rows, n, k, multiprocessors)

    def varied(**changes: Any) -> Planner:
        def planner(rows: int, n: int, k: int) -> DecodePlan:
            plan = planned(rows, n, k)
            narrow = plan.teams <= 3
            fields: dict[str, Any] = {
                "blocks": plan.blocks, "teams": plan.teams, "piece": plan.piece, "cluster": plan.cluster, "k_pad": k,
            }  # fmt: skip
            for name, value in changes.items():
                if name == "narrow_piece":
                    fields["piece"] = value if narrow else plan.piece
                elif name == "wide_piece":
                    fields["piece"] = plan.piece if narrow else value
                elif name == "narrow_cluster":
                    fields["cluster"] = value if narrow else 1
                elif name == "wide_teams":
                    if not narrow:
                        fields["teams"] = value
                else:
                    fields[name] = value
            if plan.rows >= 32:
                fields["piece"] = 2
            return make_decode_plan(plan.rows, **fields)

        return planner

    return {
        "planned": planned,
        "no look-ahead": varied(ahead_bytes=0), "look-ahead 128 KB": varied(ahead_bytes=128 << 10),
        "look-ahead 256 KB": varied(ahead_bytes=256 << 10),
        "pieces of 4 KB": varied(piece=2), "wide pieces of 8 KB": varied(wide_piece=4),
        "64 KB": varied(shared_bytes=64 << 10), "150 KB": varied(shared_bytes=150 << 10),
        "200 KB": varied(shared_bytes=200 << 10), "wide teams 4": varied(wide_teams=4),
        "cluster 1": varied(narrow_cluster=1), "cluster 2": varied(narrow_cluster=2), "cluster 4": varied(narrow_cluster=4),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--alone", action="store_true")
    args = parser.parse_args()
    gpu = Gpu()
    cuda, multiprocessors = gpu.context.cuda, gpu.executor.num_multiprocessors
    size = 2 * total_elements()
    pool = np.random.default_rng(0).standard_normal(1 << 25).astype(np.float32).view(np.uint32) >> 16
    bits = np.ascontiguousarray(pool.astype(np.uint16))
    weights, x, out = cuda.mem_alloc(size), cuda.mem_alloc(1 << 22), cuda.mem_alloc(64 * 128256 * 4)
    for at in range(0, size, bits.nbytes):
        cuda.memcpy_htod(int(weights) + at, bits.view(np.uint8)[: min(bits.nbytes, size - at)])
    cuda.memcpy_htod(x, bits.view(np.uint8)[: 1 << 22])
    cuda.memset_d32(out, 0, 64 * 128256)
    memory, timer = Memory(int(weights), int(x), int(out)), Timer(gpu)
    half = 6 << 30
    print(f"copy: {timer.copy_tb_per_second(int(weights), int(weights) + half, half):.3f} TB/s", flush=True)
    for rows in args.rows:
        for name, planner in variations(multiprocessors).items():
            launches, read = chain(memory, rows, planner)
            ms = timer.milliseconds(launches)
            print(f"rows {rows:2} {name:20} {ms:.3f} ms {read / ms / 1e9:.3f} TB/s", flush=True)
            if args.alone and name == "planned":
                for shape, _, n, k in [*SHAPES, HEAD]:
                    launches, read = chain(memory, rows, planner, shape)
                    ms = timer.milliseconds(launches)
                    print(
                        f"    {shape:8} {ms / len(launches) * 1e3:.2f} us {read / ms / 1e9:.3f} TB/s {planner(rows, n, k)}"
                    )
    for buffer in (weights, x, out):
        buffer.free()
    gpu.close()


if __name__ == "__main__":
    main()
