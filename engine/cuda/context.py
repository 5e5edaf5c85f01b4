"""The one context of this process, on the one GPU it was given: choosing the device, streams, orderly teardown.

Never a default and never a fallback: no driver, no GPU, a MIG instance, a GPU that is too old or that our kernels were
not compiled for is a ConfigError. The context is the device's primary one, retained explicitly (no autoinit).

Everything opened on the device registers its close function here (`on_close`); `close` runs them last opened first,
then drops the streams and the context, and compares the GPU's free memory with what it was before.
"""

from __future__ import annotations

import atexit
import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.cuda.driver import Driver, load_driver
from engine.cuda.errors import check, pycuda_calls
from engine.errors import ConfigError, DeviceLost, EngineError
from engine.log import log_event

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

log = logging.getLogger("appliance.cuda")

MIN_COMPUTE_CAPABILITY = (8, 0)
LEAK_TOLERANCE_BYTES = 32 << 20
"""Free memory that may be missing after teardown before it is called a leak: the driver keeps some of its own."""

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: no implicit order with the legacy default stream


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What is known of a GPU before a context is made on it."""

    ordinal: int  # among the visible GPUs (CUDA_VISIBLE_DEVICES is applied by the driver)
    uuid: str  # "GPU-...", or "MIG-..."
    name: str
    pci_bus_id: str
    compute_capability: tuple[int, int]
    num_multiprocessors: int
    total_bytes: int
    l2_bytes: int
    max_shared_bytes: int  # dynamic shared memory one block may opt in to


def visible_devices() -> list[DeviceInfo]:
    """All GPUs the driver shows. Initialises the driver; raises ConfigError as driver.load_driver does."""
    driver = load_driver()
    with pycuda_calls("listing the GPUs"):
        return [_device_info(driver, ordinal) for ordinal in range(driver.cuda.Device.count())]


def _device_info(driver: Driver, ordinal: int) -> DeviceInfo:
    device, attribute = driver.cuda.Device(ordinal), driver.cuda.device_attribute
    raw = check(driver.api.cuDeviceGetUuid(ordinal), "cuDeviceGetUuid").bytes
    digits = bytes(raw).hex()
    uuid = "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
    name = str(device.name())
    return DeviceInfo(
        ordinal=ordinal,
        uuid=("MIG-" if _is_mig_name(name) else "GPU-") + uuid,
        name=name,
        pci_bus_id=str(device.pci_bus_id()),
        compute_capability=tuple(device.compute_capability()),
        num_multiprocessors=int(device.get_attribute(attribute.MULTIPROCESSOR_COUNT)),
        total_bytes=int(device.total_memory()),
        l2_bytes=int(device.get_attribute(attribute.L2_CACHE_SIZE)),
        max_shared_bytes=int(device.get_attribute(attribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)),
    )


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _is_mig_name(name: str) -> bool:
    return " MIG " in f" {name} "  # "NVIDIA H200 MIG 1g.18gb"


def choose_device(devices: Sequence[DeviceInfo], wanted: int | str, visible: str | None = None) -> DeviceInfo:
    """The GPU with index `wanted` among `devices`, or whose UUID starts with it ("GPU-5fd4f087").

    visible: CUDA_VISIBLE_DEVICES, for the messages only. Pure. ConfigError when there is no such GPU, more than one, or
    when it must not be used: a MIG instance, a compute capability below 8.0.
    """
    limited = f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""
    _refuse_mig(str(wanted))
    for name in (visible or "").split(","):
        _refuse_mig(name.strip())
    if not devices:
        raise ConfigError(
            f"the driver shows no GPU{limited}",
            hint="Check `nvidia-smi -L`, and that this process may use /dev/nvidia*.",
        )
    if isinstance(wanted, int) or wanted.isdecimal():
        found = [device for device in devices if device.ordinal == int(wanted)]
    else:
        found = [device for device in devices if device.uuid.lower().startswith(wanted.lower())]
    if len(found) != 1:
        listed = ", ".join(f"{device.ordinal}: {device.uuid} {device.name}" for device in devices)
        problem = "no GPU" if not found else "more than one GPU"
        raise ConfigError(f"{problem} matches {wanted!r}{limited}", hint=f"The driver shows {listed}.")
    device = found[0]
    _refuse_mig(device.uuid)
    if device.compute_capability < MIN_COMPUTE_CAPABILITY:
        raise ConfigError(
            f"{device.name} has compute capability {_dotted(device.compute_capability)}; 8.0 (A100) or newer is needed",
            hint="Use a GPU of the Ampere generation or newer.",
        )
    return device


def _refuse_mig(name: str) -> None:
    if name.upper().startswith("MIG"):
        raise ConfigError(
            f"{name} is a MIG instance; MIG is not supported: one model has one whole GPU",
            hint="Turn MIG off on this GPU (nvidia-smi -i N -mig 0, then a reset), or name another one.",
        )


class DeviceContext:
    """Driver, device, primary context and streams. Current on the thread that made it; others call `bind_thread`.

    device: index among the visible GPUs or (the beginning of) a UUID. Raises ConfigError (see choose_device).
    `compute`: PyCUDA stream on which steps run. `copy`: for copies beside it.
    """

    def __init__(self, device: int | str = 0) -> None:
        self.driver: Driver = load_driver()
        self.cuda, self.api = self.driver.cuda, self.driver.api
        self.info = choose_device(visible_devices(), device, os.environ.get("CUDA_VISIBLE_DEVICES"))
        with pycuda_calls(f"opening {self.info.name} ({self.info.uuid})"):
            handle = self.cuda.Device(self.info.ordinal)
            self._context: Any = handle.retain_primary_context()
            self._context.push()
            atexit.register(self._leave)
            self.free_bytes_at_start = int(self.cuda.mem_get_info()[0])
            self.compute: Any = self.cuda.Stream(_NON_BLOCKING)
            self.copy: Any = self.cuda.Stream(_NON_BLOCKING)
        self._closers: list[tuple[str, Callable[[], None]]] = []
        self.closed = False
        self.missing_bytes: int | None = None  # after close: free memory at the start minus free memory at the end
        log_event(
            log, logging.INFO, "device_opened", name=self.info.name, uuid=self.info.uuid, pci=self.info.pci_bus_id,
            compute_capability=_dotted(self.info.compute_capability), total_bytes=self.info.total_bytes,
            free_bytes=self.free_bytes_at_start, cuda=_dotted(self.driver.version),
        )  # fmt: skip

    def stream(self) -> Any:
        """Another PyCUDA stream (non-blocking). Its owner drops the last reference before the context closes."""
        with pycuda_calls("creating a stream"):
            return self.cuda.Stream(_NON_BLOCKING)

    def bind_thread(self) -> None:
        """Make the context current on the calling thread, which then uses `api` on it, not PyCUDA's objects."""
        check(self.api.cuCtxSetCurrent(self._context.handle), "cuCtxSetCurrent")

    def on_close(self, what: str, close: Callable[[], None]) -> None:
        """Run `close` at teardown, before everything registered earlier."""
        self._closers.append((what, close))

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the GPU, all processes counted."""
        with pycuda_calls("reading the GPU's free memory"):
            free, total = self.cuda.mem_get_info()
        return int(free), int(total)

    def synchronize(self) -> None:
        """Wait for everything on all streams. Raises DeviceLost if something before it broke the context."""
        check(self.api.cuCtxSynchronize(), "cuCtxSynchronize")

    def close(self) -> None:
        """Give everything back: graphs, modules, memory (whatever is registered, last first), streams, context.

        Goes on past a failing part and raises the first error at the end. On a lost device only the context is dropped:
        every other call would fail, and the end of the process frees all. Doing it twice is no error.
        """
        if self.closed:
            return
        self.closed = True
        first: EngineError | None = None
        try:
            self.synchronize()
        except DeviceLost as error:
            log_event(log, logging.ERROR, "device_lost_at_close", error.message)
            self._closers.clear()
        while self._closers:
            what, close = self._closers.pop()
            try:
                close()
            except EngineError as error:
                log_event(log, logging.ERROR, "close_failed", f"closing {what}: {error.message}")
                first = first or error
        self._drop_context()
        if first is not None:
            raise first

    def _leave(self) -> None:
        """The process ends without `close`: on a context that is still current PyCUDA would abort it."""
        try:
            with pycuda_calls("leaving the context"):
                self._context.pop()
        except EngineError:
            pass  # a lost device; the process ends anyway, and whoever ends it has said why

    def _drop_context(self) -> None:
        atexit.unregister(self._leave)
        self.compute = self.copy = None
        free = None
        try:
            free = self.memory_info()[0]
        except EngineError:
            pass  # a lost device cannot be asked; it was logged
        with pycuda_calls("releasing the context"):
            self._context.detach()
            other = self.cuda.Context.get_current()
        if other is None:
            self.api.cuCtxSetCurrent(0)  # PyCUDA leaves the released context on this thread
        if free is None:
            return
        missing = self.missing_bytes = self.free_bytes_at_start - free
        level, event = (logging.INFO, "device_closed")
        if missing > LEAK_TOLERANCE_BYTES:  # or another process took memory meanwhile: it is not for us to say
            level, event = (logging.WARNING, "device_memory_missing")
        log_event(
            log, level, event, free_bytes_before=self.free_bytes_at_start, free_bytes_after=free, missing_bytes=missing
        )
