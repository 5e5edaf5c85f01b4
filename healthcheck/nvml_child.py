"""The only process of the appliance that opens NVML: `python -P -m healthcheck.nvml_child`. A call into a sick driver
may hang for ever and cannot be cancelled, so it happens here, and the parent (nvml.py) kills this process when it is
late.

Protocol: nvml_protocol.py; fields: nvml_read.py. Handles are made anew after each opening: old ones mean nothing after
a reset, and one kept open would be a client that forbids it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any

from healthcheck.nvml_protocol import Begin, Done, Event, Gpu, LibraryError, Value, die_with_parent, serve
from healthcheck.nvml_read import (
    EVENTS,
    TIMEOUT,
    UNKNOWN,
    error_name,
    library_error,
    pci_address,
    read_facts,
    read_gpu,
    text,
)

_POLL_SECONDS = 0.25  # one call into the library that returns at once; the kernel's log is the faster way
_EVENTS_AT_ONCE = 64
_MAX_LOSSES = 3  # of the set of events, until NVML is opened anew: each makes the parent read at once
_WAIT_MILLISECONDS = 1  # 0 is not described in nvml.h

_Say = Callable[[Begin], None]


class NvmlBackend:
    """NVML while it is open: the handles by UUID, and the set of events. `nvml` is the pynvml module."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._open = False
        self._enumerated = False
        self._handles: dict[str, Any] = {}
        self._facts: dict[str, dict[str, Value]] = {}
        self._unread: dict[str, str] = {}
        self._listeners: dict[str, Any] = {}
        self._deaf: dict[str, str] = {}  # UUID -> why it is not listened to
        self._events: Any = None
        self._losses = 0

    @property
    def poll_seconds(self) -> float | None:
        return None if self._events is None else _POLL_SECONDS

    # -- reading
    def read(self, known: Mapping[str, str], skip: Set[str], begin: _Say, gpu: Callable[[Gpu], None]) -> Done:
        """nvml_protocol.Backend.read. A GPU of `known` that NVML does not list is asked for by its PCI address, which
        tells a lost one from one that is not there."""
        self._begin(begin)
        if not self._enumerated and not skip:
            self._enumerate(begin)
        driver = self._ask(self._nvml.nvmlSystemGetDriverVersion)
        for pci, uuid in known.items():
            if uuid not in self._handles and uuid not in skip:
                begin(Begin(uuid, uuid))
                if (error := self._find(pci, uuid)) is not None:
                    gpu(Gpu(uuid, time.time(), {"pci": pci}, {}, error))
        begin(Begin("events"))
        self._listen(skip)
        for uuid, handle in list(self._handles.items()):
            if uuid not in skip:
                begin(Begin(uuid, uuid))
                gpu(self._read_gpu(uuid, handle))
        return Done(True, driver=text(driver), unread=dict(self._unread), deaf=dict(self._deaf))

    def _begin(self, begin: _Say) -> None:
        if not self._open:
            begin(Begin("nvml"))
            self._ask(self._nvml.nvmlInit)
            self._open = True

    def _ask(self, call: Callable[[], Any]) -> Any:
        """A call that concerns no single GPU: any error is one of the library."""
        try:
            return call()
        except self._nvml.NVMLError as error:
            raise library_error(error) from error

    def _enumerate(self, begin: _Say) -> None:
        """By index, each with its own errors: one lost GPU does not hide the others."""
        nvml = self._nvml
        self._unread = {}
        for index in range(self._ask(nvml.nvmlDeviceGetCount)):
            begin(Begin(f"index {index}"))
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                self._handles[text(nvml.nvmlDeviceGetUUID(handle))] = handle
            except nvml.NVMLError as error:
                self._unread[f"index {index}"] = error_name(error.value)
        self._enumerated = True

    def _find(self, pci: str, uuid: str) -> str | None:
        """The handle of a GPU by where it is plugged in; None, or the error."""
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByPciBusId(pci)
            if text(nvml.nvmlDeviceGetUUID(handle)) != uuid:
                return "not_found"  # another card is there now
        except nvml.NVMLError as error:
            return error_name(error.value)
        self._handles[uuid] = handle
        return None

    def _read_gpu(self, uuid: str, handle: Any) -> Gpu:
        if uuid not in self._facts:
            try:
                self._facts[uuid] = read_facts(self._nvml, handle)
            except self._nvml.NVMLError as error:
                return Gpu(uuid, time.time(), {}, {}, error_name(error.value))
        return read_gpu(self._nvml, handle, uuid, self._facts[uuid])

    # -- events
    def _listen(self, skip: Set[str]) -> None:
        """Registers what is not registered yet. After an UNKNOWN error the whole set is undefined (nvml.h): it is made
        anew without the GPU that brought it about."""
        nvml = self._nvml
        while True:
            wanted = [u for u in self._handles if u not in self._listeners and u not in self._deaf and u not in skip]
            if not wanted or not self._make_set():
                return
            for uuid in wanted:
                try:
                    mask = nvml.nvmlDeviceGetSupportedEventTypes(self._handles[uuid]) & sum(EVENTS)
                    if mask:
                        nvml.nvmlDeviceRegisterEvents(self._handles[uuid], mask, self._events)
                        self._listeners[uuid] = self._handles[uuid]
                    else:
                        self._deaf[uuid] = "not supported"
                except nvml.NVMLError as error:
                    self._deaf[uuid] = error_name(error.value)
                    if error.value == UNKNOWN:
                        self._free_set()
                        break
            else:
                return

    def _make_set(self) -> bool:
        if self._losses >= _MAX_LOSSES:
            self._deaf.update(dict.fromkeys(self._handles, "events were lost again and again"))
            return False
        if self._events is None:
            try:
                self._events = self._nvml.nvmlEventSetCreate()
            except self._nvml.NVMLError as error:
                self._deaf.update(dict.fromkeys(self._handles, error_name(error.value)))
        return self._events is not None

    def _free_set(self) -> None:
        events, self._events, self._listeners = self._events, None, {}
        if events is not None:
            try:
                self._nvml.nvmlEventSetFree(events)
            except self._nvml.NVMLError as error:
                _complain("nvmlEventSetFree", error)

    def events(self) -> Iterator[Event]:
        """Until there are no more. After an error, GPU_IS_LOST for one, which need not be of the GPU that one thinks,
        the set is freed; the next read makes a new one and says how each GPU is."""
        nvml = self._nvml
        for _ in range(_EVENTS_AT_ONCE):
            if self._events is None:
                return
            try:
                data = nvml.nvmlEventSetWait_v2(self._events, _WAIT_MILLISECONDS)
            except nvml.NVMLError as error:
                if error.value != TIMEOUT:
                    self._free_set()
                    self._losses += 1
                    yield Event("events_lost", time.time(), data=error.value)
                return
            yield self._event(data)

    def _event(self, data: Any) -> Event:
        kind, number = EVENTS.get(data.eventType, f"event_{data.eventType:#x}"), int(data.eventData)
        uuid = self._uuid(data.device)
        if kind == "xid":  # the only kind whose data is an Xid (nvml.h)
            return Event(kind, time.time(), uuid, xid=number)
        return Event(kind, time.time(), uuid, data=number)

    def _uuid(self, device: Any) -> str | None:
        """Of the GPU that an event names: it may be lost already, then its PCI address may still be there."""
        nvml = self._nvml
        try:
            return text(nvml.nvmlDeviceGetUUID(device))
        except nvml.NVMLError:
            pass
        try:
            pci = pci_address(nvml, device)
        except nvml.NVMLError:
            return None
        return next((uuid for uuid, facts in self._facts.items() if facts["pci"] == pci), None)

    # -- the end
    def close(self) -> None:
        if self._open:
            self._free_set()
            try:
                self._nvml.nvmlShutdown()
            except self._nvml.NVMLError as error:
                _complain("nvmlShutdown", error)  # the driver has gone, or the GPU: the parent ends this process anyway
        self._open = self._enumerated = False
        self._handles, self._facts, self._unread, self._deaf = {}, {}, {}, {}
        self._losses = 0


class Without:
    """Where nvidia-ml-py is not installed: says so to each request, which is not the same as a GPU that is missing."""

    poll_seconds = None

    def __init__(self, why: str) -> None:
        self._why = why

    def read(self, known: Mapping[str, str], skip: Set[str], begin: _Say, gpu: Callable[[Gpu], None]) -> Done:
        raise LibraryError("no_nvidia_ml_py", f"{self._why}: nvidia-ml-py comes with a bundle for GPU hosts")

    def events(self) -> Iterable[Event]:
        return ()

    def close(self) -> None:
        """Nothing is open."""


def _complain(what: str, error: Exception) -> None:
    print(f"{what}: {error}", file=sys.stderr, flush=True)


def main() -> int:
    die_with_parent()
    try:
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        serve(Without(str(error)), sys.stdin.fileno(), sys.stdout.fileno())
        return 0
    serve(NvmlBackend(pynvml), sys.stdin.fileno(), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
