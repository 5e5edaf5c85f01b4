"""The weight chain of a decode step on this GPU: 129 products of the Llama-3-8B shape over 15 GB, one CUDA graph.

    python -m tests.bench.gpu_gemm [--rows 1 8 32] [--alone]

Prints milliseconds and TB/s of weights for the plans that kernels/gemm.py makes and for variations of them, beside a
device-to-device copy in the same run. --alone: each of the five shapes by itself too.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine.cuda.errors import CudaCallError
from engine.cuda.graphs import capture
from kernels.gemm import DecodePlan, Epilogue, decode_launch, decode_plan, make_decode_plan
from kernels.launch import Launch, Op
from tests.gpu.device import Gpu

LAYERS = 32
SHAPES: tuple[tuple[str, Epilogue, int, int], ...] = (
    ("qkv", "f32", 6144, 4096),
    ("o", "add", 4096, 4096),
    ("gate_up", "swiglu", 28672, 4096),
    ("down", "add", 4096, 14336),
)
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
                )
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


def planner_of(multiprocessors: int, **changes: int) -> Planner:
    """kernels/gemm.py's plan with some of it changed. narrow_* and wide_*: of shapes with at most, more than 3 tiles a
    block."""

    def planner(rows: int, n: int, k: int) -> DecodePlan:
        plan = decode_plan(rows, n, k, multiprocessors)
        kind = "narrow_" if plan.teams <= 3 else "wide_"
        fields = {"teams": plan.teams, "piece": plan.piece, "cluster": plan.cluster}
        for name, value in changes.items():
            if name.startswith(kind) or "_" not in name:
                fields[name.removeprefix(kind)] = value
        budget = {"shared_bytes": fields.pop("kb") << 10} if "kb" in fields else {}
        look = {"ahead_bytes": fields.pop("ahead") << 10} if "ahead" in fields else {}
        if plan.rows == 64:
            fields["piece"] = 2
        return make_decode_plan(plan.rows, blocks=plan.blocks, k_pad=k, **fields, **budget, **look)

    return planner


def variations(rows: int) -> list[dict[str, int]]:
    found: list[dict[str, int]] = [{}]
    for narrow_piece, wide_piece in itertools.product((2, 4), (2, 4)):
        for kb, ahead in itertools.product((104, 128, 152, 176, 200), (0, 64)):
            found.append({"narrow_piece": narrow_piece, "wide_piece": wide_piece, "kb": kb, "ahead": ahead})
    if rows >= 16:
        found += [
            {"narrow_piece": p, "wide_piece": 2, "kb": kb, "narrow_cluster": c, "ahead": 0}
            for p, kb, c in itertools.product((2, 4), (104, 152, 200), (1, 2, 4))
        ]
    return found


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
        for changes in variations(rows):
            planner = planner_of(multiprocessors, **changes)
            try:
                launches, read = chain(memory, rows, planner)
                ms = timer.milliseconds(launches)
            except CudaCallError as error:  # a variation that does not fit
                print(f"rows {rows:2} {changes}: {error}", flush=True)
                continue
            print(f"rows {rows:2} {ms:.3f} ms {read / ms / 1e9:.3f} TB/s {changes or 'planned'}", flush=True)
            if args.alone and not changes:
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
