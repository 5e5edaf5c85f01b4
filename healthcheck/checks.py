"""What a reading means: checks for people, signals for the policy. Pure.

judge(reading, what was before, limits) -> the checks of one GPU, its signals, and what the next one is compared with.

Counters count by what was added since the last reading: aggregate ones are for the life of the board, and volatile ones
go back whenever the driver forgets them (a reset, or the last client gone), which is no fault: a new beginning. Levels
(recovery action, remap flags, SRAM threshold) count each time: a fault from before our start left no difference. What
is not known is UNKNOWN and brings no signal; what this kind of GPU has not at all is not listed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import msgspec

from healthcheck.limits import Limits
from healthcheck.link_checks import fabric, nvlink, nvlink_errors, pcie_link, pcie_replays
from healthcheck.nvml import Hang, Round
from healthcheck.nvml_protocol import Event
from healthcheck.types import Check, GpuReading, Signal, Status
from healthcheck.view import Baseline, View

__all__ = ["Baseline", "Judged", "Limits", "check_age", "check_hosts_gpus", "event_signals", "hang_signals", "judge"]

RECOVERY_ACTIONS = {  # nvml.h NVML_GPU_RECOVERY_ACTION_*; values that are not here are not guessed
    0: "none", 1: "reset the GPU", 2: "reboot the host", 3: "drain peer-to-peer work", 4: "drain and reset",
    5: "recover the IMEX domain", 6: "bus reset", 7: "reboot the system",
}  # fmt: skip
_ERRORS = {  # of a whole GPU: what is said, and the signal
    "gpu_is_lost": ("NVML: the GPU is lost", "nvml:gpu_is_lost"),
    "reset_required": ("NVML: the GPU requires a reset", "nvml:reset_required"),
}
# nvml.h nvmlClocksEventReasons*. The rest is ordinary: idle, clocks that were set, the power cap under load.
CLOCKS_REASONS = {
    0x1: "idle", 0x2: "application clocks", 0x4: "software power cap", 0x8: "hardware slowdown", 0x10: "sync boost",
    0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown", 0x80: "power brake", 0x100: "display clocks",
}  # fmt: skip
_BAD_CLOCKS = {0x80: "clocks:power_brake", 0x40: "clocks:thermal", 0x8: "clocks:slowdown"}


@dataclass(frozen=True, slots=True)
class Judged:
    checks: tuple[Check, ...]
    signals: tuple[Signal, ...]
    baseline: Baseline


def judge(reading: GpuReading, before: Baseline | None, limits: Limits) -> Judged:
    """`before`: the baseline that the last reading left, kept over restarts of the watchdog; None: there is none."""
    view = View(reading, before or Baseline(), limits)
    checks = [_answer(view)]
    if reading.error not in ("gpu_is_lost", "not_found"):
        checks += [check for function in CHECKS if (check := function(view)) is not None]
    return Judged(tuple(checks), tuple(view.signals), view.next)


def _answer(view: View) -> Check:
    error = view.reading.error
    if error is None:
        return Check("NVML", Status.OK, "answers", True)
    if error in _ERRORS:
        reason, key = _ERRORS[error]
        view.signal(key, reason)
        return Check("NVML", Status.FAILED, reason, error)
    if error == "not_found":  # whether it is missing is said once for the host, see check_hosts_gpus
        return Check("NVML", Status.FAILED, "NVML does not list it", error)
    return Check("NVML", Status.UNKNOWN, f"could not be read: {error}", error)


def _recovery_action(view: View) -> Check:
    name = "recovery action"
    action = view.number("recovery_action")
    if action is None:
        return view.unknown(name, "recovery_action")
    meaning = RECOVERY_ACTIONS.get(int(action), "not known to this version")
    reason = f"{int(action)}: {meaning}"
    if action == 0:
        return Check(name, Status.OK, meaning, 0)
    view.signal(f"recovery_action:{int(action)}", f"NVML field 230 is {reason}")
    return Check(name, Status.FAILED, reason, int(action))


def _uncorrected(view: View) -> Check:
    name, field = "uncorrected errors", "uncorrected_volatile"
    count = view.number(field)
    if count is None:
        return view.unknown(name, field)
    new = view.added(field)
    places = {place.upper(): view.added(f"{field}_{place}") for place in ("dram", "sram")}  # noted also if none is new
    if new:
        where = ", ".join(f"{added} in {place}" for place, added in places.items() if added)
        detail = f"{new} uncorrected memory errors since the last reading ({int(count)} since the driver was loaded)"
        detail += f": {where}" if where else ""
        if view.number("recovery_action") is None:
            detail += "; the recovery action is not known"
        view.signal("ecc:uncorrected", detail)
        return Check(name, Status.FAILED, detail, int(count))
    return Check(name, Status.OK, f"{int(count)} since the driver was loaded, none new", int(count))


def _corrected(view: View) -> Check:
    name, field = "corrected errors", "corrected_volatile"
    count = view.number(field)
    if count is None:
        return view.unknown(name, field)
    rate = view.rate(field)
    if rate is not None and rate > view.limits.corrected_per_second:
        detail = f"{rate:.4g} corrected memory errors per second: no data is damaged"
        view.signal("ecc:corrected_rate", detail)
        return Check(name, Status.DEGRADED, detail, int(count))
    return Check(name, Status.OK, f"{int(count)} since the driver was loaded", int(count))


def _aggregate(view: View) -> Check | None:
    uncorrected, corrected = view.number("uncorrected_aggregate"), view.number("corrected_aggregate")
    if uncorrected is None or corrected is None:
        return None  # where the volatile ones are not known either, that is said there
    reason = f"{int(uncorrected)} uncorrected, {int(corrected)} corrected in the life of the board: history"
    return Check("errors ever", Status.OK, reason, int(uncorrected))


def _ecc_mode(view: View) -> Check:
    name = "ECC"
    current, pending = view.flag("ecc_mode"), view.flag("ecc_mode_pending")
    if current is None:
        return view.unknown(name, "ecc_mode")
    if not current:
        view.signal("ecc:off", "ECC is off: errors are not seen")
        return Check(name, Status.DEGRADED, "off: errors are not seen", False)
    if pending is False:
        view.signal("ecc:pending_off", "ECC will be off after the next reset or reboot")
        return Check(name, Status.DEGRADED, "on, but off after the next reset or reboot", True)
    return Check(name, Status.OK, "on", True)


def _sram(view: View) -> Check:
    name, field = "SRAM threshold", "sram_threshold_exceeded"
    exceeded = view.flag(field)
    if exceeded is None:
        return view.unknown(name, field)
    if exceeded:
        view.signal("sram:threshold", "the threshold of uncorrectable SRAM errors is exceeded: a case for RMA")
        return Check(name, Status.FAILED, "exceeded: a case for RMA", True)
    return Check(name, Status.OK, "not exceeded", False)


def _remapped_rows(view: View) -> Check | None:
    name = "row remapping"
    pending, failure = view.flag("remap_pending"), view.flag("remap_failure")
    if failure is None and pending is None:
        if view.flag("retired_pages_pending") is not None:
            return None  # an older generation: it retires pages
        return view.unknown(name, "remap_failure")
    uncorrected = int(view.number("remapped_uncorrected") or 0)
    rows = f"{uncorrected} rows for uncorrected, {int(view.number('remapped_corrected') or 0)} for corrected errors"
    if failure:
        view.signal("remap:failure", f"a row could not be remapped ({rows}): a case for RMA")
        return Check(name, Status.FAILED, f"failed: a case for RMA ({rows})", "failure")
    if pending:
        view.signal("remap:pending", f"a row is to be remapped by the next reset ({rows})")
        return Check(name, Status.DEGRADED, f"pending until the next reset ({rows})", "pending")
    if uncorrected >= view.limits.remapped_rows:
        return Check(name, Status.DEGRADED, f"{rows}: spare rows run out", uncorrected)
    return Check(name, Status.OK, f"{rows}: history", uncorrected)


def _retired_pages(view: View) -> Check | None:
    """Before Ampere; later generations remap rows instead."""
    pending = view.flag("retired_pages_pending")
    if pending is None:
        return None
    if pending:
        view.signal("pages:pending", "memory pages are to be retired by the next reset")
        return Check("retired pages", Status.DEGRADED, "pending until the next reset", True)
    return Check("retired pages", Status.OK, "none pending", False)


def _clocks(view: View) -> Check:
    """Only what is sustained, and only what is not ordinary under load; none of it is cured by a reset."""
    name, field = "clocks", "clocks_event_reasons"
    found = view.number(field)
    if found is None:
        return view.unknown(name, field)
    mask = int(found)
    words = ", ".join(text for bit, text in CLOCKS_REASONS.items() if mask & bit)
    rest = mask & ~sum(CLOCKS_REASONS)
    words = ", ".join(filter(None, [words, f"{rest:#x}" if rest else ""])) or "not limited"
    counts = {bit: view.recent(f"clocks {bit:#x}", bool(mask & bit)) for bit in _BAD_CLOCKS}
    lasting = [bit for bit, count in counts.items() if count >= view.limits.clocks_hits]
    # Hardware slowdown is set together with its reason: then the reason alone is told.
    if len(lasting) > 1 and 0x8 in lasting:
        lasting.remove(0x8)
    for bit in lasting:
        text = f"{CLOCKS_REASONS[bit]} in {counts[bit]} of the last {view.limits.clocks_window} readings"
        view.signal(_BAD_CLOCKS[bit], text)
    if lasting:
        return Check(name, Status.DEGRADED, f"held down: {words}", mask)
    return Check(name, Status.OK, words, mask)


def _temperature(view: View) -> Check:
    name = "temperature"
    degrees, slowdown = view.number("temperature_c"), view.number("temperature_slowdown_c")
    if degrees is None:
        return view.unknown(name, "temperature_c")
    if slowdown is not None and slowdown > 0 and degrees >= slowdown:
        count = view.streak("temperature", True)
        if count >= view.limits.settle_samples:
            view.signal("temperature:slowdown", f"{degrees:g} °C, it slows down from {slowdown:g} °C on")
            return Check(name, Status.DEGRADED, f"{degrees:g} °C, slows down from {slowdown:g} °C on", degrees)
    else:
        view.streak("temperature", False)
    return Check(name, Status.OK, f"{degrees:g} °C", degrees)


def _power(view: View) -> Check:
    watts, limit = view.number("power_mw"), view.number("power_limit_mw")
    if watts is None:
        return view.unknown("power", "power_mw")
    of = f" of {limit / 1000:.0f} W" if limit else ""
    return Check("power", Status.OK, f"{watts / 1000:.0f} W{of}", watts / 1000)


def _persistence(view: View) -> Check:
    """Right after a boot nvidia-persistenced may not be there yet."""
    name, on = "persistence mode", view.flag("persistence_mode")
    if on is None:
        return view.unknown(name, "persistence_mode")
    if view.streak("persistence", not on) >= view.limits.settle_samples:
        view.signal("persistence:off", "persistence mode is off: the driver forgets the GPU with its last client")
        return Check(name, Status.DEGRADED, "off: the driver forgets the GPU with its last client", False)
    return Check(name, Status.OK, "on" if on else "off, for less than a few readings", on)


def _mig(view: View) -> Check | None:
    if not view.flag("mig_mode"):
        return None
    view.signal("gpu:mig", "MIG is on, which the appliance does not support: counters are not to be had")
    return Check("MIG", Status.DEGRADED, "on: not supported, turn it off with nvidia-smi -mig 0", True)


CHECKS: tuple[Callable[[View], Check | None], ...] = (
    _recovery_action, _uncorrected, _corrected, _aggregate, _ecc_mode, _sram, _remapped_rows, _retired_pages,
    pcie_link, pcie_replays, nvlink, nvlink_errors, fabric, _clocks, _temperature, _power, _persistence, _mig,
)  # fmt: skip


def check_hosts_gpus(
    done: Round, readings: Mapping[str, GpuReading], bound: Collection[str], now: float
) -> tuple[list[Check], list[Signal]]:
    """The set of GPUs against those that were bound at install, after a round. `now`: UTC seconds. A round that did not
    come to its end, or in which a GPU could not be identified, says nothing of who is missing."""
    if not done.ok:
        signals = [Signal("nvml:driver_mismatch", None, done.detail, now, "nvml")]
        reason = f"NVML does not work: {done.error} ({done.detail})"
        if done.error == "driver_mismatch":
            reason = "the driver's libraries were replaced under the loaded module: reboot, or load the module anew"
        check = Check("GPUs", Status.UNKNOWN, reason, done.error)
        return [check], signals if done.error == "driver_mismatch" else []
    there = {uuid for uuid in done.read if readings[uuid].error != "not_found"}
    missing = sorted(set(bound) - there - set(done.skipped))
    unexpected = sorted(there - set(bound))
    if missing and done.unread:
        why = ", ".join(f"{where}: {error}" for where, error in done.unread.items())
        return [Check("GPUs", Status.UNKNOWN, f"{', '.join(missing)} or not: {why} could not be read", len(there))], []
    signals = [Signal("gpu:missing", uuid, "NVML does not list it", now, "nvml") for uuid in missing]
    signals += [Signal("gpu:unexpected", uuid, "not bound to a slot", now, "nvml") for uuid in unexpected]
    if missing:
        return [Check("GPUs", Status.FAILED, f"missing: {', '.join(missing)}", len(there))], signals
    if unexpected:
        reason = f"not bound to a slot: {', '.join(unexpected)}; a new card is bound by the install playbook"
        return [Check("GPUs", Status.DEGRADED, reason, len(there))], signals
    return [Check("GPUs", Status.OK, f"{len(bound)} of {len(bound)}", len(there))], signals


def event_signals(event: Event) -> list[Signal]:
    """Xids, and an uncorrected error. All other events only say that it is time to read the levels, which NvmlProbe
    does by itself."""
    if event.kind == "xid" and event.xid is not None:
        return [Signal(f"xid:{event.xid}", event.uuid, f"Xid {event.xid} (NVML event)", event.at, "nvml-event")]
    if event.kind == "double_bit":
        return [Signal("ecc:uncorrected", event.uuid, "uncorrected memory error (NVML event)", event.at, "nvml-event")]
    return []


def hang_signals(hang: Hang, limits: Limits, now: float) -> list[Signal]:
    """`now`: UTC seconds. A single hang may be a slow GPU: nothing follows from it."""
    if hang.in_row < limits.probe_misses:
        return []
    detail = f"NVML hung {hang.in_row} times in a row for {hang.seconds:g} s, in {hang.stage}"
    return [Signal("probe:hung", hang.uuid, detail, now, "nvml")]


def check_age(age: float | None, limits: Limits) -> Check:
    """`age`: NvmlProbe.age. What was read before that long is unknown now, whatever it said."""
    if age is None:
        return Check("probe", Status.UNKNOWN, "not read yet")
    if age > limits.reading_stale:
        return Check("probe", Status.UNKNOWN, f"last read {age:.0f} s ago", round(age, 1))
    return Check("probe", Status.OK, f"read {age:.0f} s ago", round(age, 1))


def encode_baselines(baselines: Mapping[str, Baseline]) -> dict[str, object]:
    """For a state file: UUID -> object."""
    return {uuid: msgspec.to_builtins(baseline) for uuid, baseline in baselines.items()}


def decode_baselines(state: Mapping[str, object]) -> dict[str, Baseline]:
    """What cannot be read is left out: that GPU begins anew, with its levels."""
    found = {}
    for uuid, value in state.items():
        try:
            found[uuid] = msgspec.convert(value, Baseline)
        except msgspec.ValidationError:
            continue
    return found
