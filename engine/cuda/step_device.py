"""What the runner needs of a device: launches, graphs, copies and events of one stream, named buffers.

`CudaStepDevice` is the GPU. tests/kernels has one whose memory is numpy arrays and whose executor is the emulator, so
that the whole runner is tested where there is no GPU.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from engine.cuda.errors import DeviceErrors
from engine.cuda.events import Event
from engine.cuda.executor import CudaExecutor, Prepared
from engine.cuda.graphs import GraphCache
from engine.cuda.memory import PinnedBuffer, copy_to_device, copy_to_host

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from engine.cuda.context import DeviceContext
    from engine.cuda.errors import DeviceFault
    from engine.cuda.memory import DeviceMemory
    from kernels.launch import Executor, Launch


class StepEvent(Protocol):
    """A place in the stream, with the time at which the device reached it."""

    def record(self) -> None: ...

    def wait(self) -> None:
        """Returns when the stream has passed the last record(). DeviceLost if it never will."""
        ...

    def nanoseconds_until(self, later: StepEvent) -> int: ...


class StepDevice(Protocol):
    """One stream of a device; everything is asynchronous unless it says otherwise, and in order. DeviceLost from any
    call."""

    @property
    def executor(self) -> Executor:
        """Which path, how many multiprocessors."""
        ...

    def address(self, buffer: str) -> int:
        """Of a workspace buffer."""
        ...

    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Zeroed host memory that copies can run from and to; lives as long as the device."""
        ...

    def upload(self, address: int, source: npt.NDArray[Any]) -> None: ...

    def download(self, destination: npt.NDArray[Any], address: int) -> None: ...

    def prepare(self, launch: Launch, trace_index: int) -> Any:
        """Do the host's work of a launch once."""
        ...

    def run(self, prepared: Sequence[Any]) -> None: ...

    def capture(self, key: str, prepared: Sequence[Any]) -> Callable[[], None]:
        """The launches as a graph; nothing runs now. Calling the result replays it."""
        ...

    def event(self) -> StepEvent: ...

    def synchronize(self) -> None: ...

    def take_faults(self) -> list[DeviceFault]:
        """What kernels reported since the last call. Only after the step that reported has ended."""
        ...

    def close(self) -> None: ...


class _CudaEvent:
    def __init__(self, context: DeviceContext, stream: Any) -> None:
        self._event, self._stream = Event(context), stream

    def record(self) -> None:
        self._event.record(self._stream)

    def wait(self) -> None:
        self._event.wait()

    def nanoseconds_until(self, later: StepEvent) -> int:
        assert isinstance(later, _CudaEvent)
        return round(self._event.milliseconds_until(later._event) * 1e6)


class CudaStepDevice:
    """`StepDevice` on the compute stream of a context. `error_ring`: mapped pinned memory of errors.RING_BYTES, to
    which the executor's reports point. Closes the context."""

    def __init__(
        self,
        context: DeviceContext,
        memory: DeviceMemory,
        executor: CudaExecutor,
        error_ring: PinnedBuffer,
        *,
        overlap_kernels: bool = True,
    ) -> None:
        """`overlap_kernels` False: no kernel begins before the one before it has ended (for profiles: else the start of
        a kernel says nothing of when it works)."""
        self._context, self._memory = context, memory
        self._overlap_kernels = overlap_kernels
        self.executor = executor
        self._stream = executor.stream
        self._graphs = GraphCache(context, self._stream)
        self._errors = DeviceErrors(error_ring.array)
        self._pinned: list[PinnedBuffer] = []

    def address(self, buffer: str) -> int:
        return self._memory.workspace[buffer].address

    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        self._pinned.append(PinnedBuffer(self._context, nbytes))
        return self._pinned[-1].array

    def upload(self, address: int, source: npt.NDArray[Any]) -> None:
        copy_to_device(self._context, address, source, self._stream)

    def download(self, destination: npt.NDArray[Any], address: int) -> None:
        copy_to_host(self._context, destination, address, self._stream)

    def prepare(self, launch: Launch, trace_index: int) -> Prepared:
        self.executor.trace_index = trace_index
        return self.executor.prepare(launch if self._overlap_kernels else replace(launch, dependent=False))

    def run(self, prepared: Sequence[Prepared]) -> None:
        self.executor.launch_all(prepared)

    def capture(self, key: str, prepared: Sequence[Prepared]) -> Callable[[], None]:
        graph = self._graphs.add(key, lambda: self.executor.launch_all(prepared))
        stream = self._stream
        return lambda: graph.launch(stream)

    def event(self) -> StepEvent:
        return _CudaEvent(self._context, self._stream)

    def synchronize(self) -> None:
        self._context.synchronize()

    def take_faults(self) -> list[DeviceFault]:
        return self._errors.take()

    def close(self) -> None:
        self._context.close()


class Faults:
    """Reports of kernels that nobody asked for yet: a step in flight may report before the one that is collected."""

    def __init__(self, device: StepDevice, limit: int = 1024) -> None:
        self._device = device
        self._waiting: deque[DeviceFault] = deque(maxlen=limit)

    def of_slot(self, slot: int) -> DeviceFault | None:
        """The oldest report of a slot, which with the later ones is then forgotten."""
        self._waiting.extend(self._device.take_faults())
        mine = [fault for fault in self._waiting if fault.slot == slot]
        if mine:
            self._waiting = deque((f for f in self._waiting if f.slot != slot), maxlen=self._waiting.maxlen)
            return mine[0]
        return None

    def clear(self) -> None:
        self._device.take_faults()
        self._waiting.clear()
