"""Checks of what connects a GPU: PCIe, NVLink, the fabric. Faults here are alerts: a reset is no sure cure of any.

A link's generation and width may drop while a GPU has nothing to do (nvml.h), so they count only under load; how many
NVLinks are normal depends on the product and the board, so they are compared with the most that were seen on this GPU.
"""

from __future__ import annotations

from healthcheck.types import Check, Status
from healthcheck.view import View

# DCGM, common/DcgmGPUHardwareLimits.h: replays per minute and lane by PCIe generation.
_REPLAYS = {1: 0.15, 2: 0.3, 3: 0.48, 4: 0.96, 5: 1.92, 6: 3.84}
_FEWEST_REPLAYS = 3  # in one interval: less says nothing of a rate
_IDLE = 0x1  # nvmlClocksEventReasonGpuIdle
_FABRIC_STATES = {1: "not started", 2: "in progress", 3: "completed"}  # NVML_GPU_FABRIC_STATE_*; 0: not supported
# NVML_GPU_FABRIC_HEALTH_MASK_*: (shift, what 1 means). 0 is not supported and 2 is healthy, so a mask that is not 0 is
# no fault by itself.
_FABRIC_FAULTS = (
    (0, "degraded bandwidth"), (2, "route recovery in progress"), (4, "unhealthy route"),
    (6, "access timeout recovery in progress"),
)  # fmt: skip
_FABRIC_CONFIGURATION = (8, 0xF, 1)  # shift, width, the value that means "none wrong"; 0 is not supported
_FABRIC_SUMMARY = {2: "unhealthy", 3: "limited capacity"}  # NVML_GPU_FABRIC_HEALTH_SUMMARY_*


def pcie_link(view: View) -> Check:
    name = "PCIe link"
    width, best_width = view.number("pcie_width"), view.number("pcie_width_max")
    generation, best_generation = view.number("pcie_generation"), view.number("pcie_generation_max")
    if width is None or best_width is None or generation is None or best_generation is None:
        missing = next(n for n in ("pcie_width", "pcie_width_max", "pcie_generation", "pcie_generation_max")
                       if view.number(n) is None)  # fmt: skip
        return view.unknown(name, missing)
    now, best = f"gen {generation:g} x{width:g}", f"gen {best_generation:g} x{best_width:g}"
    if width >= best_width and generation >= best_generation:
        view.streak("link", False)
        return Check(name, Status.OK, now, now)
    if not _under_load(view):  # neither for nor against: the streak stays as it is
        return Check(name, Status.OK, f"{now} of {best}, not under load: not judged", now)
    if view.streak("link", True) < view.limits.link_samples:
        return Check(name, Status.OK, f"{now} of {best} under load, for the moment", now)
    view.signal("link:degraded", f"PCIe {now} under load instead of {best}")
    return Check(name, Status.DEGRADED, f"{now} under load instead of {best}", now)


def _under_load(view: View) -> bool:
    """False also where it is not known."""
    reasons, percent = view.number("clocks_event_reasons"), view.number("utilization_percent")
    busy = percent is not None and percent >= view.limits.load_percent
    return busy and reasons is not None and not int(reasons) & _IDLE


def pcie_replays(view: View) -> Check:
    name, field = "PCIe replays", "pcie_replays"
    count = view.number(field)
    if count is None:
        return view.unknown(name, field)
    added, rate = view.added(field), view.rate(field)
    generation, width = view.number("pcie_generation_max"), view.number("pcie_width_max")
    if rate is not None and generation is not None and width is not None:
        limit = _REPLAYS.get(int(generation), _REPLAYS[max(_REPLAYS)]) * width * view.limits.pcie_replay_factor
        if rate * 60 > limit and added >= _FEWEST_REPLAYS:
            reason = f"{rate * 60:.4g} per minute, more than {limit:.4g}"
            view.signal("pcie:replays", reason)
            return Check(name, Status.DEGRADED, reason, int(count))
    return Check(name, Status.OK, f"{int(count)} since the last reset", int(count))


def nvlink(view: View) -> Check | None:
    name, field = "NVLink", "nvlinks_up"
    up, before = view.number(field), view.best_before(field)
    if up is None:
        return None if before is None else view.unknown(name, field)
    best = view.best(field, int(up))
    if up < best:
        view.signal("nvlink:down", f"{up:g} links are up, there were {best}")
        return Check(name, Status.DEGRADED, f"{up:g} links are up, there were {best}", int(up))
    return Check(name, Status.OK, f"{up:g} links are up", int(up))


def nvlink_errors(view: View) -> Check | None:
    name, field = "NVLink errors", "nvlink_crc_errors"
    count = view.number(field)
    if count is None:
        return None
    rate = view.rate(field)
    if rate is not None and rate > view.limits.nvlink_errors_per_second:
        view.signal("nvlink:errors", f"{rate:.4g} per second")
        return Check(name, Status.DEGRADED, f"{rate:.4g} per second", int(count))
    return Check(name, Status.OK, f"{int(count)} in all", int(count))


def fabric(view: View) -> Check | None:
    """Both the state and its result count: "completed" with "insufficient resources" is on record for 20 days."""
    name, state = "fabric", view.number("fabric_state")
    if state is None or state == 0:
        return None  # no NVSwitch here
    faults = fabric_faults(view)
    if view.streak("fabric", bool(faults)) >= view.limits.settle_samples:
        view.signal("fabric:unhealthy", "; ".join(faults))
        return Check(name, Status.DEGRADED, "; ".join(faults), int(state))
    if faults:
        return Check(name, Status.OK, f"{'; '.join(faults)}: for less than a few readings", int(state))
    return Check(name, Status.OK, "completed", int(state))


def fabric_faults(view: View) -> list[str]:
    """What NVML says is wrong with the fabric of a GPU that has one."""
    state, status = view.number("fabric_state"), view.number("fabric_status")
    faults = []
    if state != 3:
        faults.append(f"registration: {_FABRIC_STATES.get(int(state or 0), f'state {state}')}")
    elif status:
        faults.append(f"registration completed with NVML error {status:g}")
    mask = int(view.number("fabric_health_mask") or 0)
    faults += [text for shift, text in _FABRIC_FAULTS if mask >> shift & 0x3 == 1]
    shift, width, none_wrong = _FABRIC_CONFIGURATION
    if mask >> shift & width > none_wrong:
        faults.append(f"incorrect configuration {mask >> shift & width}")
    if summary := _FABRIC_SUMMARY.get(int(view.number("fabric_health") or 0)):
        faults.append(f"summary: {summary}")
    return faults
