"""CUDA events: where a stream is, order between streams, and device time of a step (recorded outside its graph).

Made with cuda-bindings: PyCUDA's Event keeps its handle to itself, and a wait for it must not hold Python's lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.cuda.errors import check

if TYPE_CHECKING:
    from engine.cuda.context import DeviceContext

_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_BLOCKING_SYNC, _DISABLE_TIMING = 1, 2  # CUevent_flags


class Event:
    """A CUDA event that is recorded again and again. Closed with the context.

    timing: can be measured (costs a little more). blocking: `wait` sleeps instead of spinning (some 50 us later).
    """

    def __init__(self, context: DeviceContext, *, timing: bool = True, blocking: bool = False) -> None:
        self._api = context.api
        flags = (0 if timing else _DISABLE_TIMING) | (_BLOCKING_SYNC if blocking else 0)
        self.handle: Any = check(self._api.cuEventCreate(flags), "cuEventCreate")
        context.on_close("event", self.destroy)

    def record(self, stream: Any) -> None:
        """Mark the place that `stream` has reached; an earlier mark is forgotten."""
        check(self._api.cuEventRecord(self.handle, stream.handle), "cuEventRecord")

    def done(self) -> bool:
        """Whether the stream has passed the mark. Raises DeviceLost if it never will."""
        result = self._api.cuEventQuery(self.handle)
        if int(result[0]) == _NOT_READY:
            return False
        check(result, "cuEventQuery")
        return True

    def wait(self) -> None:
        """Block until the stream has passed the mark; other Python threads run on. Raises DeviceLost."""
        check(self._api.cuEventSynchronize(self.handle), "cuEventSynchronize")

    def order_before(self, stream: Any) -> None:
        """What is launched on `stream` from now on runs after the mark; the host does not wait."""
        check(self._api.cuStreamWaitEvent(stream.handle, self.handle, 0), "cuStreamWaitEvent")

    def milliseconds_until(self, end: Event) -> float:
        """Device time from this mark to `end`'s; both done and made with `timing`. Resolution about 0.5 us."""
        return float(check(self._api.cuEventElapsedTime(self.handle, end.handle), "cuEventElapsedTime"))

    def destroy(self) -> None:
        if self.handle is not None:
            handle, self.handle = self.handle, None
            check(self._api.cuEventDestroy(handle), "cuEventDestroy")
