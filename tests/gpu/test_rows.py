"""The row kernels on the GPU: the bodies of test_emulated_rows.py over the shapes that models have."""

from __future__ import annotations

import numpy as np
import pytest

from engine.cuda.memory import copy_to_host
from kernels import layout, rows
from kernels.layout import PAGE_TOKENS
from tests.gpu.device import GpuDevice
from tests.kernels import cases_load as load_cases
from tests.kernels import cases_rows as cases
from tests.kernels import cases_step_prepare as step_cases

ROWS = range(1, 68)


@pytest.mark.parametrize("hidden", [1, 7, 60, 296, 300, 576, 1000, 2048, 3584, 4096, 5120, 8192, 8200, 20000, 32768])
def test_rmsnorm(device: GpuDevice, hidden: int) -> None:
    for num_rows in ROWS if hidden in (576, 4096) else (1, 3, 67):
        cases.check_rmsnorm(device, num_rows, hidden)


def test_rmsnorm_prefill(device: GpuDevice) -> None:
    cases.check_rmsnorm(device, 5000, 576)


@pytest.mark.parametrize("num_rows,threads", [(5, 160), (5, 352), (5, 1024), (65, 96), (65, 128), (65, 1024)])
def test_rmsnorm_bits_do_not_depend_on_the_block(device: GpuDevice, num_rows: int, threads: int) -> None:
    cases.check_rmsnorm(device, num_rows, 576, threads=threads)


def test_rmsnorm_gathers_rows(device: GpuDevice) -> None:
    cases.check_rmsnorm(device, 67, 4096, gather=True)


def test_rmsnorm_keeps_nan_in_its_row(device: GpuDevice) -> None:
    cases.check_rmsnorm_keeps_nan_in_its_row(device)


def test_embed(device: GpuDevice) -> None:
    for num_rows in ROWS:
        cases.check_embed(device, num_rows, 576, vocab=4000)
    cases.check_embed(device, 40, 30, vocab=83)
    cases.check_embed(device, 5, 4096, vocab=128256)


@pytest.mark.parametrize("head_dim", [4, 16, 64, 80, 96, 112, 128, 160, 256])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("sharp", [False, True])
def test_qkv_post(device: GpuDevice, head_dim: int, family: str, sharp: bool) -> None:
    for num_rows in (1, 5, 67):
        bias, norm = family == "qwen2", family == "qwen3"
        for many in (False, True):
            case = cases.QkvCase(num_rows, 8, 2, head_dim, bias=bias, norm=norm, sharp=sharp, many=many)
            cases.check_qkv_post(device, case)


def test_qkv_post_rows(device: GpuDevice) -> None:
    for num_rows in ROWS:
        cases.check_qkv_post(device, cases.QkvCase(num_rows, 32, 8, 128, sharp=num_rows % 2 == 0))
    cases.check_qkv_post(device, cases.QkvCase(700, 9, 3, 64))


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("warps", range(1, 9))
def test_qkv_post_bits_do_not_depend_on_the_block(device: GpuDevice, warps: int, many: bool) -> None:
    cases.check_qkv_post(device, cases.QkvCase(9, 5, 1, 128, bias=True, norm=True, warps=warps, many=many))


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("head_dim", [16, 80])
@pytest.mark.parametrize("max_position", [1000, 1 << 20])
def test_qkv_post_reports(device: GpuDevice, max_position: int, head_dim: int, many: bool) -> None:
    cases.check_qkv_post_reports(device, max_position, head_dim, many=many)


def test_qkv_post_padding_row(device: GpuDevice) -> None:
    cases.check_qkv_post_padding_row(device)


def test_qkv_post_in_a_pool_over_4_gib(device: GpuDevice) -> None:
    """Keys and values land where 64-bit arithmetic puts them, beyond 2^32 bytes and 2^31 elements."""
    case = cases.QkvCase(12, 4, 8, 128)
    page_bytes = 2 * layout.page_elements(8, 128)
    case.num_pages = (4608 << 20) // page_bytes
    case.tables[case.slots, case.positions // PAGE_TOKENS] = case.num_pages - 1 - np.arange(12)
    cuda, stream = device.context.cuda, device.context.compute
    k, v = (cuda.mem_alloc((case.num_pages + 1) * page_bytes) for _ in "kv")
    try:
        q = device.put(cases.poisoned(12, 4, 128))
        held = [device.put(a) for a in (case.qkv, case.cos, case.sin, case.positions, case.slots, case.tables)]
        device.run(
            rows.qkv_post(
                *(buffer.address for buffer in held), q.address, int(k), int(v), num_rows=12, num_heads=4,
                num_kv_heads=8, head_dim=128, table_width=case.table_width, num_pages=case.num_pages, max_slots=12,
                max_position=case.max_position, layer=0,
            )
        )  # fmt: skip
        assert device.take_errors() == []
        page, _, token = case.place()
        for pool, wanted in zip((k, v), case.bits()[1:]):
            for row in range(12):
                for head in range(8):
                    indices = layout.kv_offset(page[row], head, token[row], np.arange(128), 8, 128)
                    got = np.empty(np.ptp(indices) + 1, np.uint16)
                    copy_to_host(device.context, got, int(pool) + 2 * int(indices.min()), stream)
                    stream.synchronize()
                    assert np.array_equal(got[indices - indices.min()], wanted[row, head])
    finally:
        k.free()
        v.free()


@pytest.mark.parametrize("window", [0, 1, 100, 128, 300, 4096])
def test_step_prepare(device: GpuDevice, window: int) -> None:
    step_cases.check_random_steps(device, steps=30, max_slots=64, longest_item=300, window=window)


def test_step_prepare_many_rows(device: GpuDevice) -> None:
    step_cases.check_random_steps(device, steps=3, max_slots=180, longest_item=3)
    step_cases.check_random_steps(device, steps=3, max_slots=2, longest_item=1100)
    step_cases.check_many_decode_rows(device, decode_rows=3000)


def test_step_prepare_bad_records(device: GpuDevice) -> None:
    step_cases.check_bad_records(device)
    step_cases.check_bad_item(device)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("size", [(1, 1), (33, 72), (17, 61), (3, 999), (576, 1536), (100, 4096)])
def test_retile(device: GpuDevice, dtype: str, size: tuple[int, int]) -> None:
    load_cases.check_retile(device, dtype, *size)
    load_cases.check_retile(device, dtype, *size, row0=21, num_pieces=5)
    load_cases.check_retile(device, dtype, *size, num_pieces=4, multiple=8)


@pytest.mark.parametrize("size", [(13, 40), (24, 61), (1536, 576)])
def test_retile_gate_up(device: GpuDevice, size: tuple[int, int]) -> None:
    load_cases.check_retile_gate_up(device, *size)


def test_retile_counts_overflows(device: GpuDevice) -> None:
    load_cases.check_retile_counts_overflows(device)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_copy_f32(device: GpuDevice, dtype: str) -> None:
    for count in (1, 576, 1_000_001):
        load_cases.check_copy_f32(device, dtype, count)


@pytest.mark.parametrize("nbytes", [16, 4096, (16 << 20) - 65536, (17 << 20) + 48, 100 << 20])
def test_checksum(device: GpuDevice, nbytes: int) -> None:
    load_cases.check_checksum(device, nbytes)
