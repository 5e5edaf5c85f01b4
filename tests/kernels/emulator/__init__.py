"""A SIMT emulator: our CUDA kernels on the CPU, for tests where there is no GPU.

cuda_emulator.h stands for the CUDA headers; build.py compiles kernels/<module>.cu against it; executor.py runs
launches.
"""

from tests.kernels.emulator.build import CompileError
from tests.kernels.emulator.executor import EmulatedExecutor, EmulationError
from tests.kernels.emulator.memory import guarded_array

__all__ = ["CompileError", "EmulatedExecutor", "EmulationError", "guarded_array"]
