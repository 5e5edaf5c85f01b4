"""Test bodies of the kernels of the load (retile, copy_f32, checksum), for the emulator and the GPU alike."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from engine.convert import convert
from kernels import checksum as host_checksum
from kernels import layout, rows
from kernels.layout import RowMap
from tests.kernels.cases_rows import poisoned

if TYPE_CHECKING:
    from tests.kernels.cases_rows import Device

Array = npt.NDArray[Any]


def source_matrix(
    rng: np.random.Generator, dtype: str, rows_: int, columns: int
) -> tuple[Array, npt.NDArray[np.uint16]]:
    """Random bits of that dtype (subnormals, NaN, Inf, and of F32 no finite value beyond bf16), and bf16 bits by the
    CPU loader's conversion, which tests/engine compares with other libraries."""
    if dtype == "F32":
        source = rng.integers(0, 1 << 32, (rows_, columns), dtype=np.uint32)
        too_large = (source & 0x7FFFFFFF >= 0x7F7F8000) & (source & 0x7FFFFFFF < 0x7F800000)
        source[too_large] = 0x3F800001
    else:
        source = rng.integers(0, 1 << 16, (rows_, columns), dtype=np.uint16)
    if dtype == "BF16":
        return source, source
    bits = np.empty((rows_, columns), np.uint16)
    convert(memoryview(source).cast("B"), dtype, memoryview(bits).cast("B"), "BF16")
    return source, bits


def pieces(rng: np.random.Generator, size: int, count: int) -> list[tuple[int, int]]:
    """Random (start, length) that cover 0..size-1 in order."""
    cuts = sorted({0, size, *rng.integers(0, size, count).tolist()})
    return [(a, b - a) for a, b in itertools.pairwise(cuts)]


def check_retile(
    device: Device,
    dtype: str,
    rows_: int,
    columns: int,
    *,
    row0: int = 0,
    num_pieces: int = 1,
    multiple: int = 1,
    seed: int = 0,
) -> None:
    """A matrix in random pieces, at row0 of a larger one; cuts at multiples of `multiple` elements."""
    rng = np.random.default_rng((seed, rows_, columns))
    source, bits = source_matrix(rng, dtype, rows_, columns)
    whole = np.zeros((row0 + rows_ + 3, columns), np.uint16)
    tiled_d, overflows_d = device.put(layout.tile(whole)), device.put(np.zeros(1, np.uint32))
    flat = source.reshape(-1)
    for start, length in pieces(rng, -(-flat.size // multiple), num_pieces):
        start, stop = start * multiple, min(flat.size, (start + length) * multiple)
        staged = device.put(flat[start:stop])
        device.run(
            rows.retile(
                staged.address, dtype, tiled_d.address, overflows_d.address, first_element=start, count=stop - start,
                columns=columns, row0=row0,
            )
        )  # fmt: skip
    whole[row0 : row0 + rows_] = bits
    assert np.array_equal(tiled_d.read(), layout.tile(whole))
    assert overflows_d.read()[0] == 0


def check_retile_gate_up(device: Device, intermediate: int, columns: int, *, seed: int = 0) -> None:
    """gate and up, each in pieces, interleave; untile gives them back."""
    rng = np.random.default_rng((seed, intermediate, columns))
    (gate, gate_bits), (up, up_bits) = (source_matrix(rng, "F16", intermediate, columns) for _ in range(2))
    tiled_d = device.put(np.zeros(layout.tiled_elements(layout.gate_up_rows(intermediate), columns), np.uint16))
    overflows_d = device.put(np.zeros(1, np.uint32))
    for source, row_map in ((up, RowMap.UP), (gate, RowMap.GATE)):
        for start, length in pieces(rng, source.size, 3):
            staged = device.put(source.reshape(-1)[start : start + length])
            device.run(
                rows.retile(
                    staged.address, "F16", tiled_d.address, overflows_d.address, first_element=start, count=length,
                    columns=columns, row_map=row_map,
                )
            )  # fmt: skip
    assert np.array_equal(tiled_d.read(), layout.tile(layout.interleave_gate_up(gate_bits, up_bits)))
    for bits, row_map in ((gate_bits, RowMap.GATE), (up_bits, RowMap.UP)):
        out_d = device.put(poisoned(intermediate, columns))
        device.run(rows.untile(tiled_d.address, out_d.address, rows=intermediate, columns=columns, row_map=row_map))
        assert np.array_equal(out_d.read(), bits)


def check_retile_counts_overflows(device: Device) -> None:
    """The largest float32 that rounds to a finite bf16 is not counted, the next is; NaN and Inf are not."""
    values = np.array(
        [0x7F7F7FFF, 0x7F7F8000, 0xFF7F8000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x3F800000], np.uint32
    )
    source_d, tiled_d = device.put(values), device.put(np.zeros(16 * 64, np.uint16))
    overflows_d = device.put(np.array([5], np.uint32))
    device.run(
        rows.retile(source_d.address, "F32", tiled_d.address, overflows_d.address, first_element=0, count=8, columns=8)
    )
    assert overflows_d.read()[0] == 5 + 3
    assert layout.untile(tiled_d.read(), 1, 8)[0].tolist() == [
        0x7F7F,
        0x7F80,
        0xFF80,
        0x7F80,
        0x7F80,
        0xFF80,
        0x7FC0,
        0x3F80,
    ]


def check_copy_f32(device: Device, dtype: str, count: int, *, seed: int = 0) -> None:
    rng = np.random.default_rng((seed, count))
    source, _ = source_matrix(rng, dtype, 1, count)
    wanted = np.empty(count, np.uint32)
    if dtype == "F32":
        wanted[:] = source[0]
    else:
        convert(memoryview(source).cast("B"), dtype, memoryview(wanted).cast("B"), "F32")
    source_d, out_d = device.put(source), device.put(np.full(count, 0x7FC12345, np.uint32))
    device.run(rows.copy_f32(source_d.address, dtype, out_d.address, count=count))
    assert np.array_equal(out_d.read(), wanted)


def device_checksum(device: Device, memory: Array) -> str:
    """By the kernel, in two launches where there is more than one block."""
    memory_d, nbytes = device.put(memory), memory.nbytes
    blocks = host_checksum.num_blocks(nbytes)
    sums = []
    for first, count in ((0, 1), (1, blocks - 1)):
        if count:
            out_d = device.put(np.full(count * host_checksum.PARTS, 0xDEAD, np.uint64))
            device.run(rows.checksum(memory_d.address, nbytes, out_d.address, first_block=first, blocks=count))
            sums.append(out_d.read())
    return host_checksum.combine(np.concatenate(sums), nbytes)


def check_checksum(device: Device, nbytes: int, *, flips: int = 2, seed: int = 0) -> None:
    """Kernel = numpy, and a flipped bit anywhere changes it."""
    rng = np.random.default_rng((seed, nbytes))
    memory = rng.integers(0, 256, nbytes, np.uint8)
    clean = device_checksum(device, memory)
    assert clean == host_checksum.checksum(memoryview(memory))
    for bit in (0, nbytes * 8 - 1, *rng.integers(0, nbytes * 8, flips).tolist()):
        memory[bit // 8] ^= 1 << bit % 8
        assert device_checksum(device, memory) != clean
        memory[bit // 8] ^= 1 << bit % 8
    assert device_checksum(device, memory) == clean
