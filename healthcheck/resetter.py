"""Has one GPU reset by its unit, appliance-gpu-reset@UUID.service, and waits for the result it leaves.

NVML closed (our child holds every GPU) -> systemctl start --no-block -> the result file, looked at every 200 ms,
and the unit's state now and then -> NVML opened again. A result that is there is the answer, also when a watchdog that
died meanwhile had asked for it: old ones were removed before (service.py:_save).

A reset that outlives the machine's deadline is only watched from then on: its GPU is given up, NVML is opened for the
others, and no other GPU is reset before the unit has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from appliance.launcher.loop import Loop, Timer
from appliance.paths import Paths
from healthcheck.errands import Errands
from healthcheck.reset_result import read_result

POLL_SECONDS = 0.2
UNIT_SECONDS = 5.0
_ERRAND_SECONDS = 30.0
_OVER = ("inactive", "failed")

Done = Callable[[bool, str, str | None, dict[str, float]], None]
"""ok, detail, needs (None: another try makes sense), seconds by phase."""


class Nvml(Protocol):
    """healthcheck/nvml.py:NvmlProbe, as far as a reset needs it."""

    def close(self, done: Callable[[], None]) -> None: ...
    def open(self) -> None: ...


def unit_name(uuid: str) -> str:
    """The unit's name, escaped as systemd-escape(1) does it: "-" separates directories there."""
    escaped = "".join(char if char.isalnum() or char in ":_." else f"\\x{ord(char):02x}" for char in uuid)
    return f"appliance-gpu-reset@{escaped}.service"


@dataclass(slots=True)
class _Running:
    uuid: str
    requested: float
    done: Done
    watched: bool = False  # given up: nothing is started for it any more
    over_since: float | None = None  # loop time: the unit is over and there is no result


class Resetter:
    """One reset at a time; the machine asks for no second one."""

    def __init__(self, loop: Loop, paths: Paths, errands: Errands, nvml: Nvml | None) -> None:
        self._loop, self._paths, self._errands, self._nvml = loop, paths, errands, nvml
        self._running: _Running | None = None
        self._timer: Timer | None = None
        self._closed = False  # NVML, by us

    @property
    def uuid(self) -> str | None:
        """The GPU that is being reset."""
        return self._running.uuid if self._running else None

    def reset(self, uuid: str, requested: float, done: Done) -> None:
        """`requested`: UTC seconds; the same request again is the one under way."""
        if self._is(uuid, requested):
            return
        running = self._replace(_Running(uuid, requested, done))
        if (result := self._result()) is not None:
            self._finish(result)
        elif self._nvml is None:
            self._start(running)
        else:
            self._closed = True
            self._nvml.close(lambda: self._start(running))

    def watch(self, uuid: str, requested: float, done: Done) -> None:
        """Until the unit has ended, or has left a result; starts nothing."""
        if self._running is not None and self._is(uuid, requested):
            self._running.watched, self._running.done = True, done
        else:
            running = self._replace(_Running(uuid, requested, done, watched=True))
            self._ask_unit(running)
            self._poll()
        self._open()

    def _is(self, uuid: str, requested: float) -> bool:
        return self._running is not None and (self._running.uuid, self._running.requested) == (uuid, requested)

    def _replace(self, running: _Running) -> _Running:
        if self._timer is not None:
            self._timer.cancel()
        self._running = running
        return running

    def _open(self) -> None:
        if self._nvml is not None and self._closed:
            self._closed = False
            self._nvml.open()

    def _start(self, running: _Running) -> None:
        if self._running is not running:
            return
        if running.watched:  # NVML took longer to close than the reset may take
            self._ask_unit(running)
            return
        request = {
            "op": "start", "unit": unit_name(running.uuid), "root": str(self._paths.etc.parents[1]),
            "uuid": running.uuid,
        }  # fmt: skip
        self._errands.run("reset", request, _ERRAND_SECONDS, lambda answer: self._started(running, answer))

    def _started(self, running: _Running, answer: dict[str, Any]) -> None:
        if self._running is not running:
            return
        if not answer["ok"]:
            self._finish({"ok": False, "detail": str(answer.get("error"))})
            return
        self._poll()
        self._ask_unit(running)

    def _poll(self) -> None:
        if self._running is None:
            return
        if (result := self._result()) is not None:
            self._finish(result)
            return
        self._timer = self._loop.later(POLL_SECONDS, self._poll)

    def _ask_unit(self, running: _Running) -> None:
        if self._running is running:
            request = {"op": "unit", "unit": unit_name(running.uuid)}
            self._errands.run("reset unit", request, _ERRAND_SECONDS, lambda answer: self._unit(running, answer))

    def _unit(self, running: _Running, answer: dict[str, Any]) -> None:
        """A unit that is over twice in a row without a result has failed before it began."""
        if self._running is not running:
            return
        if answer.get("active") not in _OVER:
            running.over_since = None
        elif running.over_since is not None:
            result = self._result()
            text = f"{unit_name(running.uuid)} ended without a result ({answer.get('result')}); see its journal"
            self._finish(result or {"ok": False, "detail": text})
            return
        else:
            running.over_since = self._loop.time()
        self._loop.later(UNIT_SECONDS, lambda: self._ask_unit(running))

    def _result(self) -> dict[str, Any] | None:
        assert self._running is not None
        return read_result(self._paths, self._running.uuid)

    def _finish(self, result: dict[str, Any]) -> None:
        running, self._running = self._running, None
        assert running is not None
        if self._timer is not None:
            self._timer.cancel()
        self._open()
        phases, needs = result.get("phases"), result.get("needs")
        seconds = {
            str(name): float(value)
            for name, value in (phases.items() if isinstance(phases, dict) else ())
            if isinstance(value, (int, float))
        }
        ok = result.get("ok") is True
        running.done(ok, str(result.get("detail") or ""), needs if isinstance(needs, str) else None, seconds)

    def close(self) -> None:
        """The unit goes on; whoever comes next finds its result."""
        self._running = None
