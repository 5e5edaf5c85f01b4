"""The row kernels on the emulator: the bodies of tests/gpu/test_rows.py, small shapes, threads in several orders."""

from __future__ import annotations

import numpy as np
import pytest

from kernels import checksum, layout
from tests.kernels import cases_load as load_cases
from tests.kernels import cases_rows as cases
from tests.kernels import cases_step_prepare as step_cases
from tests.kernels.emulated_device import EmulatedDevice


@pytest.fixture(params=[("hopper", 0), ("portable", 1)], ids=["hopper-forward", "portable-reverse"])
def device(request: pytest.FixtureRequest) -> EmulatedDevice:
    return EmulatedDevice(*request.param)


@pytest.mark.parametrize("hidden", [1, 7, 60, 296, 576, 1000, 4096, 8192, 8200, 20000])
def test_rmsnorm(device: EmulatedDevice, hidden: int) -> None:
    cases.check_rmsnorm(device, 3, hidden)
    if hidden <= 576:
        cases.check_rmsnorm(device, 65, hidden)


@pytest.mark.parametrize("num_rows,threads", [(5, 160), (5, 352), (5, 1024), (65, 96), (65, 128), (65, 1024)])
def test_rmsnorm_bits_do_not_depend_on_the_block(device: EmulatedDevice, num_rows: int, threads: int) -> None:
    cases.check_rmsnorm(device, num_rows, 576, threads=threads)


def test_rmsnorm_gathers_rows(device: EmulatedDevice) -> None:
    cases.check_rmsnorm(device, 7, 96, gather=True)


def test_rmsnorm_keeps_nan_in_its_row(device: EmulatedDevice) -> None:
    cases.check_rmsnorm_keeps_nan_in_its_row(device)


@pytest.mark.parametrize("num_rows,hidden", [(1, 64), (3, 30), (4, 576), (2, 4100), (67, 36)])
def test_embed(device: EmulatedDevice, num_rows: int, hidden: int) -> None:
    cases.check_embed(device, num_rows, hidden, vocab=83)


@pytest.mark.parametrize("head_dim", [4, 16, 64, 80, 96, 112, 128, 160, 256])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_qkv_post(device: EmulatedDevice, head_dim: int, family: str) -> None:
    bias, norm = family == "qwen2", family == "qwen3"
    cases.check_qkv_post(device, cases.QkvCase(5, 4, 2, head_dim, bias=bias, norm=norm))
    cases.check_qkv_post(device, cases.QkvCase(5, 4, 2, head_dim, bias=bias, norm=norm, sharp=True, many=True))


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("warps", [1, 3, 8])
def test_qkv_post_bits_do_not_depend_on_the_block(device: EmulatedDevice, warps: int, many: bool) -> None:
    cases.check_qkv_post(device, cases.QkvCase(3, 5, 1, 128, bias=True, norm=True, warps=warps, many=many))


@pytest.mark.parametrize("num_rows", [1, 67])
def test_qkv_post_rows(device: EmulatedDevice, num_rows: int) -> None:
    cases.check_qkv_post(device, cases.QkvCase(num_rows, 3, 3, 64))


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("head_dim", [16, 80])
@pytest.mark.parametrize("max_position", [1000, 1 << 20])
def test_qkv_post_reports(device: EmulatedDevice, max_position: int, head_dim: int, many: bool) -> None:
    cases.check_qkv_post_reports(device, max_position, head_dim, many=many)


def test_qkv_post_padding_row(device: EmulatedDevice) -> None:
    cases.check_qkv_post_padding_row(device)


@pytest.mark.parametrize("head_dim", [1, 6, 100, 130, 136, 257, 512])
def test_head_dims_no_kernel_takes_are_refused(head_dim: int) -> None:
    with pytest.raises(ValueError, match="head_dim"):
        layout.padded_head_dim(head_dim)


@pytest.mark.parametrize("window", [0, 1, 100, 128, 300])
def test_step_prepare(device: EmulatedDevice, window: int) -> None:
    step_cases.check_random_steps(device, steps=15, max_slots=5, longest_item=20, window=window)


def test_step_prepare_many_rows(device: EmulatedDevice) -> None:
    """More rows than threads: the prefix sum carries over, and warps take several items."""
    step_cases.check_random_steps(device, steps=2, max_slots=180, longest_item=3)
    step_cases.check_many_decode_rows(device, decode_rows=1100)


def test_step_prepare_bad_records(device: EmulatedDevice) -> None:
    step_cases.check_bad_records(device)
    step_cases.check_bad_item(device)


