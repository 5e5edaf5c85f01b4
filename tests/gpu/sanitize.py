"""The small cases of every kernel under NVIDIA's compute-sanitizer: `python -m tests.gpu.sanitize [TOOL ...]`.

Without arguments memcheck (accesses outside allocations, which are exact here) and racecheck (shared memory hazards).
synccheck and initcheck work too. Exit status 0: clean; 1: findings, printed; 2: the sanitizer is not here.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from engine.sampler import SampleState
from kernels.attention import AttentionShape
from kernels.build import ARCHES, FLAGS, build
from kernels.gemm import gemm_launch, portable_launch
from kernels.gemm_prefill import VARIANTS, Variant, prefill_launch, variant_plan
from kernels.manifest import FATBIN_DIR
from kernels.sampler import SamplerShape
from tests.gpu.device import Gpu, GpuBuffer, GpuDevice
from tests.kernels import cases_attention, cases_gemm, cases_load, cases_rows, cases_sampler, cases_step_prepare

ROOT = Path(__file__).resolve().parents[2]
FINDINGS = 97
EPILOGUES = ("f32", "add", "swiglu")
Case = Callable[[GpuDevice], Any]


def row_cases() -> Iterator[tuple[str, Case]]:
    for rows, hidden in ((5, 576), (3, 60), (2, 8200)):
        yield f"rmsnorm {rows} x {hidden}", lambda d, r=rows, h=hidden: cases_rows.check_rmsnorm(d, r, h)
    yield "rmsnorm gather", lambda d: cases_rows.check_rmsnorm(d, 7, 96, gather=True)
    yield "embed", lambda d: cases_rows.check_embed(d, 5, 100, vocab=83)
    for dim in (64, 80, 128, 256):
        for options in ({}, {"bias": True}, {"norm": True}):
            case = functools.partial(cases_rows.QkvCase, 5, 4, 2, dim, **options)
            yield f"qkv_post {dim} {options}", lambda d, c=case: cases_rows.check_qkv_post(d, c())
    yield "qkv_post reports", lambda d: cases_rows.check_qkv_post_reports(d, 1000, 80)
    yield "qkv_post padding", cases_rows.check_qkv_post_padding_row
    yield "step_prepare", lambda d: cases_step_prepare.check_random_steps(d, steps=3, max_slots=9, longest_item=40)
    yield "step_prepare bad", cases_step_prepare.check_bad_records
    for dtype in ("BF16", "F16", "F32"):
        yield f"retile {dtype}", lambda d, t=dtype: cases_load.check_retile(d, t, 33, 72, row0=21, num_pieces=5)
        yield f"copy_f32 {dtype}", lambda d, t=dtype: cases_load.check_copy_f32(d, t, 577)
    yield "retile gate_up", lambda d: cases_load.check_retile_gate_up(d, 13, 40)
    yield "checksum", lambda d: cases_load.check_checksum(d, (1 << 20) + 48, flips=1)


def gemm_cases() -> Iterator[tuple[str, Case]]:
    def same_bits(m: int, n: int, k: int, epilogue: Any, make: Callable[[GpuDevice, Any], dict[str, Any]]) -> Case:
        def run(device: GpuDevice) -> None:
            problem = cases_gemm.Problem.random(np.random.default_rng(m + k), epilogue, m, n, k)
            cases_gemm.check_same_bits(device, problem, {**make(device, problem), "portable": portable_launch})

        return run

    for epilogue in EPILOGUES:
        for m, k in ((1, 200), (9, 200), (17, 200), (33, 200), (64, 200), (1, 4104), (64, 4104)):
            yield (
                f"gemm {epilogue} M={m} K={k}",
                same_bits(m, 76, k, epilogue, lambda d, _: {"planned": functools.partial(gemm_launch, d.executor)}),
            )
        for variant in VARIANTS:

            def make(device: GpuDevice, problem: Any, variant: Variant = variant) -> dict[str, Any]:
                if device.executor.path != "hopper":
                    return {}
                plan = variant_plan(variant, problem.shape["num_rows"], problem.shape["num_outputs"], 4)
                return {variant.suffix: functools.partial(prefill_launch, plan)}

            n = 2 * variant.width * variant.share_x + 6
            k = 1032 if epilogue == "f32" else 136  # the longer one goes round the ring of buffers
            yield f"prefill gemm {epilogue} {variant.suffix}", same_bits(200, n, k, epilogue, make)


def attention_cases() -> Iterator[tuple[str, Case]]:
    lengths = [1, 130, 2, 33, 257]
    for heads, kv_heads, dim in ((6, 2, 64), (2, 2, 96), (4, 1, 128), (2, 1, 256), (2, 1, 80)):
        shape = AttentionShape(heads, kv_heads, dim)
        yield f"decode attention {dim}", lambda d, s=shape: cases_attention.check_decode(d, s, lengths)
        yield (
            f"prefill attention {dim}",
            lambda d, s=shape: cases_attention.check_prefill_is_decode(d, s, 150, cuts=(40, 128)),
        )
        # Few blocks: the ring's buffers are filled again and again.
        yield (
            f"attention ring {dim}",
            lambda d, s=shape: cases_attention.check_bits_do_not_depend_on_the_batch(d, s, [700, 3, 1100]),
        )
    window = AttentionShape(2, 1, 64, 100)
    yield "attention window", lambda d: cases_attention.check_prefill_is_decode(d, window, 300, cuts=(100,))


class SamplerMachine:
    """cases_sampler.Machine on a GpuDevice."""

    def __init__(self, device: GpuDevice) -> None:
        self._device = device
        self._buffers: dict[int, GpuBuffer] = {}
        self.run = device.run

    def zeros(self, num_bytes: int) -> int:
        buffer = self._device.put(np.zeros(num_bytes, np.uint8))
        self._buffers[buffer.address] = buffer
        return buffer.address

    def write(self, address: int, array: np.ndarray[Any, Any]) -> None:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        whole = self._buffers[address].read()
        whole[: data.size] = data
        self._buffers[address].write(whole)

    def read(self, address: int, shape: Any, dtype: Any) -> np.ndarray[Any, Any]:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self._buffers[address].read()[:size].copy().view(dtype).reshape(shape)


def sampler_cases() -> Iterator[tuple[str, Case]]:
    def run(device: GpuDevice, seed: int) -> None:
        rng = np.random.default_rng(seed)
        vocab, rows = 1003, 6
        shape = SamplerShape(num_slots=rows + 1, vocab_size=vocab, max_rows=rows, max_edits=64, max_logprobs=20)
        sampler = cases_sampler.DeviceSampler(SamplerMachine(device), shape)
        states = [
            SampleState(cases_sampler.random_params(rng, vocab, 20, 64), [1, 2, 3], vocab, i) for i in range(rows)
        ]
        sampler.set_slots(dict(enumerate(states)))
        kinds = list(cases_sampler.KINDS)
        given = [
            cases_sampler.Row(cases_sampler.make_row(kinds[(seed + i) % len(kinds)], seed + i, vocab), i, state)
            for i, state in enumerate(states)
        ]
        cases_sampler.check(sampler, given)
        device.take_errors()

    for seed in range(4):
        yield f"sampler {seed}", functools.partial(run, seed=seed)


def cases() -> Iterator[tuple[str, Case]]:
    yield from row_cases()
    yield from gemm_cases()
    yield from attention_cases()
    yield from sampler_cases()


def racecheck_kernels() -> Path:
    """The kernels in which every lane of a warp arrives at a barrier (common.cuh:warp_arrive), for this GPU."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    capability = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0].replace(".", "")
    arches = [arch for arch in ARCHES["portable"] if arch.rstrip("a") == capability]
    out = FATBIN_DIR.with_name("fatbin-racecheck")
    flags = (*FLAGS, "-DAPPLIANCE_RACECHECK")
    build(out=out, only_arch=arches[0] if arches else None, jobs=os.cpu_count() or 1, say=True, flags=flags)
    return out


