"""NVML and the kernel's log together: what is read of each GPU, what that means, and what it is compared with next.

NvmlProbe (a child that may be killed) -> checks.judge -> signals; KmsgFollower -> signals. An event or a line of the
kernel has the levels read at once. The last counters and each GPU's PCI address are kept over restarts: a fault that
came while nobody looked leaves a difference, and a GPU that has gone can still be named.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.gpus import visible_gpus
from appliance.launcher.loop import Loop, Timer
from appliance.launcher.state import say
from appliance.log import ApplianceError
from appliance.statefile import read_state, write_state
from healthcheck.checks import (
    Baseline,
    check_hosts_gpus,
    decode_baselines,
    encode_baselines,
    event_signals,
    hang_signals,
    judge,
)
from healthcheck.kmsg import KmsgFollower
from healthcheck.limits import Limits
from healthcheck.metrics import Counters
from healthcheck.nvml import Hang, NvmlProbe, Round, child_command
from healthcheck.nvml_protocol import Event
from healthcheck.probes import Reread
from healthcheck.resetter import Nvml
from healthcheck.types import Check, GpuReading, Signal, Status
from healthcheck.verification import Found

SCHEMA = 1  # of paths.watchdog_memory
_REREAD_GRACE = 15.0  # s beyond the deadline of one call: the child may have to be started first
_LOST_SECONDS = 5.0  # between two looks at what the kernel's log has lost


@dataclass(slots=True)
class _Waiting:
    since: float  # UTC seconds
    done: Reread
    timer: Timer


class GpuProbes:
    """probes.Probes for GPUs, or for a script that stands in for NVML."""

    def __init__(
        self,
        loop: Loop,
        limits: Limits,
        memory: Path,
        on_signal: Callable[[Signal], None],
        on_change: Callable[[], None],
        counters: Counters,
        *,
        script: Path | None = None,
        kmsg: Path | None = Path("/dev/kmsg"),
    ) -> None:
        """memory: paths.watchdog_memory. script: of scripted_nvml.py. kmsg: None where the kernel's log is not ours."""
        self._loop, self._limits, self._memory = loop, limits, memory
        self._on_signal, self._on_change, self._counters = on_signal, on_change, counters
        self._script = script
        self._baselines, known = _remembered(memory)
        if script is None:
            known |= {gpu.pci: gpu.uuid for gpu in visible_gpus()}
        self._nvml = NvmlProbe(
            loop, child_command(None if script is None else str(script)), limits.probe_deadline,
            self._reading, self._event, self._hang, on_round=self._round, known=known,
        )  # fmt: skip
        self._kmsg: KmsgFollower | None = None
        self._kmsg_path = kmsg
        self._slots: dict[str, int] = {}
        self._checks: dict[str, tuple[Check, ...]] = {}
        self._signals: dict[str, tuple[Signal, ...]] = {}
        self._host: list[Check] = [Check("GPUs", Status.UNKNOWN, "not read yet")]
        self._hung: dict[str | None, Hang] = {}  # None: NVML as a whole
        self._waiting: dict[str, list[_Waiting]] = {}
        self._ready: Callable[[], None] | None = None
        self._lost = 0

    @property
    def kind(self) -> str:
        return "on" if self._script is None else "scripted"

    @property
    def gate(self) -> Nvml | None:
        return self._nvml

    # -- asking
    def start(self, ready: Callable[[], None]) -> None:
        self._ready = ready
        if self._kmsg_path is not None:
            test = self._script is not None
            self._kmsg = KmsgFollower(self._loop, self._line, self._nvml.known, self._kmsg_path, test_facility=test)
        self._count_lost()

    def look(self) -> None:
        self._nvml.read(patient=True)

    def reread(self, uuid: str, done: Reread) -> None:
        waiting = _Waiting(
            time.time(), done, self._loop.later(self._longest, lambda: self._answer(uuid, waiting, None))
        )
        self._waiting.setdefault(uuid, []).append(waiting)
        self._nvml.read()

    @property
    def _longest(self) -> float:
        return self._limits.probe_deadline + _REREAD_GRACE

    def _answer(self, uuid: str, waiting: _Waiting, action: int | None) -> None:
        waiting.timer.cancel()
        if waiting in self._waiting.get(uuid, []):
            self._waiting[uuid].remove(waiting)
            waiting.done(action)

    # -- what NVML says
    def _reading(self, reading: GpuReading) -> None:
        uuid = reading.uuid
        judged = judge(reading, self._baselines.get(uuid), self._limits)
        self._baselines[uuid] = judged.baseline
        self._checks[uuid], self._signals[uuid] = judged.checks, judged.signals
        self._hung.pop(uuid, None)
        self._hung.pop(None, None)
        for signal in judged.signals:
            self._on_signal(signal)
        action = reading.fields.get("recovery_action")
        for waiting in list(self._waiting.get(uuid, [])):
            if reading.at >= waiting.since:
                self._answer(uuid, waiting, action if type(action) is int else None)

    def _round(self, done: Round) -> None:
        checks, signals = check_hosts_gpus(done, self._nvml.readings, self._slots, time.time())
        self._host = checks
        for signal in signals:
            self._on_signal(signal)
        if done.ok:
            self._remember()
        self._looked()

    def _event(self, event: Event) -> None:
        for signal in event_signals(event):
            self._on_signal(signal)
        self._nvml.read()

    def _hang(self, hang: Hang) -> None:
        self._counters.hangs.inc()
        say(f"<4>NVML hung for {hang.seconds:g} s in {hang.stage}; its child was killed")
        self._hung[hang.uuid] = hang
        if hang.uuid is not None:
            for waiting in list(self._waiting.get(hang.uuid, [])):
                self._answer(hang.uuid, waiting, None)
        for signal in hang_signals(hang, self._limits, time.time()):
            self._on_signal(signal)
        self._looked()

    def _looked(self) -> None:
        ready, self._ready = self._ready, None
        if ready is not None:
            ready()
        self._on_change()

    # -- what the kernel says
    def _line(self, signal: Signal) -> None:
        self._on_signal(signal)
        self._nvml.read()  # the recovery action counts more than the number of an Xid

    def _count_lost(self) -> None:
        if self._kmsg is not None and self._kmsg.lost > self._lost:
            self._counters.lost.inc(by=self._kmsg.lost - self._lost)
            self._lost = self._kmsg.lost
            self._nvml.read()  # what a lost line said is in the levels
        self._loop.later(_LOST_SECONDS, self._count_lost)

    # -- what is shown
    def levels(self, uuid: str) -> list[Signal]:
        return list(self._signals.get(uuid, ()))

    def verdict(self, uuid: str, since: float) -> Found:
        reading = self._nvml.readings.get(uuid)
        if reading is None or reading.at < since:
            return Found(None, "NVML has not answered")
        if reading.error == "not_found":
            return Found(False, "NVML does not list it", "gpu:missing")
        if reading.error is not None:
            return Found(None, f"NVML: {reading.error}")
        return Found(True, "NVML's levels allow it")

    def checks(self, uuid: str) -> list[Check]:
        hang, reading = self._hung.get(uuid) or self._hung.get(None), self._nvml.readings.get(uuid)
        age = self._nvml.age(uuid)
        if hang is not None:
            return [_hung_check("NVML", hang, age)]
        if reading is None or age is None:
            return [Check("NVML", Status.UNKNOWN, "not read yet")]
        if age > self._limits.reading_stale:
            return [Check("NVML", Status.UNKNOWN, f"its last answer is {age:.0f} s old")]
        return list(self._checks.get(uuid, ()))

    def host_checks(self) -> list[Check]:
        hang = self._hung.get(None)
        found = list(self._host) if hang is None else [_hung_check("GPUs", hang)]
        if self._nvml.unkillable:
            text = f"{self._nvml.unkillable} NVML children hang in the driver and cannot be killed: a reboot is due"
            found.append(Check("NVML children", Status.FAILED, text, self._nvml.unkillable))
        if self._kmsg is not None:
            found.append(self._kmsg.check())
        return found

    def fields(self, uuid: str) -> dict[str, Any]:
        reading = self._nvml.readings.get(uuid)
        return dict(reading.fields) if reading is not None else {}

    def probed_at(self, uuid: str) -> float | None:
        reading = self._nvml.readings.get(uuid)
        return reading.at if reading is not None else None

    def bound(self, slots: dict[str, int]) -> None:
        self._slots = slots

    def inject(self, uuid: str, key: str) -> bool:
        if self._script is None:
            return False
        from healthcheck.scripted_faults import inject

        injected = inject(self._script, uuid, key)
        self._nvml.read()
        return injected

    # -- over restarts
    def _remember(self) -> None:
        """Not flushed to the disk: after a power cut counters begin anew, and levels are read anyway."""
        state = {"baselines": encode_baselines(self._baselines), "pci": self._nvml.known}
        try:
            write_state(self._memory, state, schema=SCHEMA, durable=False)
        except OSError as error:
            say(f"<4>{self._memory}: {error.strerror}: what was counted so far is forgotten at a restart")

    def close(self) -> None:
        self._nvml.close(lambda: None)
        if self._kmsg is not None:
            self._kmsg.close()


def _hung_check(name: str, hang: Hang, age: float | None = None) -> Check:
    times = "once" if hang.in_row == 1 else f"{hang.in_row} times in a row"
    text = f"NVML hung {times} for {hang.seconds:g} s, in {hang.stage}"
    return Check(name, Status.UNKNOWN, text if age is None else f"{text}; last read {age:.0f} s ago", hang.in_row)


def _remembered(path: Path) -> tuple[dict[str, Baseline], dict[str, str]]:
    """Nothing where the file is not there or not understood: then everything begins anew."""
    try:
        state = read_state(path, schema=SCHEMA) or {}
    except (OSError, ApplianceError) as error:
        say(f"<4>{path}: {error}: counters begin anew")
        state = {}
    baselines, pci = state.get("baselines"), state.get("pci")
    known = dict(_texts(pci)) if isinstance(pci, dict) else {}
    return decode_baselines(baselines) if isinstance(baselines, dict) else {}, known


def _texts(table: dict[str, Any]) -> Iterator[tuple[str, str]]:
    return ((key, value) for key, value in table.items() if isinstance(value, str))
