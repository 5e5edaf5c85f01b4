"""Thresholds of the probes and checks: the table [limits] of the policy (policy.toml, /etc/appliance/healthcheck.toml).

Where nobody publishes a figure it is ours, and then it only alerts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from appliance.log import ApplianceError, ExitCode

# Below these a watchdog only looks after itself; above them it does not look after anybody.
_Probe = Annotated[float, Meta(ge=0.5, le=3600)]
_Beat = Annotated[float, Meta(ge=0.1, le=3600)]
_Golden = Annotated[float, Meta(ge=1, le=86400)]
_Deadline = Annotated[float, Meta(ge=0.5, le=600)]
_Seconds = Annotated[float, Meta(gt=0, le=86400)]
_Samples = Annotated[int, Meta(ge=1, le=1000)]
_Rate = Annotated[float, Meta(gt=0, le=1e12)]


class Limits(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    probe_interval: _Probe = 30.0  # s between two readings without an event
    heartbeat_interval: _Beat = 5.0  # s between two questions to an engine
    golden_interval: _Golden = 600.0  # s between two comparisons of an engine's golden answers and weights
    # s for one GPU. A call that waits for a dead GSP returns after 45 s (open-gpu-kernel-modules #446), and one on a
    # GPU full of corrected errors may take as long (NVIDIA/DCGM #313): killed earlier, neither would ever be read.
    probe_deadline: _Deadline = 60.0
    probe_misses: _Samples = 3  # hangs of one GPU in a row until it is signalled
    reading_stale: _Seconds = 180.0  # s: an older reading is unknown
    corrected_per_second: _Rate = 10.0  # DCGM's MAX_SBE_RATE; "a dummy value", as it says itself: alerts only
    remapped_rows: _Samples = 512  # DCGM's MAX_ROW_REMAP_UNCORRECTABLE
    pcie_replay_factor: _Rate = 1.0  # times DCGM's limits per minute, lane and generation
    link_samples: _Samples = 3  # under load, in a row
    load_percent: Annotated[float, Meta(ge=0, le=100)] = 50.0  # utilisation from which a link has to be at its best
    nvlink_errors_per_second: _Rate = 100.0  # DCGM's MAX_NVLINK_CRC_ERROR
    clocks_window: Annotated[int, Meta(ge=1, le=100)] = 10  # readings
    clocks_hits: Annotated[int, Meta(ge=1, le=100)] = 6  # of them: gpud's 0.6 a minute
    settle_samples: _Samples = 3  # readings in a row that persistence mode and the fabric get after a boot


class LimitsError(ApplianceError):
    """[limits] of the policy cannot be used; names the value. A restart does not help."""

    exit_code = ExitCode.REFUSED


def read_limits(table: Mapping[str, Any]) -> Limits:
    """LimitsError names the value and what would do."""
    try:
        limits = msgspec.convert(dict(table), Limits)
    except msgspec.ValidationError as error:
        names = ", ".join(Limits.__struct_fields__)
        raise LimitsError(f"[limits]: {error}", hint=f"known: {names}") from None
    if limits.clocks_hits > limits.clocks_window:
        raise LimitsError("[limits]: clocks_hits is larger than clocks_window", hint="hits are readings of the window")
    return limits
