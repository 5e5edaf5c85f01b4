"""One reading of a GPU through NVML: what is read, under which name and in which unit. Each field by itself.

`nvml` is the pynvml module (nvidia-ml-py), which only nvml_child.py imports. Names and codes are nvml.h's (13.3). What
a GPU, its driver or this nvidia-ml-py does not know is unknown, with the reason, and never 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from healthcheck.nvml_protocol import Gpu, LibraryError, Value
from healthcheck.pci import normalise_pci

# nvmlReturn_t
SUCCESS, NOT_SUPPORTED, TIMEOUT, FUNCTION_NOT_FOUND, GPU_IS_LOST, RESET_REQUIRED, UNKNOWN = 0, 3, 10, 13, 15, 16, 999
_ERRORS = {
    1: "uninitialized", 4: "no_permission", 6: "not_found", 9: "driver_not_loaded", 10: "timeout", 11: "irq_issue",
    12: "library_not_found", 14: "corrupted_inforom", 15: "gpu_is_lost", 16: "reset_required",
    17: "blocked_by_operating_system", 18: "driver_mismatch", 28: "gpu_not_found",
}  # fmt: skip
_LIBRARY = (1, 9, 12, 18)  # not of one GPU: there is no use in asking on
NOT_FOUND = (6, 28)

# nvmlEventType*: worth waking up for. Single-bit errors are not (one GPU is on record with 17,700 a second), nor are
# performance states and clocks.
EVENTS = {
    0x2: "double_bit", 0x8: "xid", 0x400: "dram_retirement", 0x800: "dram_retirement_failure", 0x1000: "poison",
    0x2000: "fatal_poison", 0x4000: "gpu_unavailable", 0x8000: "recovery_action",
}  # fmt: skip

_VALUES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # of nvmlValue_t by nvmlValueType_t
_CORRECTED, _UNCORRECTED, _VOLATILE, _AGGREGATE, _DRAM, _SRAM = 0, 1, 0, 1, 2, 7
_CLOCK_SM, _CLOCK_MEMORY, _SENSOR_GPU, _THRESHOLD_SLOWDOWN, _PCIE_TX, _PCIE_RX = 1, 2, 0, 1, 0, 1
_CRC_FLIT, _CRC_DATA, _REPLAY, _RECOVERY = 2, 3, 0, 1

Reader = Callable[[Any, Any], Mapping[str, Value]]


class NotKnown(Exception):
    """A value that is not to be had, and why."""


def error_name(code: int) -> str:
    """ "gpu_is_lost"; "nvml_999" for a code that says nothing in particular."""
    return _ERRORS.get(code, f"nvml_{code}")


def library_error(error: Any) -> LibraryError:
    return LibraryError(error_name(error.value), _words(error))


def read_gpu(nvml: Any, handle: Any, uuid: str, facts: Mapping[str, Value]) -> Gpu:
    """All fields of one GPU. `facts` never change and are given. LibraryError where NVML itself has gone."""
    fields: dict[str, Value] = dict(facts)
    unknown: dict[str, str] = {}
    error: str | None = None
    for names, reader in READERS:
        try:
            fields.update(reader(nvml, handle))
        except nvml.NVMLError as failed:
            if failed.value in _LIBRARY:
                raise library_error(failed) from failed
            unknown.update(dict.fromkeys(names, _words(failed)))
            if (
                failed.value == GPU_IS_LOST
            ):  # stronger than reset_required; each further call may take seconds to say so
                error = error_name(GPU_IS_LOST)
                break
            if failed.value == RESET_REQUIRED:
                error = error_name(RESET_REQUIRED)
        except NotKnown as failed:
            unknown.update(dict.fromkeys(names, str(failed)))
        except AttributeError as failed:  # an nvidia-ml-py older than the field
            unknown.update(dict.fromkeys(names, f"not in this nvidia-ml-py: {failed.name}"))
    if error == "gpu_is_lost":
        missing = (name for names, _ in READERS for name in names if name not in fields and name not in unknown)
        unknown.update(dict.fromkeys(missing, "not asked: the GPU is lost"))
    fields.update(dict.fromkeys(unknown))
    return Gpu(uuid, time.time(), fields, unknown, error)


def read_facts(nvml: Any, handle: Any) -> dict[str, Value]:
    """What stays as it is while a handle is valid: read once. Raises nvml.NVMLError only if the GPU is lost."""
    facts: dict[str, Value] = {}
    for name, call in _FACTS.items():
        try:
            facts[name] = call(nvml, handle)
        except nvml.NVMLError as error:
            if error.value == GPU_IS_LOST:
                raise
            facts[name] = None
    return facts


def _words(error: Any) -> str:
    code = error.value
    known = {NOT_SUPPORTED: "not supported", FUNCTION_NOT_FOUND: "not known to this driver"}
    return known.get(code) or f"{error_name(code)}: {error}"


def text(value: bytes | str) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _one(name: str, function: str, *arguments: Any, kind: type[int] | type[bool] | type[float] = int) -> Any:
    def read(nvml: Any, handle: Any) -> dict[str, Value]:
        return {name: kind(getattr(nvml, function)(handle, *arguments))}

    return (name,), read


def field_value(nvml: Any, handle: Any, field: int, scope: int = 0, member: str | None = None) -> int | float:
    """A value of nvmlDeviceGetFieldValues; its own return code counts. nvml.NVMLError, NotKnown."""
    (found,) = nvml.nvmlDeviceGetFieldValues(handle, [(field, scope)])
    if found.nvmlReturn != SUCCESS:
        raise nvml.NVMLError(found.nvmlReturn)
    if member is None:
        if found.valueType >= len(_VALUES):
            raise NotKnown(f"field {field} has a value of an unknown type {found.valueType}")
        member = _VALUES[found.valueType]
    value: int | float = getattr(found.value, member)
    return value


def _field(name: str, constant: str, *, member: str | None = None, kind: type[int] | type[bool] = int) -> Any:
    def read(nvml: Any, handle: Any) -> dict[str, Value]:
        return {name: kind(field_value(nvml, handle, getattr(nvml, constant), member=member))}

    return (name,), read


def _total(name: str, error: int, counter: int) -> Any:
    return _one(name, "nvmlDeviceGetTotalEccErrors", error, counter)


def _located(name: str, error: int, counter: int, location: int) -> Any:
    return _one(name, "nvmlDeviceGetMemoryErrorCounter", error, counter, location)


def _ecc_mode(nvml: Any, handle: Any) -> dict[str, Value]:
    current, pending = nvml.nvmlDeviceGetEccMode(handle)
    return {"ecc_mode": bool(current), "ecc_mode_pending": bool(pending)}


def _sram(nvml: Any, handle: Any) -> dict[str, Value]:
    status = nvml.c_nvmlEccSramErrorStatus_v1_t()  # its version is set by its constructor
    nvml.nvmlDeviceGetSramEccErrorStatus(handle, nvml.byref(status))
    return {
        "sram_threshold_exceeded": bool(status.bThresholdExceeded),
        "sram_uncorrected_parity": int(status.volatileUncParity),
        "sram_uncorrected_secded": int(status.volatileUncSecDed),
    }


def _remapped_rows(nvml: Any, handle: Any) -> dict[str, Value]:
    corrected, uncorrected, pending, failure = nvml.nvmlDeviceGetRemappedRows(handle)
    return {
        "remapped_corrected": int(corrected), "remapped_uncorrected": int(uncorrected),
        "remap_pending": bool(pending), "remap_failure": bool(failure),
    }  # fmt: skip


def _remap_banks(nvml: Any, handle: Any) -> dict[str, Value]:
    histogram = nvml.nvmlDeviceGetRowRemapperHistogram(handle)
    return {"remap_banks_low": int(histogram.low), "remap_banks_without_spare": int(histogram.none)}


def _nvlinks(nvml: Any, handle: Any) -> dict[str, Value]:
    """Links by number until the first that the GPU has not."""
    states = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            states.append(bool(nvml.nvmlDeviceGetNvLinkState(handle, link)))
        except nvml.NVMLError as error:
            if error.value in (GPU_IS_LOST, RESET_REQUIRED) or not states:
                raise
            break
    return {"nvlinks": len(states), "nvlinks_up": sum(states)}


def _nvlink_errors(name: str, counters: tuple[int, ...], fields: tuple[str, ...]) -> Any:
    """Over all links that are up. By counter up to Hopper; Blackwell has fields instead (NVML's change log, v565)."""

    def read(nvml: Any, handle: Any) -> dict[str, Value]:
        total, counted = 0, False
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            try:
                if not nvml.nvmlDeviceGetNvLinkState(handle, link):
                    continue
            except nvml.NVMLError:
                if link == 0:
                    raise
                break
            total += _link_errors(nvml, handle, link, counters, fields)
            counted = True
        if not counted:
            raise NotKnown("no link is up")
        return {name: total}

    return (name,), read


def _link_errors(nvml: Any, handle: Any, link: int, counters: tuple[int, ...], fields: tuple[str, ...]) -> int:
    try:
        return sum(int(nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, counter)) for counter in counters)
    except nvml.NVMLError as error:
        if error.value not in (NOT_SUPPORTED, FUNCTION_NOT_FOUND):
            raise
        return sum(int(field_value(nvml, handle, getattr(nvml, field), link)) for field in fields)


