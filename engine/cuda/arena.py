"""The weights where they lie in device memory: their checksum, and one flipped bit for tests and drills."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kernels import checksum as checksums
from kernels import rows as row_kernels

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.cuda.prepared import PreparedLaunches
    from engine.cuda.step_device import StepDevice
    from engine.jobs import Job

CHECKSUM_BLOCKS = 64
"""16 MiB blocks of the arena that one piece of a checksum job reads (1 GiB: a quarter of a millisecond)."""


class WeightArena:
    """`nbytes` at device address `start`; `scratch`: of the checksum. `weights`: name -> device address; `checksum`: as
    it was at load (kernels/checksum.py)."""

    def __init__(
        self,
        device: StepDevice,
        prepared: PreparedLaunches,
        *,
        start: int,
        nbytes: int,
        scratch: int,
        weights: Mapping[str, int],
        checksum: str,
    ) -> None:
        self._device, self._prepared = device, prepared
        self._start, self.nbytes, self._scratch = start, nbytes, scratch
        self._weights, self.checksum = weights, checksum

    def check(self) -> Job:
        """In pieces of CHECKSUM_BLOCKS blocks, between steps."""
        total = checksums.num_blocks(self.nbytes)
        for first in range(0, total, CHECKSUM_BLOCKS):
            count = min(CHECKSUM_BLOCKS, total - first)
            out = self._scratch + first * checksums.PARTS * 8  # uint64; a launch numbers its sums from 0
            launch = row_kernels.checksum(self._start, self.nbytes, out, first_block=first, blocks=count)
            self._device.run(self._prepared.untimed([launch]))
            yield
        parts = np.zeros(total * checksums.PARTS, np.uint64)
        self._device.download(parts, self._scratch)
        self._device.synchronize()
        actual = checksums.combine(parts, self.nbytes)
        return {"expected": self.checksum, "actual": actual, "ok": actual == self.checksum}

    def tensor_offsets(self) -> dict[str, int]:
        return {name: address - self._start for name, address in self._weights.items()}

    def flip_bit(self, offset: int, bit: int) -> tuple[int, int]:
        """Two copies of one byte, in the order of the stream: what was launched before sees the old one."""
        if not 0 <= offset < self.nbytes:  # beside the arena lies the KV pool of somebody's request
            raise ValueError(f"byte {offset} is outside of the arena")
        byte = np.zeros(1, np.uint8)
        self._device.download(byte, self._start + offset)
        self._device.synchronize()
        before = int(byte[0])
        byte[0] = after = before ^ 1 << bit
        self._device.upload(self._start + offset, byte)
        self._device.synchronize()
        return before, after
