"""The same launch again and again: does it always give the same bits? What else runs on the GPU must not show.

A neighbour in another process shares the GPU by time slices. Each switch empties the caches of address translation, so
that loads and stores of the next slice wait for microseconds where they otherwise take some hundred cycles. What is not
ordered but only usually early enough goes wrong there (kernels/LOG.md, "Reads that an arrival did not wait for").

`python -m tests.gpu.repeat [--seconds S] [--fatbins DIR]`: all cases in turn, for so long or until stdin is closed (a
neighbour); a JSON line of how often each gave which result. tests/gpu/test_beside.py runs it and itself.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import select
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.cuda.memory import copy_to_host
from kernels.attention import AttentionShape
from kernels.gemm import Epilogue, gemm_launch
from kernels.launch import Launch, Op
from kernels.manifest import FATBIN_DIR
from tests.gpu.device import Gpu, GpuBuffer, GpuDevice
from tests.kernels.cases_attention import OnDevice, World, random_bits
from tests.kernels.cases_gemm import Loaded, Problem

Array = npt.NDArray[Any]


class Repeated:
    """A launch, prepared once. Before each run everything that it writes is put back to what it was at first."""

    def __init__(
        self, device: GpuDevice, launch: Launch, result: GpuBuffer, others: tuple[GpuBuffer, ...] = ()
    ) -> None:
        self._device, self._result = device, result
        self._prepared = device.executor.prepare(launch)
        self._written = [(buffer, device.put(buffer.read())) for buffer in (result, *others)]
        self._host = np.empty(result.nbytes, np.uint8)
        self.seen: Counter[str] = Counter()
        self.first: dict[str, Array] = {}  # a result by its digest

    def run(self, count: int) -> None:
        context, stream = self._device.context, self._device.context.compute
        for _ in range(count):
            for buffer, before in self._written:
                context.api.cuMemcpyDtoDAsync(buffer.address, before.address, buffer.nbytes, stream.handle)
            self._device.executor.launch(self._prepared)
            copy_to_host(context, self._host, self._result.address, stream)
            stream.synchronize()
            digest = hashlib.blake2b(self._host, digest_size=8).hexdigest()
            if digest not in self.first and len(self.first) < 8:
                self.first[digest] = self._host.copy()
            self.seen[digest] += 1

    def differences(self) -> str:
        """Of the rarer results from the most frequent one: how many bytes, the first of them."""
        usual, *others = [digest for digest, _ in self.seen.most_common()]
        lines = [f"{self.seen[usual]} of {self.seen.total()} runs gave {usual}"]
        for digest in others:
            line = f"{self.seen[digest]} gave {digest}"
            if digest in self.first and usual in self.first:
                at = np.flatnonzero(self.first[digest] != self.first[usual])
                line += f": {at.size} bytes differ, {at[0]} to {at[-1]}"
            lines.append(line)
        return "; ".join(lines[:9])


def attention_decode(device: GpuDevice, shape: AttentionShape) -> Repeated:
    """40 rows of 1 to 1,999 keys: whole pages and parts, several items a block."""
    lengths = np.random.default_rng(3).integers(1, 2000, 40).tolist()
    world = World(shape, lengths)
    slots, positions = np.arange(len(lengths)), np.array(lengths) - 1
    q = random_bits(np.random.default_rng(4), len(slots), shape.num_heads, shape.head_dim)
    made = OnDevice(device, world).decode_launch(slots, positions, q)
    assert isinstance(made.out, GpuBuffer) and isinstance(made.partial, GpuBuffer)
    return Repeated(device, made.launch, made.out, (made.partial,))


def gemm(device: GpuDevice, epilogue: Epilogue, rows: int, n: int, k: int) -> Repeated:
    """The kernel that a step of so many rows takes."""
    loaded = Loaded(device, Problem.random(np.random.default_rng(n + rows), epilogue, rows, n, k))
    out = device.put(loaded._out(rows))
    addresses = loaded.x.address, loaded.w.address, out.address
    return Repeated(device, gemm_launch(device.executor, epilogue, *addresses, **loaded.problem.shape, op=Op.QKV), out)


CASES: dict[str, Callable[[GpuDevice], Repeated]] = {}
for _shape in ((32, 8, 128), (9, 3, 64), (8, 8, 96), (8, 4, 256)):
    CASES["attention-{}-{}-{}".format(*_shape)] = functools.partial(attention_decode, shape=AttentionShape(*_shape))
for _rows in (1, 16, 32, 64):
    CASES[f"gemm-f32-{_rows}x6144x4096"] = functools.partial(gemm, epilogue="f32", rows=_rows, n=6144, k=4096)
    CASES[f"gemm-f32-{_rows}x49152x576"] = functools.partial(gemm, epilogue="f32", rows=_rows, n=49152, k=576)
    CASES[f"gemm-add-{_rows}x4096x4096"] = functools.partial(gemm, epilogue="add", rows=_rows, n=4096, k=4096)
    CASES[f"gemm-swiglu-{_rows}x28672x1024"] = functools.partial(gemm, epilogue="swiglu", rows=_rows, n=28672, k=1024)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.repeat")
    parser.add_argument("--seconds", type=float, help="end after so long (default: when stdin is closed)")
    parser.add_argument("--fatbins", type=Path, default=FATBIN_DIR)
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    options = parser.parse_args()
    gpu = Gpu(options.fatbins)
    device = GpuDevice(gpu)
    repeated = {name: CASES[name](device) for name in options.cases}
    print("running", flush=True)
    began = time.monotonic()
    while True:
        for one in repeated.values():
            one.run(20)
        if options.seconds is None:
            if select.select([sys.stdin], [], [], 0)[0]:
                break
        elif time.monotonic() - began > options.seconds:
            break
    counts = {name: [one.seen.total(), one.seen.total() - max(one.seen.values())] for name, one in repeated.items()}
    how = {name: one.differences() for name, one in repeated.items() if len(one.seen) > 1}
    print(json.dumps({"launches, different": counts, "how": how}))
    device.free()
    gpu.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
