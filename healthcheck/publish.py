"""What the watchdog shows: its document (document.py), as a state file, over HTTP, and as metrics."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from appliance.launcher.state import StateFile
from healthcheck import metrics
from healthcheck.document import SCHEMA, Document, check_row
from healthcheck.machine_types import GpuState, Incident, Record, State
from healthcheck.types import Status

if TYPE_CHECKING:
    from healthcheck.service import Service

_MAX_SEEN = 8  # signals of an incident that are shown


class Publisher:
    def __init__(self, service: Service, file: StateFile) -> None:
        self._service, self._file = service, file
        self._since = round(time.time(), 3)
        self._phases: dict[int, dict[str, float]] = {}
        self._unknown: dict[str, float] = {}  # checks of the host -> since when

    def phases(self, record: Record) -> None:
        """Remembers how long each part of the last incident took; several turns of one part add up."""
        if record.phases:
            sums: dict[str, float] = {}
            for name, seconds in record.phases:
                sums[name] = round(sums.get(name, 0.0) + seconds, 3)
            self._phases[record.gpu] = sums

    def now(self) -> str:
        """Writes the state file if it has changed; the line for systemctl status."""
        document = self.document()
        if not self._file.write(document):
            self._service.loop.later(1.0, self._service.changed)
        return str(document["status"])

    def document(self) -> Document:
        service, host = self._service, self._service.host
        maintenance = None
        if host.maintenance is not None:
            maintenance = {"reason": host.maintenance, "since": self._maintenance_since()}
        return {
            "pid": os.getpid(),
            "since": self._since,
            "status": self._status(),
            "backend": service.backend,
            "nvml": service.probes.kind,
            "probe_interval": service.probe_interval,
            "test": service.test,
            "maintenance": maintenance,
            "breaker": host.halt.reason if host.halt is not None else None,
            "saved": service.saved,
            "unsaved": service.unsaved,
            "resetting": host.resetting,
            "checks": self._host_checks(),
            "gpus": [self._gpu(host.gpus[slot]) for slot in sorted(host.gpus)],
            "alerts": list(service.alerts),
            "counters": {
                "nvml_hangs": sum(service.counters.hangs.values.values()),
                "kernel_log_lost": sum(service.counters.lost.values.values()),
            },
        }

    def _host_checks(self) -> list[Document]:
        """With "unknown_since" where that is what it is."""
        rows, before = [check_row(check) for check in self._service.probes.host_checks()], self._unknown
        unknown = [row["name"] for row in rows if row["status"] == Status.UNKNOWN]
        self._unknown = {name: before.get(name, round(time.time(), 3)) for name in unknown}
        return [row | {"unknown_since": self._unknown.get(row["name"])} for row in rows]

    def _maintenance_since(self) -> float:
        """When the first GPU was put aside: all are at once."""
        paused = [gpu.since for gpu in self._service.host.gpus.values() if gpu.state is State.MAINTENANCE]
        return min(paused, default=self._since)

    def _gpu(self, gpu: GpuState) -> Document:
        service, engines = self._service, self._service.engines.get(gpu.gpu)
        view = service.launchers.views.get(gpu.gpu)
        checks = [*service.probes.checks(gpu.uuid), *(engines.checks() if engines is not None else [])]
        return {
            "gpu": gpu.gpu,
            "uuid": gpu.uuid,
            "state": str(gpu.state),
            "stage": gpu.stage,
            "reason": gpu.reason,
            "since": gpu.since,
            "needs": str(gpu.needs) if gpu.needs is not None else None,
            "attempts": [asdict(attempt) for attempt in gpu.attempts],
            "resets": self._resets(gpu),
            "share": view.share if view is not None else 1.0,
            "holds": sorted(view.holds) if view is not None else None,
            "deadline": gpu.deadline,
            "incident": _incident(gpu.incident),
            "owed": _incident(gpu.owed),
            "probed_at": service.probes.probed_at(gpu.uuid),
            "checks": [check_row(check) for check in checks],
            "phases": self._phases.get(gpu.gpu, {}),
        }

    def _resets(self, gpu: GpuState) -> int:
        """Those that count against its limit now."""
        horizon = time.time() - self._service.policy.attempts.window
        return sum(attempt.kind == "reset" and attempt.at > horizon for attempt in gpu.attempts)

    def _status(self) -> str:
        """One line, the worst first."""
        host = self._service.host
        parts = [] if self._service.saved else ["gpus.json CANNOT BE WRITTEN"]
        if host.halt is not None:
            parts.append(f"automation is stopped: {host.halt.reason}")
        if host.maintenance is not None:
            parts.append(f"maintenance: {host.maintenance}")
        healthy = 0
        for slot, gpu in sorted(host.gpus.items()):
            healthy += gpu.state is State.HEALTHY
            if gpu.state not in (State.HEALTHY, State.MAINTENANCE):
                parts.append(f"gpu {slot} {gpu.state}: {gpu.reason}")
        parts.append(f"{healthy} of {len(host.gpus)} GPUs healthy" if host.gpus else "no GPU slot is bound")
        if down := [str(slot) for slot in sorted(host.gpus) if slot not in self._service.launchers.views]:
            parts.append(f"the launcher of gpu {', '.join(down)} is down")
        return "; ".join(parts)

    # -- over HTTP
    def state_route(self) -> tuple[str, bytes]:
        return "application/json", json.dumps({"schema": SCHEMA} | self.document()).encode() + b"\n"

    def metrics_route(self) -> tuple[str, bytes]:
        service = self._service
        readings = {slot: service.probes.fields(gpu.uuid) for slot, gpu in service.host.gpus.items()}
        body = metrics.text(service.counters, self.document(), readings)
        return "text/plain; version=0.0.4; charset=utf-8", body


def _incident(incident: Incident | None) -> dict[str, Any] | None:
    if incident is None:
        return None
    return {
        "cause": incident.cause,
        "detail": incident.detail,
        "action": incident.action.name.lower(),
        "began": incident.began,
        "resets": incident.resets,
        "seen": [asdict(seen) for seen in incident.seen[:_MAX_SEEN]],
    }