def run_cases(only: str, fatbins: Path) -> int:
    """In the process that the sanitizer watches."""
    gpu = Gpu(fatbins)
    count = 0
    for name, case in cases():
        if only in name:
            device = GpuDevice(gpu, exact=True)
            print(f"case: {name}", flush=True)
            case(device)
            device.free()
            count += 1
    gpu.close()
    print(f"{count} cases passed")
    return 0 if count else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.sanitize", description=__doc__)
    parser.add_argument("tools", nargs="*", default=["memcheck", "racecheck"])
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--logs", type=Path, default=Path("/tmp"), help="folder of TOOL.txt, the whole output")
    parser.add_argument(
        "--fatbins", type=Path, default=FATBIN_DIR, help="the kernels to run (default: the shipped ones)"
    )
    parser.add_argument("--bare", action="store_true", help="run the cases without the sanitizer")
    options = parser.parse_args()
    if options.bare:
        return run_cases(options.only, options.fatbins)
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None:
        print("there is no compute-sanitizer here; it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    status = 0
    for tool in options.tools:
        started = time.monotonic()
        command = [sanitizer, "--tool", tool, "--error-exitcode", str(FINDINGS), "--print-limit", "20"]
        if tool in ("racecheck", "synccheck"):
            command += [
                "--num-cuda-barriers",
                "64",
            ]  # a block; what it does not track it calls a race
        command += ["--report-api-errors", "no"]  # the bindings ask the driver for functions it may not have
        child = [sys.executable, "-m", "tests.gpu.sanitize", "--bare", "--only", options.only]
        child += ["--fatbins", str(racecheck_kernels() if tool == "racecheck" else options.fatbins)]
        log = options.logs / f"{tool}.txt"
        with log.open("w") as output:  # a file and no pipe: whoever stops a long run still sees how far it came
            code = subprocess.run([*command, *child], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT).returncode
        text = log.read_text()
        if code != 0:
            status = 1
            print(text[-8000:])
        last = [line for line in text.splitlines() if "SUMMARY" in line or line.endswith("cases passed")]
        print(f"{tool}: exit {code} after {time.monotonic() - started:.1f} s; {'; '.join(last)}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
