"""The emulator as the `Device` of tests/kernels/cases_*.py: the same test bodies run here and on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.launch import Launch
from tests.kernels.emulator import EmulatedExecutor, guarded_array


class EmulatedBuffer:
    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = guarded_array(array.shape, array.dtype)
        self._array[...] = array
        self.address = self._array.ctypes.data

    def read(self) -> npt.NDArray[Any]:
        return self._array.copy()


class EmulatedDevice:
    """tests/kernels/cases_rows.py:Device."""

    def __init__(self, path: str, seed: int) -> None:
        self.executor = EmulatedExecutor(path, seed)

    def put(self, array: npt.NDArray[Any]) -> EmulatedBuffer:
        return EmulatedBuffer(array)

    def run(self, launch: Launch) -> None:
        self.executor.run(launch)

    def take_errors(self) -> list[dict[str, int]]:
        entries = self.executor.error_entries
        errors = [{name: int(entry[name]) for name in entries.dtype.names or ()} for entry in entries]
        assert {e["slot"] for e in errors} == set(np.flatnonzero(self.executor.slot_errors).tolist())
        self.executor.clear_errors()
        return errors
