"""The watchdog's metrics, as Prometheus text: what it counts, and what its document says at the moment of the scrape.

Labels are few and bounded: slots, UUIDs, names of checks and fields; never the text of a fault.
"""

from __future__ import annotations

import re
import time
from typing import Any

from appliance.gateway.metrics import Counter, Gauge, Metric, render
from healthcheck.document import Document

_LABEL = re.compile(r"[^a-zA-Z0-9_.:-]")
_MAX_KEYS = 200  # of signals: the policy has fewer


class Counters:
    """What the watchdog counts from its start."""

    def __init__(self) -> None:
        self.signals = Counter(
            "appliance_watchdog_signals_total", "Signals by key, before they are joined to incidents", ("gpu", "key")
        )
        self.transitions = Counter(
            "appliance_watchdog_transitions_total", "Changes of a GPU's state", ("gpu", "from", "to")
        )
        self.resets = Counter("appliance_gpu_resets_total", "Resets of a GPU by result (ok, failed)", ("gpu", "result"))
        self.verifications = Counter(
            "appliance_gpu_verifications_total", "Verifications after an incident, by result", ("gpu", "result")
        )
        self.golden = Counter(
            "appliance_gpu_golden_total", "Comparisons of golden answers and weights, by verdict", ("gpu", "verdict")
        )
        self.alerts = Counter("appliance_watchdog_alerts_total", "What a human was told", ("gpu",))
        self.hangs = Counter("appliance_watchdog_nvml_hangs_total", "NVML children that were killed because they hung")
        self.lost = Counter("appliance_watchdog_kernel_log_lost_total", "Records of the kernel's log that were missed")
        self.ledger = Counter("appliance_watchdog_ledger_errors_total", "Times that gpus.json could not be written")
        for counter in (self.hangs, self.lost, self.ledger):
            counter.inc(by=0)  # so that the first one is a change

    def all(self) -> list[Metric]:
        return [
            self.signals, self.transitions, self.resets, self.verifications, self.golden, self.alerts, self.hangs,
            self.lost, self.ledger,
        ]  # fmt: skip

    def signal(self, gpu: str, key: str) -> None:
        known = (gpu, key) in self.signals.values or len(self.signals.values) < _MAX_KEYS
        self.signals.inc(gpu, _LABEL.sub("_", key[:60]) if known else "other")


def text(counters: Counters, document: Document, readings: dict[int, dict[str, Any]]) -> bytes:
    """`readings`: slot -> the last reading's fields; numbers only are shown."""
    return render([*counters.all(), *_gauges(document), *_readings(document, readings)])


def _gauges(document: Document) -> list[Metric]:
    now = time.time()
    up = Gauge("appliance_watchdog_up", "1, with how it sees the GPUs (on, off, scripted)", ("nvml",))
    up.set(1, document["nvml"])
    breaker = Gauge("appliance_watchdog_breaker_open", "1 while automation has stopped itself")
    breaker.set(document["breaker"] is not None)
    maintenance = Gauge("appliance_watchdog_maintenance", "1 while a human has stopped automation")
    maintenance.set(document["maintenance"] is not None)
    state = Gauge("appliance_gpu_state", "1 for the state a GPU is in", ("gpu", "uuid", "state"))
    needs = Gauge("appliance_gpu_needs", "1 where a GPU waits for somebody (human, rma, reboot)", ("gpu", "needs"))
    since = Gauge("appliance_gpu_state_since_seconds", "UTC seconds of its last change of state", ("gpu",))
    age = Gauge("appliance_gpu_probe_age_seconds", "Since NVML last told of it", ("gpu",))
    attempts = Gauge("appliance_gpu_reset_attempts", "Resets that still count against its limit", ("gpu",))
    checks = Gauge("appliance_gpu_check", "1 for the status a check has", ("gpu", "check", "status"))
    phases = Gauge("appliance_gpu_phase_seconds", "Of its last incident, by phase", ("gpu", "phase"))
    for row in document["gpus"]:
        gpu = str(row["gpu"])
        state.set(1, gpu, row["uuid"], row["state"])
        if row["needs"]:
            needs.set(1, gpu, row["needs"])
        since.set(row["since"] or 0, gpu)
        if row["probed_at"] is not None:
            age.set(round(max(0.0, now - row["probed_at"]), 3), gpu)
        attempts.set(row["resets"], gpu)
        for check in row["checks"]:
            checks.set(1, gpu, check["name"], check["status"])
        for phase, seconds in row["phases"].items():
            phases.set(seconds, gpu, phase)
    return [up, breaker, maintenance, state, needs, since, age, attempts, checks, phases]


def _readings(document: Document, readings: dict[int, dict[str, Any]]) -> list[Metric]:
    """What NVML says, as it says it: corrected errors are here and nowhere else."""
    fields = Gauge("appliance_gpu_nvml", "What NVML says of a GPU; healthcheck/nvml_child.py", ("gpu", "field"))
    for gpu, values in sorted(readings.items()):
        for name, value in values.items():
            if isinstance(value, (int, float)) and value == value and abs(value) != float("inf"):
                fields.set(float(value), str(gpu), _LABEL.sub("_", name))
    return [fields]