def _utilisation(nvml: Any, handle: Any) -> dict[str, Value]:
    return {"utilization_percent": int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)}


def _memory(nvml: Any, handle: Any) -> dict[str, Value]:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return {"memory_used_bytes": int(memory.used), "memory_total_bytes": int(memory.total)}


def _processes(nvml: Any, handle: Any) -> dict[str, Value]:
    """Compute contexts only: monitors, X and persistenced are not among them (who holds a GPU: /proc/*/fd). The name
    without _v3 raises an exception of its own, which is no NVMLError, where the driver is older."""
    return {"compute_processes": len(nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle))}


def _clocks_reasons(nvml: Any, handle: Any) -> dict[str, Value]:
    try:
        mask = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except nvml.NVMLError as error:
        if error.value != FUNCTION_NOT_FOUND:  # drivers before 535 have it by its old name
            raise
        mask = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return {"clocks_event_reasons": int(mask)}


def _fabric(nvml: Any, handle: Any) -> dict[str, Value]:
    """With the health's summary where the driver knows it (v3), else without."""
    for version in ("c_nvmlGpuFabricInfo_v3_t", "c_nvmlGpuFabricInfo_v2_t"):
        structure = getattr(nvml, version, None)
        if structure is None:
            continue
        info = structure()
        try:
            nvml.nvmlDeviceGetGpuFabricInfoV(handle, nvml.byref(info))
        except nvml.NVMLError as error:
            if version.endswith("v3_t") and error.value not in (GPU_IS_LOST, RESET_REQUIRED):
                continue  # NVML_ERROR_ARGUMENT_VERSION_MISMATCH, or another one of older drivers
            raise
        summary = getattr(info, "healthSummary", None)
        return {
            "fabric_state": int(info.state), "fabric_status": int(info.status),
            "fabric_health_mask": int(info.healthMask), "fabric_health": None if summary is None else int(summary),
        }  # fmt: skip
    raise NotKnown("not in this nvidia-ml-py")


