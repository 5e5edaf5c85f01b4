"""What the canary's state files say, as metrics: the controller listens on no port, and this works while it is down.

Two files: the run (canary/store.py, durable) and what the controller says of itself every few seconds (gone after a
reboot). Both gateways of a host tell the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from appliance.gateway.metrics import Gauge, Metric
from appliance.paths import Paths

MAX_BYTES = 4 << 20
_ENDED = ("settled", "failed", "aborted")


class _Run(msgspec.Struct):
    """Of canary/run.py:Run, what is shown."""

    phase: str
    weight: float = 0.0
    paused: str | None = None
    held: str | None = None
    ended_at: float | None = None


class _Controller(msgspec.Struct):
    """What canary/store.py:Store.say_alive writes."""

    at: float
    repairs: int = 0
    rule_seconds: float | None = None
    rule_error: str | None = None


def canary_gauges(paths: Paths) -> list[Metric]:
    on = Gauge("appliance_canary_run_on", "1 while a canary run is on")
    phase = Gauge("appliance_canary_run_phase", "1 for the phase of the present or last run", ("phase",))
    weight = Gauge("appliance_canary_weight_percent", "Share of new connections that the canary should get now")
    waiting = Gauge("appliance_canary_run_waiting", "1 while a run is paused or waits for `canary promote`")
    ended = Gauge("appliance_canary_run_ended_timestamp_seconds", "When the last run ended, by its result", ("result",))
    seen = Gauge(
        "appliance_canary_controller_seen_timestamp_seconds", "When the canary's controller last said that it runs"
    )
    repairs = Gauge("appliance_canary_rule_repairs_total", "Times that rules others changed were put back")
    repairs.kind = "counter"
    took = Gauge("appliance_canary_rule_change_seconds", "What the last change of the rule took, read back")
    broken = Gauge("appliance_canary_rule_error", "1 while the rule cannot be set")
    run, controller = _read(paths.canary_run, _Run), _read(paths.canary_alive, _Controller)
    over = run is None or run.phase in _ENDED
    on.set(not over)
    weight.set(run.weight if run is not None and not over else 0.0)
    waiting.set(run is not None and not over and (run.paused is not None or run.held is not None))
    if run is not None:
        phase.set(1, run.phase)
        if over and run.ended_at is not None:
            ended.set(run.ended_at, run.phase)
    seen.set(controller.at if controller is not None else 0.0)
    if controller is not None:
        repairs.set(controller.repairs)
        broken.set(controller.rule_error is not None)
        if controller.rule_seconds is not None:
            took.set(controller.rule_seconds)
    return [on, phase, weight, waiting, ended, seen, repairs, took, broken]


def _read(path: Path, kind: Any) -> Any:
    """None where there is no such file, or one that another version wrote: then nothing is said of it."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(MAX_BYTES), type=kind)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