def test_step_prepare_clears_slot_errors(device: EmulatedDevice) -> None:
    """The next step begins with no slot in error."""
    machine = step_cases.Machine(device)
    step = step_cases.Step([(3, 0, step_cases.VOCAB)], [], [], [], 1, 1, 0, [], [])
    for slot in (3, 2):
        step.decode[0] = (slot, 0, step_cases.VOCAB)
        machine.run(step, [0] * 6)
        assert np.flatnonzero(device.executor.slot_errors).tolist() == [slot]


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("rows,columns", [(1, 1), (16, 64), (33, 72), (40, 136), (5, 200), (17, 61), (3, 999)])
def test_retile(device: EmulatedDevice, dtype: str, rows: int, columns: int) -> None:
    load_cases.check_retile(device, dtype, rows, columns)
    load_cases.check_retile(device, dtype, rows, columns, row0=21, num_pieces=5)
    load_cases.check_retile(device, dtype, rows, columns, num_pieces=4, multiple=8)


@pytest.mark.parametrize("intermediate,columns", [(8, 64), (13, 40), (24, 61)])
def test_retile_gate_up(device: EmulatedDevice, intermediate: int, columns: int) -> None:
    load_cases.check_retile_gate_up(device, intermediate, columns)


def test_retile_counts_overflows(device: EmulatedDevice) -> None:
    load_cases.check_retile_counts_overflows(device)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("count", [1, 576, 1001])
def test_copy_f32(device: EmulatedDevice, dtype: str, count: int) -> None:
    load_cases.check_copy_f32(device, dtype, count)


@pytest.mark.parametrize("nbytes", [16, 4096, (16 << 20) - 65536, (17 << 20) + 48])
def test_checksum(nbytes: int) -> None:
    load_cases.check_checksum(EmulatedDevice("hopper", 2), nbytes, flips=0)


def test_checksum_finds_changes_of_any_word() -> None:
    """The guarantees at the head of checksum.cu, on the numpy restatement: one word changed in any way, and two words
    of one column exchanged, whatever the difference of their values."""
    rng = np.random.default_rng(0)
    block = np.zeros(checksum.BLOCK_BYTES // 4, np.uint32)
    clean = checksum.block_parts(memoryview(block).cast("B"))
    for _ in range(20):
        at, column = int(rng.integers(0, block.size)), int(rng.integers(0, checksum.COLUMNS))
        block[at] = np.uint32(1 << int(rng.integers(0, 32)))
        assert not np.array_equal(checksum.block_parts(memoryview(block).cast("B")), clean)
        block[at] = 0
        first, second = rng.choice(checksum.ROWS, 2, replace=False) * checksum.COLUMNS + column
        results = set()
        for place in (first, second):
            block[place] = 1 << 31
            results.add(int(checksum.block_parts(memoryview(block).cast("B")).sum(dtype=np.uint64)))
            block[place] = 0
        assert len(results) == 2


def test_checksum_depends_on_the_length() -> None:
    """Zeros at the end are not what fills a short block up."""
    assert checksum.checksum(memoryview(bytes(32))) != checksum.checksum(memoryview(bytes(48)))


def test_tile_places_of_common_cuh() -> None:
    """layout.tile against the sentence in common.cuh, element by element: 16 x 64 tiles in row order, in a tile two
    atoms of 8 rows x 128 bytes, the 16-byte chunk c of row r at chunk c ^ r."""
    rng = np.random.default_rng(1)
    matrix = rng.integers(1, 1 << 16, (35, 150), dtype=np.uint16)
    tiled = layout.tile(matrix).reshape(3, 3, 2, 8, 8, 8)  # tile row, tile column, atom, row, chunk, element
    for n in range(48):
        for k in range(192):
            got = tiled[n // 16, k // 64, n % 16 // 8, n % 8, k % 64 // 8 ^ n % 8, k % 8]
            assert got == (matrix[n, k] if n < 35 and k < 150 else 0)
    assert np.array_equal(layout.untile(tiled.reshape(-1), 35, 150), matrix)


def test_arena_slots_do_not_overlap() -> None:
    """SmolLM2's shapes: every parameter on its own tiles; gate_up of 2 x 100 rows takes 13 groups of 16."""
    shapes = [("embed", (49152, 576)), ("layers.0.attn_norm", (576,)), ("layers.0.gate_up", (200, 576)), ("x", (1, 1))]
    slots, nbytes = layout.arena_slots(shapes)
    ends = 0
    for slot in slots.values():
        assert slot.offset >= ends and slot.offset % 2048 == 0
        ends = slot.offset + slot.nbytes
    assert nbytes >= ends
    assert slots["embed"].nbytes == 49152 * 576 * 2
    assert (slots["layers.0.gate_up"].rows, slots["layers.0.gate_up"].nbytes) == (208, 208 * 576 * 2)
    assert not slots["layers.0.attn_norm"].is_matrix and slots["x"].nbytes == 2048
