"""The emulator does what the device does: each feature against numpy, under several orders of threads and copies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels.launch import Argument, CommonArgument, Launch, TensorMap2D, address
from tests.kernels.emulator import CompileError, EmulatedExecutor, EmulationError
from tests.kernels.emulator.build import KERNELS, find_kernels

CASES = Path(__file__).parent / "emulator" / "cases"
SEEDS = [0, 1, 2, 3]
ONE = (1, 1, 1)


@pytest.fixture(params=SEEDS, ids=lambda seed: f"seed{seed}")
def ex(request: pytest.FixtureRequest) -> EmulatedExecutor:
    return EmulatedExecutor(seed=request.param, sources=[CASES])


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Nearest, ties to even (values are finite)."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def device(ex: EmulatedExecutor, values: np.ndarray) -> np.ndarray:
    copy = ex.array(values.shape, values.dtype)
    copy[...] = values
    return copy


def run(ex: EmulatedExecutor, kernel: str, *arguments: Any, grid: Any = ONE, block: Any = 32, **more: Any) -> None:
    shape = block if isinstance(block, tuple) else (block, 1, 1)
    packed: list[Argument] = [CommonArgument(op=3, layer=2)]
    packed += [address(item.ctypes.data) if isinstance(item, np.ndarray) else item for item in arguments]
    ex.run(Launch("features", kernel, grid, shape, tuple(packed), **more))


def test_indices_and_arguments(ex: EmulatedExecutor) -> None:
    out = ex.array(2 * 3 * 4 * 5 * 6 * 7, np.int32)
    nothing = TensorMap2D(out.ctypes.data, 1, 8, 16, 1)
    run(ex, "identity", out, np.float32(2.5), np.int64(7 << 32), nothing, grid=(4, 3, 2), block=(7, 6, 5))
    block, thread = np.divmod(np.arange(out.size), 210)
    assert np.array_equal(out, block * 1000 + thread + 9)


def test_shuffles(ex: EmulatedExecutor) -> None:
    v = np.random.default_rng(0).integers(0, 1000, 32).astype(np.int32)
    out = ex.array((12, 32), np.int32, fill=0xEE)
    run(ex, "shuffles", device(ex, v), out)
    lane = np.arange(32)
    up = np.where(lane % 16 >= 2, lane - 2, lane)
    down = np.where(lane + 3 < 32, lane + 3, lane)
    half = np.where(lane < 16, v[lane ^ 1], 2 * v[lane ^ 2])
    mask = sum(1 << i for i in range(32) if v[i] & 1)
    match = [sum(1 << i for i in range(32) if v[i] % 3 == x % 3) for x in v]
    expected = [
        v[[5] * 32],
        v[lane // 8 * 8 + 3],
        v[lane ^ 16],
        v[up],
        v[down],
        [mask] * 32,
        match,
        [v.max()] * 32,
        [1] * 32,
        [0] * 32,
        half,
        v[lane ^ 1],
    ]
    for row, (got, want) in enumerate(zip(out.view(np.uint32), expected, strict=True)):
        assert np.array_equal(got, np.asarray(want, np.uint32)), row


def test_block_barriers_and_returned_threads(ex: EmulatedExecutor) -> None:
    values = np.random.default_rng(1).integers(-50, 50, (9, 256)).astype(np.int32)
    out = ex.array(9, np.int32)
    run(ex, "sums", device(ex, values), out, grid=(9, 1, 1), block=256)
    assert np.array_equal(out, values.sum(1) * 100 + 32)


def test_last_block_sees_all(ex: EmulatedExecutor) -> None:
    values = np.random.default_rng(2).integers(-50, 50, (13, 64)).astype(np.int32)
    out, counter = ex.array(1, np.int32), ex.array(1, np.uint32)
    run(ex, "last_block", device(ex, values), ex.array(13, np.int32), counter, out, grid=(13, 1, 1), block=64)
    assert out[0] == values.sum() and counter[0] == 13


def test_named_barriers(ex: EmulatedExecutor) -> None:
    out = ex.array((5, 64), np.int32)
    run(ex, "turns", out, np.int32(5), block=128)
    assert np.array_equal(out, np.arange(5)[:, None] * 64 + np.arange(63, -1, -1))


def test_atomics(ex: EmulatedExecutor) -> None:
    i, u, w = device(ex, np.zeros(4, np.int32)), device(ex, np.array([0, 0, 7, 0], np.uint32)), ex.array(2, np.uint64)
    run(ex, "atomics", i, u, w, grid=(3, 1, 1), block=64)
    t = np.arange(192)
    assert i[:3].tolist() == [t.sum(), 191, -191]
    assert u[:3].tolist() == [0xFFFFFFFF, np.bitwise_xor.reduce(t), 9]
    assert w.tolist() == [int(t.sum()) << 32, 191]


def test_cp_async_fills_with_zeros(ex: EmulatedExecutor) -> None:
    values = np.random.default_rng(3).standard_normal((6, 16)).astype(np.float32)
    valid = np.array([16, 8, 0, 4, 16, 12], np.int32)
    out = ex.array((6, 16), np.float32, fill=0xEE)
    run(ex, "staged", device(ex, values), device(ex, valid), out, np.int32(6), block=4, shared_bytes=128)
    assert np.array_equal(out, np.where(np.arange(16) % 4 < valid[:, None] // 4, values, 0))


@pytest.mark.parametrize("transposed", [0, 1])
def test_mma(ex: EmulatedExecutor, transposed: int) -> None:
    rng = np.random.default_rng(4)
    a, b = to_bf16(rng.standard_normal((16, 16))), to_bf16(rng.standard_normal((8, 16)))
    out = ex.array((16, 8), np.float32, fill=0xFF)
    run(
        ex,
        "multiply",
        device(ex, a),
        device(ex, np.ascontiguousarray(b.T) if transposed else b),
        out,
        np.int32(transposed),
    )
    want = from_bf16(a).astype(np.float64) @ from_bf16(b).T.astype(np.float64)
    np.testing.assert_allclose(out, want, rtol=1e-6, atol=1e-6)


def test_ldmatrix_transposed(ex: EmulatedExecutor) -> None:
    values = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    out = ex.array((4, 8, 8), np.uint16)
    run(ex, "load_transposed", device(ex, values), out)
    assert np.array_equal(out, values.transpose(0, 2, 1))


@pytest.mark.parametrize(("x", "y"), [(0, 0), (64, 8), (-8, -3), (130, 20), (3, 5), (500, 0)])
def test_tma_swizzles_and_fills_with_zeros(ex: EmulatedExecutor, x: int, y: int) -> None:
    rows, columns, box = 21, 150, 24
    values = np.random.default_rng(5).integers(1, 2**16, (rows, 152)).astype(np.uint16)
    tensor, copy = device(ex, values), ex.array((rows, 152), np.uint16)
    out = ex.array((box, 8, 8), np.uint16, fill=0xEE)
    maps = [
        TensorMap2D(tensor.ctypes.data, rows, columns, 304, box),
        TensorMap2D(copy.ctypes.data, rows, 144, 304, box),
    ]
    run(ex, "box", *maps, out, np.int32(x), np.int32(y), np.int32(box), shared_bytes=box * 128)
    padded = np.zeros((rows + 100, 1000), np.uint16)
    padded[50 : 50 + rows, 200 : 200 + columns] = values[:, :columns]
    want = padded[50 + y : 50 + y + box, 200 + x : 264 + x].reshape(box, 8, 8)
    chunk = np.arange(8)
    for row in range(box):  # PTX ISA: the 16-byte chunk c of row r stands at c ^ (r % 8)
        assert np.array_equal(out[row, chunk ^ (row % 8)], want[row]), row
    inside = np.zeros((rows, 152), bool)
    inside[max(0, y) : y + box, max(0, x) : min(x + 64, 144)] = True
    assert np.array_equal(copy, np.where(inside, values, 0))


def test_ring_of_mbarriers(ex: EmulatedExecutor) -> None:
    values = np.random.default_rng(6).integers(-99, 99, (10, 96)).astype(np.int32)
    out = ex.array(96, np.int32)
    run(ex, "ring", device(ex, values), out, np.int32(10), block=128, shared_bytes=3 * 384)
    assert np.array_equal(out, values.sum(0))


def test_wgmma(ex: EmulatedExecutor) -> None:
    rng = np.random.default_rng(7)
    a, b = to_bf16(rng.standard_normal((50, 200))), to_bf16(rng.standard_normal((30, 200)))
    out = ex.array((64, 32), np.float32, fill=0xFF)
    keep = [device(ex, a), device(ex, b)]
    maps = [
        TensorMap2D(item.ctypes.data, item.shape[0], 200, 400, box) for item, box in zip(keep, (64, 32), strict=True)
    ]
    run(ex, "warpgroup", *maps, out, np.int32(4), block=160, shared_bytes=2 * 12288)
    want = np.zeros((64, 32))
    want[:50, :30] = from_bf16(a).astype(np.float64) @ from_bf16(b).T.astype(np.float64)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)


def test_wgmma_transposed(ex: EmulatedExecutor) -> None:
    rng = np.random.default_rng(9)
    a, b = (device(ex, to_bf16(rng.standard_normal(shape))) for shape in ((64, 32), (32, 64)))
    out = ex.array((64, 64), np.float32, fill=0xFF)
    tensor = TensorMap2D(b.ctypes.data, 32, 64, 128, 32)
    run(ex, "warpgroup_transposed", a, tensor, out, block=128, shared_bytes=32 * 128)
    want = from_bf16(a).astype(np.float64) @ from_bf16(b).astype(np.float64)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)


def test_boxes_are_stored_to_rows_of_whole_16_bytes() -> None:
    ex = EmulatedExecutor(sources=[CASES])
    tensor, out = ex.array((4, 64), np.uint16), ex.array((4, 64), np.uint16)
    maps = [TensorMap2D(tensor.ctypes.data, 4, columns, 128, 4) for columns in (64, 60)]
    with pytest.raises(EmulationError, match="multiple of 16"):  # an H200 writes such a row's last 16 bytes whole
        run(ex, "box", *maps, out, np.int32(0), np.int32(0), np.int32(4), shared_bytes=512)


@pytest.mark.parametrize("cluster", [1, 2, 4])
def test_clusters_share_by_multicast(ex: EmulatedExecutor, cluster: int) -> None:
    values = np.random.default_rng(8).integers(-99, 99, (2, 8, 64)).astype(np.int32)
    out = ex.array((2, 8 // cluster, cluster, cluster * 64), np.int32)
    run(ex, "share", device(ex, values), out, grid=(8, 1, 1), block=64, cluster=cluster)
    shared = values.reshape(2, 8 // cluster, 1, cluster * 64)
    assert np.array_equal(out, np.broadcast_to(shared, out.shape))


def test_portable_path_has_no_hopper_kernels() -> None:
    ex = EmulatedExecutor("portable", sources=[CASES])
    out = ex.array(32, np.int32)
    with pytest.raises(ValueError, match="no kernel 'ring'"):
        run(ex, "ring", out, out, np.int32(1))
    run(ex, "turns", ex.array((1, 64), np.int32), np.int32(1), block=128)


def test_trace_is_stamped() -> None:
    ex = EmulatedExecutor(sources=[CASES])
    ex.trace = np.zeros(3, np.uint64)
    for _ in range(2):
        run(ex, "turns", ex.array((1, 64), np.int32), np.int32(1), block=128)
    assert 0 < ex.trace[0] <= ex.trace[1] and ex.trace[2] == 0


def test_launches_that_do_not_fit_are_refused() -> None:
    ex = EmulatedExecutor(sources=[CASES])
    out = ex.array(64, np.int32)
    for bad, message in [
        ((out,), "2 arguments"),
        ((out, np.int64(1)), "i8.*takes i4"),
        ((np.int32(1), np.int32(1)), "i4.*takes p8"),
        ((out, np.float32(1)), "f4.*takes i4"),
    ]:
        with pytest.raises(ValueError, match=message.replace("2 arguments", "takes 3 arguments")):
            run(ex, "turns", *bad, block=128)
    with pytest.raises(ValueError, match="launch_bounds"):
        run(ex, "identity", out, np.float32(0), np.int64(0), TensorMap2D(out.ctypes.data, 1, 8, 16, 1), block=512)
    with pytest.raises(ValueError, match="multiple of the cluster"):
        run(ex, "share", out, out, grid=(3, 1, 1), cluster=2)


def test_compile_errors_are_the_compilers(tmp_path: Path) -> None:
    (tmp_path / "broken.cu").write_text(
        '#include "common.cuh"\nextern "C" __global__ void k(const Common c) { undeclared(); }\n'
    )
    ex = EmulatedExecutor(sources=[tmp_path])
    with pytest.raises(CompileError, match=r"broken.cu:2:.*undeclared"):
        ex.run(Launch("broken", "k", ONE, ONE, (CommonArgument(0),)))
    with pytest.raises(CompileError, match=r"no absent\.cu"):
        ex.run(Launch("absent", "k", ONE, ONE, (CommonArgument(0),)))


def test_kernel_files_share_their_stacks(tmp_path: Path) -> None:
    """A process may have 65530 mappings (vm.max_map_count); a guard below each of 1024 stacks costs two."""
    kernel = 'extern "C" __global__ void k(const Common c) { ptx::wait_for_previous(); __syncthreads(); }'
    (tmp_path / "small.cu").write_text(f'#include "common.cuh"\n{kernel}\n')
    run(EmulatedExecutor(sources=[CASES]), "turns", np.zeros(64, np.int32), np.int32(1), block=128)
    before = Path("/proc/self/maps").read_text().count("\n")
    EmulatedExecutor(sources=[tmp_path]).run(Launch("small", "k", ONE, (1024, 1, 1), (CommonArgument(0),)))
    assert Path("/proc/self/maps").read_text().count("\n") < before + 100


def ptx_functions(path: Path) -> dict[str, set[int]]:
    """Name -> numbers of parameters. The call site that the emulator passes on is not one."""
    found: dict[str, set[int]] = {}
    pattern = r"^(?:template <[^>]*> )?(?:__device__ __forceinline__|inline) [\w:]+ (?!emulator_)(\w+)\((.*?)\) \{"
    for name, parameters in re.findall(pattern, path.read_text(), re.MULTILINE):
        names = [item for item in parameters.split(",") if item.strip() not in ("", "EMULATOR_SITE")]
        found.setdefault(name, set()).add(len(names))
    return found


def test_emulator_has_the_functions_of_ptx_cuh() -> None:
    real, emulated = ptx_functions(KERNELS / "ptx.cuh"), ptx_functions(CASES.parent / "cuda_ptx.h")
    real["wgmma"] = real["wgmma_transposed"] = {4}  # wgmma.cuh
    assert len(real) > 40
    assert emulated == real


def test_finds_kernels_however_they_are_written() -> None:
    text = """
    extern "C" __global__ void plain(int a) {}
    extern "C" __global__ void __launch_bounds__(N * (W + 1), 2) bounded(int a) {}
    extern "C" __launch_bounds__(64) __global__ void before(int a) {}
    struct S { int x = __builtin_constant_p(1); }; extern "C" __global__ void
        broken_line(const S s, int (*f)(int)) { }
    template <int N> __global__ void not_callable(int a) {}
    extern "C" __global__ void one() {} extern "C" __global__ void two() {}
    """
    found = {kernel.name: kernel.max_threads for kernel in find_kernels(text)}
    assert found == {"plain": "0", "bounded": "N * (W + 1)", "before": "64", "broken_line": "0", "one": "0", "two": "0"}
