"""The two libraries the driver is reached through, imported here and nowhere else.

PyCUDA: context, streams, events, device and pinned memory. cuda-bindings: what PyCUDA has no names for (graphs, launch
attributes, TMA descriptors), on PyCUDA's handles. Both are `Any` to mypy: neither ships complete types.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from engine.errors import ConfigError

_INSTALL = "Run `make setup-gpu` in the checkout (it installs PyCUDA and cuda-bindings, hash-checked)."
_DRIVER = "Install an NVIDIA driver of branch 580 or newer (CUDA 13) and check that `nvidia-smi` lists the GPU."


@dataclass(frozen=True, slots=True)
class Driver:
    """`cuda`: module pycuda.driver. `api`: module cuda.bindings.driver. `version`: of the driver's CUDA, (13, 0)."""

    cuda: Any
    api: Any
    version: tuple[int, int]


@cache
def load_driver() -> Driver:
    """Import both libraries and initialise the driver (cuInit), without making a context.

    ConfigError when a library or the driver is missing, too old, or finds no device.
    """
    try:
        from cuda.bindings import driver as api
    except ImportError as error:
        raise ConfigError(f"the CUDA backend needs cuda-bindings: {error}", hint=_INSTALL) from error
    try:
        import pycuda.driver as cuda
    except ImportError as error:
        if "libcuda" in str(error):
            raise ConfigError(f"there is no NVIDIA driver here: {error}", hint=_DRIVER) from error
        raise ConfigError(f"the CUDA backend needs PyCUDA: {error}", hint=_INSTALL) from error
    try:
        cuda.init()
    except cuda.Error as error:
        raise ConfigError(f"the NVIDIA driver cannot be used: {error}", hint=_DRIVER) from error
    raw = int(cuda.get_driver_version())
    version = raw // 1000, raw % 1000 // 10
    if version < (13, 0):
        raise ConfigError(f"the NVIDIA driver supports CUDA {version[0]}.{version[1]}; 13.0 is needed", hint=_DRIVER)
    return Driver(cuda, api, version)
