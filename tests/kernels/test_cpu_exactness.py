"""A row gives the same bits whatever else is in the batch, on any number of threads and either instruction set."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from test_cpu_attention import Case

from kernels import _cpu
from kernels import cpu_ops as ops

FULL = os.environ.get("APPLIANCE_FULL") == "1"


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def matmul(x: np.ndarray, w: np.ndarray, threads: int) -> np.ndarray:
    out = np.empty((len(x), len(w)), np.float32)
    ops.matmul(out, np.ascontiguousarray(x), w, num_threads=threads)
    return out


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (50, 67), (576, 576), (100, 1536)])
def test_a_row_of_matmul_is_the_same_alone_and_in_any_batch(n, k, bf16):
    x, w = normal(1, 130, k), normal(2, n, k)
    w = (w.view(np.uint32) >> 16).astype(np.uint16) if bf16 else w
    whole = matmul(x, w, 1)
    sizes = range(1, 68) if FULL else (1, 2, 3, 4, 5, 6, 7, 8, 9, 31, 64, 67, 128)
    for rows in sizes:
        for threads in (1, 2):
            for start in (0, 130 - rows):
                got = matmul(x[start : start + rows], w, threads)
                np.testing.assert_array_equal(got, whole[start : start + rows])


def test_a_column_of_matmul_does_not_depend_on_the_other_columns():
    x, w = normal(3, 9, 83), normal(4, 101, 83)
    whole = matmul(x, w, 2)
    for start, stop in ((0, 1), (5, 13), (7, 101), (100, 101)):
        np.testing.assert_array_equal(matmul(x, np.ascontiguousarray(w[start:stop]), 2), whole[:, start:stop])


@pytest.mark.parametrize("window", [None, 1, 100, 200])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 80), (8, 1, 30), (2, 1, 256)])
def test_attention_of_a_token_is_the_same_in_prefill_and_decode(heads, kv_heads, head_dim, window):
    case = Case(5, [(0, 300), (130, 40), (255, 1), (384, 1)], heads, kv_heads, head_dim)
    whole = case.run(window=window, threads=1)
    assert np.isfinite(whole).all()
    for chunk in (1, 7, 64, 128):
        for threads in (1, 2):
            parts = [case.run(slice(s, s + chunk), window, threads) for s in range(0, len(whole), chunk)]
            np.testing.assert_array_equal(np.concatenate(parts), whole)
    shuffled = np.random.default_rng(6).permutation(len(whole))  # no two neighbours consecutive
    np.testing.assert_array_equal(case.run(shuffled, window), whole[shuffled])


def test_row_ops_do_not_depend_on_the_batch():
    x, weight = normal(7, 67, 100), normal(8, 100)
    normed, gated = np.empty_like(x), np.empty((67, 50), np.float32)
    ops.rmsnorm(normed, x, weight, 1e-5, num_threads=2)
    ops.swiglu(gated, x, num_threads=2)
    for i in range(67):
        row, one, half = x[i : i + 1].copy(), np.empty((1, 100), np.float32), np.empty((1, 50), np.float32)
        ops.rmsnorm(one, row, weight, 1e-5)
        ops.swiglu(half, row)
        np.testing.assert_array_equal(one[0], normed[i])
        np.testing.assert_array_equal(half[0], gated[i])


def test_both_instruction_sets_give_the_same_bits():
    if _cpu.isa() == "generic":
        pytest.skip("only one instruction set here")
    x, w, weight = normal(9, 13, 165), normal(10, 70, 165), normal(11, 165)
    case = Case(12, [(0, 140), (200, 1)], 6, 2, 70)

    def everything() -> list[np.ndarray]:
        normed, gated, e = np.empty_like(x), np.empty((13, 82), np.float32), np.empty(5000, np.float32)
        ops.rmsnorm(normed, x, weight, 1e-5)
        ops.swiglu(gated, np.ascontiguousarray(x[:, :164]) * 20)
        ops.exp(e, np.linspace(-110, 95, 5000, dtype=np.float32))
        bits = (w.view(np.uint32) >> 16).astype(np.uint16)
        return [
            normed,
            gated,
            e,
            matmul(x, w, 1),
            matmul(x[:1], w, 1),
            matmul(x, bits, 1),
            case.run(),
            case.run(window=50),
        ]

    fast = everything()
    _cpu.set_isa("generic")
    try:
        plain = everything()
    finally:
        _cpu.set_isa("avx2")
    for a, b in zip(fast, plain):
        np.testing.assert_array_equal(a, b)


def test_python_threads_may_call_at_the_same_time():
    x, w = normal(13, 20, 300), normal(14, 200, 300)
    expected = matmul(x, w, 1)
    wrong = []

    def work() -> None:
        for _ in range(50):
            if not np.array_equal(matmul(x, w, 2), expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


CHILD = """
import os, sys
import numpy as np
from kernels import _cpu, cpu_ops as ops
x, w, out = np.ones((8, 64), np.float32), np.ones((96, 64), np.float32), np.zeros((8, 96), np.float32)
ops.matmul(out, x, w, num_threads=2)
pid = os.fork()
if pid == 0:  # the parent's worker does not exist here
    out[:] = 0
    ops.matmul(out, x, w, num_threads=2)
    os._exit(0 if (out == 64).all() and len(os.listdir("/proc/self/task")) == 2 else 1)
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
_cpu.shutdown()
assert len(os.listdir("/proc/self/task")) == 1
out[:] = 0
ops.matmul(out, x, w, num_threads=2)  # starts afresh
assert (out == 64).all()
sys.exit(code)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_the_pool_survives_fork_and_shuts_down():
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", CHILD], env=env, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
