"""The emulator catches what goes wrong on a device only sometimes, or without a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels.launch import Argument, CommonArgument, Launch, address
from tests.kernels.emulator import EmulatedExecutor, EmulationError

CASES = Path(__file__).parent / "emulator" / "cases"


def run(ex: EmulatedExecutor, kernel: str, *arguments: Any, grid: int = 1, block: int = 32, **more: Any) -> None:
    packed: list[Argument] = [CommonArgument(op=3, layer=2)]
    packed += [address(item.ctypes.data) if isinstance(item, np.ndarray) else item for item in arguments]
    ex.run(Launch("mistakes", kernel, (grid, 1, 1), (block, 1, 1), tuple(packed), **more))


def executor(seed: int = 0, **more: Any) -> EmulatedExecutor:
    return EmulatedExecutor(seed=seed, sources=[CASES], **more)


def outputs(kernel: str, size: int, dtype: Any = np.int32, **more: Any) -> list[bytes]:
    results = []
    for seed in range(4):
        ex = executor(seed)
        out = ex.array(size, dtype)
        run(ex, kernel, out, **more)
        results.append(out.tobytes())
    return results


@pytest.mark.parametrize(
    ("kernel", "size", "block"),
    [("no_syncthreads", 64, 64), ("no_syncwarp", 32, 32), ("no_second_syncthreads", 128, 64)],
)
def test_missing_barriers_show(kernel: str, size: int, block: int) -> None:
    results = outputs(kernel, size, block=block)
    thread = np.arange(block) ^ (1 if kernel == "no_syncwarp" else 33)
    right = np.concatenate([thread + 64 * i for i in range(size // block)]).astype(np.int32).tobytes()
    assert len(set(results)) > 1
    assert sum(result != right for result in results) >= 3


def test_order_of_blocks_shows() -> None:
    assert len(set(outputs("block_order", 1, np.float32, grid=5, block=1))) > 1


def test_shared_memory_starts_as_poison() -> None:
    assert all(
        np.isnan(np.frombuffer(result, np.float32)).all()
        for result in outputs("no_initialisation", 64, np.float32, block=64)
    )


@pytest.mark.parametrize("wait", [0, 1, 2])
def test_missing_cp_async_wait_shows(wait: int) -> None:
    ex = executor()
    values, out = ex.array(128, np.int32), ex.array(128, np.int32)
    values[:] = np.arange(128)
    run(ex, "no_async_wait", values, out, np.int32(wait))
    assert np.array_equal(out, values if wait == 2 else np.full(128, -1))
    run(executor(delivery="early"), "no_async_wait", values, out, np.int32(wait))
    assert np.array_equal(out, values)


BARRIERS = (
    r"deadlock in block \(0, 0, 0\).*threads 0-31 wait at named_barrier, barrier 3, 32 of 64 threads there"
    r" \(mistakes\.cu:\d+\)\s+threads 32-63 wait at __syncthreads"
)
SHUFFLE = (
    "deadlock.*threads 0-7 wait at a shuffle, mask ffffffff, lanes there 000000ff"
    ".*threads 8-31 wait at __syncwarp, mask ffffffff, lanes there ffffff00"
)
RETURNED = r"returns while lanes \w+ of its warp wait for it at a shuffle|names lanes that have returned: 80000000"


@pytest.mark.parametrize(
    ("kernel", "block", "message"),
    [
        ("half_at_barrier", 64, BARRIERS),
        ("divergent_shuffle", 32, SHUFFLE),
        ("returned_lane", 32, RETURNED),
        ("wrong_mask", 32, "does not name the calling lane"),
        ("two_counts", 96, "barrier 1 among (64|96) threads, while others wait at it among (64|96)"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_wrong_meetings_are_errors(kernel: str, block: int, message: str, seed: int) -> None:
    ex = executor(seed)
    arguments = [] if kernel in ("half_at_barrier", "two_counts") else [ex.array(block, np.int32)]
    with pytest.raises(EmulationError, match="(?s)" + message):
        run(ex, kernel, *arguments, block=block)


@pytest.mark.parametrize(
    ("at", "message"),
    [
        (99, None),
        (100, "byte 100 of 100"),
        (1023, "byte 1023 of 100"),
        (1024, "access past the end of dynamic shared memory: byte 1024"),
    ],
)
def test_overrun_of_dynamic_shared_memory(at: int, message: str | None) -> None:
    if message is None:
        return run(executor(), "shared_overrun", np.int32(at), block=1, shared_bytes=100)
    with pytest.raises(EmulationError, match=message):
        run(executor(), "shared_overrun", np.int32(at), block=1, shared_bytes=100)


@pytest.mark.parametrize("at", [-5, 100, 2000])
def test_access_outside_global_memory(at: int) -> None:
    ex = executor()
    small, large = ex.array(100, np.int32), ex.array(4000, np.int32)
    for pair in ((small, large[2000:]), (large[2000:], small)):
        with pytest.raises(EmulationError, match=r"thread \(5, 0, 0\): illegal memory access at 0x"):
            run(ex, "global_access", *pair, np.int64(at if at > 0 else -3000))
    run(ex, "global_access", small, large, np.int64(99))  # the process and the executor go on


def test_misaligned_access() -> None:
    ex = executor()
    values = ex.array(8, np.float32)
    with pytest.raises(EmulationError, match="misaligned"):
        run(ex, "misaligned", values[1:], ex.array(1, np.float32), block=1)
    run(ex, "misaligned", values[4:], ex.array(1, np.float32), block=1)
    with pytest.raises(EmulationError, match="not aligned to 16 bytes"):
        run(ex, "misaligned_copy", values[1:], block=1, shared_bytes=16)


def test_overrun_of_a_static_array() -> None:
    ex = executor()
    with pytest.raises(EmulationError, match=r"index 32 .*mistakes\.cu"):
        run(ex, "array_overrun", ex.array(1, np.int32), np.int32(32))


def test_stack_overflow() -> None:
    ex = executor()
    with pytest.raises(EmulationError, match="stack overflow"):
        run(ex, "deep", ex.array(1, np.int32))


def test_endless_spin_is_reported() -> None:
    ex = executor()
    with pytest.raises(EmulationError, match="spins"):
        run(ex, "spin", ex.array(1, np.int32), block=1)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (0, None),
        (1, "mbarrier at shared address .* is not initialised"),
        (2, "deadlock.*threads 0-31 wait at mbarrier at .*, parity 0; .* lacks 0 of 1 arrivals and 128 bytes"),
        (3, "more arrivals|lacks"),
        (6, "ended with 1 bulk copies in flight"),
    ],
)  # fmt: skip
def test_mbarrier_mistakes(mistake: int, message: str | None) -> None:
    ex = executor()
    values, out = ex.array(32, np.int32), ex.array(32, np.int32)
    values[:] = np.arange(32)
    if message is None:
        run(ex, "barrier_mistakes", values, out, np.int32(mistake))
        assert np.array_equal(out, values)
    else:
        with pytest.raises(EmulationError, match="(?s)" + message):
            run(ex, "barrier_mistakes", values, out, np.int32(mistake))


@pytest.mark.parametrize("mistake", [4, 5])
def test_missing_mbarrier_wait_shows(mistake: int) -> None:
    ex = executor()
    values, out = ex.array(32, np.int32), ex.array(32, np.int32)
    run(ex, "barrier_mistakes", values, out, np.int32(mistake))
    assert np.array_equal(out, np.full(32, -1))


@pytest.mark.parametrize(
    ("mistake", "message"),
    [(0, None), (1, None), (2, "returns while wgmma are in flight"), (3, "wgmma"), (4, "without wgmma_fence")],
)
def test_wgmma_mistakes(mistake: int, message: str | None) -> None:
    ex = executor()
    out = ex.array(128, np.float32)
    if message is not None:
        with pytest.raises(EmulationError, match=message):
            run(ex, "wgmma_mistakes", out, np.int32(mistake), block=128, shared_bytes=12288)
        return
    run(ex, "wgmma_mistakes", out, np.int32(mistake), block=128, shared_bytes=12288)
    if mistake == 0:
        assert np.array_equal(out, np.full(128, 16.0))
    else:
        assert np.isnan(out).any()  # at least the first to come reads its accumulator too early


def test_block_of_a_cluster_that_ends_too_early() -> None:
    seen = []
    for seed in range(6):  # it depends on who is last at the barrier before
        try:
            run(executor(seed), "early_end", grid=2, cluster=2)
        except EmulationError as error:
            seen.append(str(error))
    assert seen and all("that block has ended" in text for text in seen)


def test_division_by_zero() -> None:
    ex = executor()
    with pytest.raises(EmulationError, match="division by zero"):
        run(ex, "divide", ex.array(1, np.int32), np.int32(0))


def chain(ex: EmulatedExecutor, kernel: str, mode: int, dependent: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """`produce` fills one array, `kernel` reads it and a constant one and writes a third."""
    constant, middle, out = (ex.array(4096, np.int32) for _ in range(3))
    constant[:] = 5
    run(ex, "produce", middle, grid=64, block=64)
    arguments = [CommonArgument(op=3), *(address(item.ctypes.data) for item in (constant, middle, out)), np.int32(mode)]
    ex.run(Launch("mistakes", kernel, (64, 1, 1), (64, 1, 1), tuple(arguments), dependent=dependent))
    return out, np.arange(4096) + 5


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("mode", "message"),
    [
        (0, None),  # waits first, but for the constant
        (1, "before ptx::wait_for_previous: reads or writes 0x.* that an earlier launch writes"),
        (2, "before ptx::wait_for_previous: writes 0x.* an earlier launch may still read"),
        (3, "reads or writes 0x.* that an earlier launch writes"),  # a cp.async issued too early
        (4, "no thread calls ptx::wait_for_previous|before ptx::wait_for_previous"),
    ],
)
def test_dependent_launches(mode: int, message: str | None, seed: int) -> None:
    ex = executor(seed)
    if message is not None:
        with pytest.raises(EmulationError, match=message):
            chain(ex, "consume", mode)
    else:
        got, want = chain(ex, "consume", mode)
        assert np.array_equal(got, want)
    got, want = chain(executor(seed), "consume", mode, dependent=False)
    assert np.array_equal(got, want)
    got, want = chain(EmulatedExecutor("portable", seed, sources=[CASES]), "consume", mode)
    assert np.array_equal(got, want)


def test_synchronize_ends_earlier_launches() -> None:
    ex = executor()
    weights, middle, out = (ex.array(4096, np.int32) for _ in range(3))
    run(ex, "produce", weights, grid=64, block=64)
    with pytest.raises(EmulationError, match="an earlier launch writes"):
        run(ex, "consume", weights, middle, out, np.int32(0), grid=64, block=64)
    ex.synchronize()
    run(ex, "consume", weights, middle, out, np.int32(0), grid=64, block=64)
    assert np.array_equal(out, np.arange(4096))
