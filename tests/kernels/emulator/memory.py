"""Device memory of the emulator: arrays that end where an unreadable page begins."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

PAGE = mmap.PAGESIZE


class Region(mmap.mmap):
    """The memory of one array: an unreadable page, the array, an unreadable page. Lives as long as the array does."""

    start: int  # of the readable pages
    nbytes: int

    def holds(self, address: int) -> bool:
        return self.start <= address < self.start + self.nbytes


_regions: weakref.WeakSet[Region] = weakref.WeakSet()


def regions() -> list[Region]:
    """The memory of all arrays alive."""
    return list(_regions)


def guarded_array(shape: int | tuple[int, ...], dtype: npt.DTypeLike, fill: int | None = None) -> npt.NDArray[Any]:
    """An array that ends (to 16 bytes) where an unreadable page begins: reading or writing past it is an error. Filled
    with bytes of value `fill`, else with zeros."""
    kind = np.dtype(dtype)
    count = int(np.prod(shape))
    used = max(16, -(-count * kind.itemsize // 16) * 16)
    pages = -(-used // PAGE)
    region = Region(-1, (pages + 2) * PAGE)
    region.start = ctypes.addressof(ctypes.c_char.from_buffer(region)) + PAGE
    region.nbytes = pages * PAGE
    libc = ctypes.CDLL(None, use_errno=True)
    for address in (region.start - PAGE, region.start + region.nbytes):
        if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    _regions.add(region)
    array = np.frombuffer(region, dtype=kind, count=count, offset=(pages + 1) * PAGE - used).reshape(shape)
    if fill is not None:
        array.view(np.uint8)[...] = fill
    return array