def _mig(nvml: Any, handle: Any) -> dict[str, Value]:
    return {"mig_mode": bool(nvml.nvmlDeviceGetMigMode(handle)[0])}


def pci_address(nvml: Any, handle: Any) -> str:
    """ "0000:1b:00.0"."""
    return normalise_pci(text(nvml.nvmlDeviceGetPciInfo(handle).busId))


_FACTS: dict[str, Callable[[Any, Any], Value]] = {
    "name": lambda nvml, handle: text(nvml.nvmlDeviceGetName(handle)),
    "serial": lambda nvml, handle: text(nvml.nvmlDeviceGetSerial(handle)),
    "vbios": lambda nvml, handle: text(nvml.nvmlDeviceGetVbiosVersion(handle)),
    "pci": pci_address,
    "minor": lambda nvml, handle: int(nvml.nvmlDeviceGetMinorNumber(handle)),
}

# The recovery action first: NVIDIA's own answer, also where the GPU is lost during the reading. It is in uiVal: nvml.h.
READERS: tuple[tuple[tuple[str, ...], Reader], ...] = (
    _field("recovery_action", "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", member="uiVal"),
    (("ecc_mode", "ecc_mode_pending"), _ecc_mode),
    _total("corrected_volatile", _CORRECTED, _VOLATILE),
    _total("uncorrected_volatile", _UNCORRECTED, _VOLATILE),
    _total("corrected_aggregate", _CORRECTED, _AGGREGATE),
    _total("uncorrected_aggregate", _UNCORRECTED, _AGGREGATE),
    _located("uncorrected_volatile_dram", _UNCORRECTED, _VOLATILE, _DRAM),
    _located("uncorrected_volatile_sram", _UNCORRECTED, _VOLATILE, _SRAM),
    (("sram_threshold_exceeded", "sram_uncorrected_parity", "sram_uncorrected_secded"), _sram),
    (("remapped_corrected", "remapped_uncorrected", "remap_pending", "remap_failure"), _remapped_rows),
    (("remap_banks_low", "remap_banks_without_spare"), _remap_banks),
    _one("retired_pages_pending", "nvmlDeviceGetRetiredPagesPendingStatus", kind=bool),
    _field("retired_pages_corrected", "NVML_FI_DEV_RETIRED_SBE"),
    _field("retired_pages_uncorrected", "NVML_FI_DEV_RETIRED_DBE"),
    _one("pcie_generation", "nvmlDeviceGetCurrPcieLinkGeneration"),
    _one("pcie_generation_max", "nvmlDeviceGetMaxPcieLinkGeneration"),
    _one("pcie_width", "nvmlDeviceGetCurrPcieLinkWidth"),
    _one("pcie_width_max", "nvmlDeviceGetMaxPcieLinkWidth"),
    _one("pcie_replays", "nvmlDeviceGetPcieReplayCounter"),
    _one("pcie_tx_kib_per_second", "nvmlDeviceGetPcieThroughput", _PCIE_TX),  # each of the two blocks for 20 ms
    _one("pcie_rx_kib_per_second", "nvmlDeviceGetPcieThroughput", _PCIE_RX),
    (("nvlinks", "nvlinks_up"), _nvlinks),
    _nvlink_errors("nvlink_crc_errors", (_CRC_FLIT, _CRC_DATA), ("NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_ERRORS",)),
    _nvlink_errors("nvlink_replays", (_REPLAY,), ("NVML_FI_DEV_NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS",)),
    _nvlink_errors("nvlink_recoveries", (_RECOVERY,), ("NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS",)),
    (("clocks_event_reasons",), _clocks_reasons),
    _one("performance_state", "nvmlDeviceGetPerformanceState"),
    _one("sm_clock_mhz", "nvmlDeviceGetClockInfo", _CLOCK_SM),
    _one("memory_clock_mhz", "nvmlDeviceGetClockInfo", _CLOCK_MEMORY),
    _one("temperature_c", "nvmlDeviceGetTemperature", _SENSOR_GPU),
    _one("temperature_slowdown_c", "nvmlDeviceGetTemperatureThreshold", _THRESHOLD_SLOWDOWN),
    _field("memory_temperature_c", "NVML_FI_DEV_MEMORY_TEMP"),
    _one("power_mw", "nvmlDeviceGetPowerUsage"),
    _one("power_limit_mw", "nvmlDeviceGetEnforcedPowerLimit"),
    (("utilization_percent",), _utilisation),
    (("memory_used_bytes", "memory_total_bytes"), _memory),
    (("compute_processes",), _processes),
    _one("persistence_mode", "nvmlDeviceGetPersistenceMode", kind=bool),
    (("fabric_state", "fabric_status", "fabric_health_mask", "fabric_health"), _fabric),
    (("mig_mode",), _mig),
)
FIELDS = (*_FACTS, *(name for names, _ in READERS for name in names))
