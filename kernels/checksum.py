"""The checksum of device memory: what kernels/checksum.cu computes, restated in numpy, and its combination on the host.

Two levels, as for host memory (engine/loader.py:arena_checksum): 64 bits for every 16 MiB from the device, SHA-256 over
them (with the length) on the host. What it finds for certain and what with high probability: head of checksum.cu.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

BLOCK_BYTES = 16 << 20
PARTS = 32
"""Sums the kernel leaves per block; they are added mod 2^64."""

ROWS = 128
COLUMNS = BLOCK_BYTES // 4 // ROWS
MULTIPLIER = np.uint64(0x9E3779B5)
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def num_blocks(nbytes: int) -> int:
    return -(-nbytes // BLOCK_BYTES)


def combine(parts: U64, nbytes: int) -> str:
    """SHA-256 (hex) of the length and the block values, from the kernel's (num_blocks * PARTS,) sums."""
    if parts.shape != (num_blocks(nbytes) * PARTS,):
        raise ValueError(f"{nbytes} bytes have {num_blocks(nbytes) * PARTS} sums; got {parts.shape}")
    return combine_blocks(parts.reshape(-1, PARTS).sum(axis=1, dtype=np.uint64), nbytes)


def combine_blocks(blocks: U64, nbytes: int) -> str:
    return hashlib.sha256(nbytes.to_bytes(8, "little") + blocks.astype("<u8").tobytes()).hexdigest()


def block_parts(block: memoryview) -> U64:
    """(PARTS,) sums of one block of at most BLOCK_BYTES, as the kernel gives them; a short one is filled with zeros."""
    words = np.zeros(ROWS * COLUMNS, np.uint32)
    words[: len(block) // 4] = np.frombuffer(block, np.uint32)
    h = np.zeros(COLUMNS, np.uint64)
    for row in words.reshape(ROWS, COLUMNS):
        h *= MULTIPLIER
        h += row
    h += np.arange(1, COLUMNS + 1, dtype=np.uint64) * GOLDEN
    sums: U64 = _mix(h).reshape(PARTS, -1).sum(axis=1, dtype=np.uint64)
    return sums


def checksum(memory: memoryview) -> str:
    """The same string as kernel and `combine` give for this memory (a multiple of 16 bytes). About 1 s a GB."""
    if memory.nbytes % 16:
        raise ValueError(f"memory of {memory.nbytes} bytes; the checksum is of a multiple of 16")
    memory = memory.cast("B")
    starts = range(0, memory.nbytes, BLOCK_BYTES)
    parts = [block_parts(memory[start : start + BLOCK_BYTES]) for start in starts]
    return combine(np.concatenate([np.zeros(0, np.uint64), *parts]), memory.nbytes)


def _mix(z: U64) -> U64:
    """The finalizer of SplitMix64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
