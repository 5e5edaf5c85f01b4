"""libnvidia-ml.so.1 for tests, in Python: the real pynvml calls it as it calls the real one, with its own C types.

So its signatures and structures are tested too. A GPU is what real H200s said; every function may be told to return an
error, per GPU. `calls` has the names of all functions called.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pynvml

OK, NOT_SUPPORTED, TIMEOUT, IS_LOST, RESET_REQUIRED, UNKNOWN = 0, 3, 10, 15, 16, 999
ALL = 0xFFFFF


@dataclass
class Card:
    uuid: str
    pci: str  # as NVML writes it
    minor: int
    values: dict[str, Any] = field(default_factory=dict)  # function -> what it gives; fields by number
    errors: dict[str | int, int] = field(default_factory=dict)  # function, or number of a field -> nvmlReturn_t
    lost: bool = False
    event_types: int = ALL
    listed: bool = True


SIMPLE: dict[str, int] = {  # function(handle, unsigned *value)
    "nvmlDeviceGetCurrPcieLinkGeneration": 5, "nvmlDeviceGetMaxPcieLinkGeneration": 5,
    "nvmlDeviceGetCurrPcieLinkWidth": 16, "nvmlDeviceGetMaxPcieLinkWidth": 16, "nvmlDeviceGetPcieReplayCounter": 1,
    "nvmlDeviceGetCurrentClocksEventReasons": 1, "nvmlDeviceGetPerformanceState": 0,
    "nvmlDeviceGetPowerUsage": 79884, "nvmlDeviceGetEnforcedPowerLimit": 700000, "nvmlDeviceGetPersistenceMode": 1,
}  # fmt: skip
INDEXED: dict[str, dict[int, int]] = {  # function(handle, which, unsigned *value)
    "nvmlDeviceGetPcieThroughput": {0: 906, 1: 560}, "nvmlDeviceGetClockInfo": {1: 345, 2: 3201},
    "nvmlDeviceGetTemperature": {0: 37}, "nvmlDeviceGetTemperatureThreshold": {1: 90},
}  # fmt: skip
MEMBERS = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
FIELDS: dict[int, tuple[int, int | float]] = {  # number -> (nvmlValueType_t, value)
    230: (1, 0),
    82: (1, 40),
    29: (1, 0),
    30: (1, 0),
}
ECC = {(0, 0): 10, (1, 0): 2, (0, 1): 2**40, (1, 1): 3}  # (corrected or not, volatile or aggregate)


class FakeNvml:
    """Attributes are the library's functions: (card, errors) decide what they say."""

    def __init__(self, cards: Sequence[Card]) -> None:
        self.cards = list(cards)
        self.calls: list[str] = []
        self.errors: dict[str, int] = {}  # of the library: function -> nvmlReturn_t
        self.absent: set[str] = set()  # functions that this driver has not
        self.initialised = 0
        self.sets: dict[int, dict[int, int]] = {}  # event set -> handle -> mask
        self.events: list[tuple[Card, int, int]] = []
        self.wait_error: int | None = None
        self.old_fabric = False

    def __getattr__(self, name: str) -> Callable[..., int]:
        function = getattr(type(self), f"do_{name}", None)
        if name in self.absent or (function is None and name not in SIMPLE and name not in INDEXED):
            raise AttributeError(name)  # as ctypes does for a symbol that is not there

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name in self.errors:
                return self.errors[name]
            if name != "nvmlInitWithFlags" and not self.initialised:
                return 1  # NVML_ERROR_UNINITIALIZED
            if not name.startswith("nvmlDevice") or name.startswith(("nvmlDeviceGetCount", "nvmlDeviceGetHandle")):
                return int(function(self, *arguments))  # type: ignore[misc]
            card = self._card(arguments[0])
            if name == "nvmlDeviceGetPciInfo_v3":
                pass  # kept by the library: answered also for a lost GPU
            elif card.lost:
                return IS_LOST
            if name in card.errors:
                return card.errors[name]
            if name in SIMPLE:
                _put(arguments[1], card.values.get(name, SIMPLE[name]))
                return OK
            if name in INDEXED:
                values = card.values.get(name, INDEXED[name])
                which = int(getattr(arguments[1], "value", arguments[1]))
                if which not in values:
                    return NOT_SUPPORTED
                _put(arguments[2], values[which])
                return OK
            return int(function(self, card, *arguments[1:]))  # type: ignore[misc]

        return call

    def _card(self, handle: Any) -> Card:
        return self.cards[ctypes.cast(handle, ctypes.c_void_p).value // 16 - 1]  # type: ignore[operator]

    def handle(self, card: Card) -> int:
        return 16 * (self.cards.index(card) + 1)

    # -- the library
    def do_nvmlInitWithFlags(self, flags: int) -> int:
        assert flags == 0
        self.initialised += 1
        return OK

    def do_nvmlShutdown(self) -> int:
        self.initialised -= 1
        return OK

    def do_nvmlErrorString(self, code: int) -> bytes:
        return b"a string of the driver"

    def do_nvmlSystemGetDriverVersion(self, text: Any, size: Any) -> int:
        text.value = b"580.159.04"
        return OK

    def do_nvmlDeviceGetCount_v2(self, count: Any) -> int:
        _put(count, sum(card.listed for card in self.cards))
        return OK

    def do_nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        card = [card for card in self.cards if card.listed][index.value]
        code = card.errors.get("nvmlDeviceGetHandleByIndex_v2", OK)
        if code == OK:
            _put_pointer(handle, self.handle(card))
        return code

    def do_nvmlDeviceGetHandleByPciBusId_v2(self, pci: Any, handle: Any) -> int:
        for card in self.cards:
            if card.pci[4:].lower().encode() == pci.value:
                if code := card.errors.get("nvmlDeviceGetHandleByPciBusId_v2", OK):
                    return code
                _put_pointer(handle, self.handle(card))
                return OK
        return 6  # NVML_ERROR_NOT_FOUND

    # -- a GPU
    def do_nvmlDeviceGetUUID(self, card: Card, text: Any, size: Any) -> int:
        text.value = card.uuid.encode()
        return OK

    def do_nvmlDeviceGetName(self, card: Card, text: Any, size: Any) -> int:
        text.value = b"NVIDIA H200"
        return OK

    def do_nvmlDeviceGetSerial(self, card: Card, text: Any, size: Any) -> int:
        text.value = b"1650924000000"
        return OK

    def do_nvmlDeviceGetVbiosVersion(self, card: Card, text: Any, size: Any) -> int:
        text.value = b"96.00.BC.00.03"
        return OK

    def do_nvmlDeviceGetPciInfo_v3(self, card: Card, info: Any) -> int:
        info._obj.busId = card.pci.encode()
        return OK

    def do_nvmlDeviceGetMinorNumber(self, card: Card, number: Any) -> int:
        _put(number, card.minor)
        return OK

    def do_nvmlDeviceGetFieldValues(self, card: Card, count: Any, values: Any) -> int:
        assert count.value == len(values._obj)
        for value in values._obj:
            found = card.values.get("fields", {}).get(value.fieldId, FIELDS.get(value.fieldId))
            value.nvmlReturn = card.errors.get(value.fieldId, OK if found else NOT_SUPPORTED)
            if found and value.nvmlReturn == OK:
                value.valueType = found[0]
                member = found[2] if len(found) == 3 else MEMBERS.get(found[0])
                if member is not None:
                    setattr(value.value, member, found[1])
        return OK

    def do_nvmlDeviceGetTotalEccErrors(self, card: Card, error: Any, counter: Any, count: Any) -> int:
        _put(count, card.values.get("ecc", ECC)[error.value, counter.value])
        return OK

    def do_nvmlDeviceGetMemoryErrorCounter(self, card: Card, error: Any, counter: Any, place: Any, count: Any) -> int:
        _put(count, {2: 1, 7: 1}[place.value])
        return OK

    def do_nvmlDeviceGetEccMode(self, card: Card, current: Any, pending: Any) -> int:
        _put(current, 1)
        _put(pending, 0)
        return OK

    def do_nvmlDeviceGetSramEccErrorStatus(self, card: Card, status: Any) -> int:
        if status._obj.version != 0x1000068 or ctypes.sizeof(status._obj) != 0x68:
            return 25  # NVML_ERROR_ARGUMENT_VERSION_MISMATCH
        status._obj.bThresholdExceeded, status._obj.volatileUncParity, status._obj.volatileUncSecDed = 1, 4, 2
        return OK

    def do_nvmlDeviceGetRemappedRows(
        self, card: Card, corrected: Any, uncorrected: Any, pending: Any, failed: Any
    ) -> int:
        for pointer, value in zip((corrected, uncorrected, pending, failed), (5, 6, 1, 0)):
            _put(pointer, value)
        return OK

    def do_nvmlDeviceGetRowRemapperHistogram(self, card: Card, histogram: Any) -> int:
        histogram._obj.max, histogram._obj.low, histogram._obj.none = 2560, 7, 8
        return OK

    def do_nvmlDeviceGetRetiredPagesPendingStatus(self, card: Card, pending: Any) -> int:
        return NOT_SUPPORTED

    def do_nvmlDeviceGetNvLinkState(self, card: Card, link: int, state: Any) -> int:
        links = card.values.get("links", [1] * 18)
        if link >= len(links):
            return NOT_SUPPORTED if not links else 2
        _put(state, links[link])
        return OK

    def do_nvmlDeviceGetNvLinkErrorCounter(self, card: Card, link: int, counter: int, count: Any) -> int:
        if "link errors" not in card.values:
            return NOT_SUPPORTED
        _put(count, card.values["link errors"][counter])
        return OK

    def do_nvmlDeviceGetUtilizationRates(self, card: Card, rates: Any) -> int:
        rates._obj.gpu = 12
        return OK

    def do_nvmlDeviceGetMemoryInfo(self, card: Card, memory: Any) -> int:
        memory._obj.used, memory._obj.total = 644939776, 150754820096
        return OK

    def do_nvmlDeviceGetComputeRunningProcesses_v3(self, card: Card, count: Any, processes: Any) -> int:
        if processes is None:
            _put(count, 2)
            return 7  # NVML_ERROR_INSUFFICIENT_SIZE
        _put(count, 2)
        return OK

    def do_nvmlDeviceGetCurrentClocksThrottleReasons(self, card: Card, mask: Any) -> int:
        _put(mask, 0x44)
        return OK

    def do_nvmlDeviceGetGpuFabricInfoV(self, card: Card, info: Any) -> int:
        if info._obj.version == pynvml.nvmlGpuFabricInfo_v3 and self.old_fabric:
            return 25
        assert info._obj.version & 0xFFFFFF == ctypes.sizeof(info._obj)
        info._obj.state, info._obj.status, info._obj.healthMask = 3, 0, 0x80
        if info._obj.version == pynvml.nvmlGpuFabricInfo_v3:
            info._obj.healthSummary = 1
        return OK

    def do_nvmlDeviceGetMigMode(self, card: Card, current: Any, pending: Any) -> int:
        _put(current, 0)
        return OK

    # -- events
    def do_nvmlEventSetCreate(self, events: Any) -> int:
        number = 16 * (len(self.sets) + 100)
        self.sets[number] = {}
        _put_pointer(events, number)
        return OK

    def do_nvmlEventSetFree(self, events: Any) -> int:
        del self.sets[ctypes.cast(events, ctypes.c_void_p).value or 0]
        return OK

    def do_nvmlDeviceGetSupportedEventTypes(self, card: Card, types: Any) -> int:
        _put(types, card.event_types)
        return OK

    def do_nvmlDeviceRegisterEvents(self, card: Card, types: Any, events: Any) -> int:
        self.sets[ctypes.cast(events, ctypes.c_void_p).value or 0][self.handle(card)] = types.value
        return OK

    def do_nvmlEventSetWait_v2(self, events: Any, data: Any, milliseconds: Any) -> int:
        assert milliseconds.value <= 10
        if self.wait_error is not None:
            return self.wait_error
        registered = self.sets[ctypes.cast(events, ctypes.c_void_p).value or 0]
        while self.events:
            card, kind, value = self.events.pop(0)
            if registered.get(self.handle(card), 0) & kind:
                data._obj.device = ctypes.cast(self.handle(card), type(data._obj.device))
                data._obj.eventType, data._obj.eventData = kind, value
                return OK
        return TIMEOUT


def _put(pointer: Any, value: int) -> None:
    """*pointer = value, of a byref()."""
    pointer._obj.value = value


def _put_pointer(pointer: Any, address: int) -> None:
    """Likewise where it points at a pointer. The address is a number of ours; nobody follows it."""
    ctypes.cast(pointer, ctypes.POINTER(ctypes.c_void_p))[0] = address
