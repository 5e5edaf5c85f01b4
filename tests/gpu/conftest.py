"""Fixtures of the GPU tests. Without a GPU, a driver, PyCUDA or compiled kernels they are skipped, and say why.

APPLIANCE_REQUIRE_GPU=1 (set by `make test-gpu`) turns that skip into a failure: who asks for the GPU tests wants them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import ConfigError
from tests.gpu.device import Gpu, GpuDevice

_HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.xdist_group("gpu"))  # one process owns the GPU


@pytest.fixture(scope="session")
def gpu() -> Iterator[Gpu]:
    try:
        gpu = Gpu()
    except ConfigError as error:
        if os.environ.get("APPLIANCE_REQUIRE_GPU") == "1":
            raise
        pytest.skip(f"no GPU to test on: {error}" + (f" ({error.hint})" if error.hint else ""))
    yield gpu
    gpu.close()


@pytest.fixture
def device(gpu: Gpu) -> Iterator[GpuDevice]:
    """The device layer with memory that is freed after the test. A test that leaves error reports behind fails."""
    device = GpuDevice(gpu)
    yield device
    try:
        assert device.take_errors() == [], "the test left error reports of a kernel unread"
    finally:
        device.free()


@pytest.fixture
def probe(gpu: Gpu, device: GpuDevice) -> GpuDevice:
    """As `device`, launching the kernels of tests/gpu/probe."""
    executor = gpu.probe
    if isinstance(executor, str):
        pytest.skip(f"the probe kernels cannot be compiled: {executor}")
    device.executor = executor
    return device
