"""Whether the engines of one GPU work: they answer, they step while work is queued, they do not die; and, now and then,
whether they compute what was recorded (golden answers, checksum of the weights).

Nothing blocks: short questions go over the loop, long ones are errands. Only an answer that differs, an error that the
engine tells of, an end that the launcher saw, or a standstill is a signal; no answer is unknown.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from appliance.launcher.health import Question, Reply, StallWatch, read_health
from appliance.launcher.lifecycle import NO_SCOPE
from appliance.launcher.loop import Loop
from healthcheck.engine_errors import read_errors
from healthcheck.engines import EngineView, LauncherView
from healthcheck.errand_child import UNRECORDED
from healthcheck.errands import Errands
from healthcheck.types import Check, Signal, Status

ASK_SECONDS = 5.0
GOLDEN_SECONDS = 180.0  # over what the engine itself gives /admin/golden and /admin/checksum
_FIRST_GOLDEN = 20.0  # after an engine is ready
_UNANSWERED = 3  # questions in a row
_COMPARE_AGAIN = 30.0  # s: errors of the engine bring the next comparison forward, but not closer than this
_RECENT = 600.0  # s that an error of the engine is shown for
_OOM = "; the kernel killed a process at MemoryMax"  # the launcher's words; the engine's own come after them
_ON_TRIAL = {
    "engine:error": "trial:error", "engine:stalled": "trial:stalled", "engine:unreachable": "trial:unreachable",
    "engine:nonfinite": "trial:nonfinite", "engine:index": "trial:index", "engine:step": "trial:step",
    "engine:fault": "trial:fault", "golden:mismatch": "trial:mismatch",
}  # fmt: skip


def cause_of(last_exit: str) -> str | None:
    """The signal for an engine that ended, from its launcher's words (restart.py:exit_text, health.py:StallWatch).
    None: not the GPU's doing (the memory limit of its scope, a configuration that is refused, a systemd that is late).
    """
    if _OOM in last_exit or last_exit.startswith(("exit status 2", "exit status 4", "cannot start", NO_SCOPE)):
        return None
    if last_exit.startswith("no step for"):
        return "engine:stalled"
    return "engine:unreachable" if last_exit.startswith("no answer for") else "engine:error"


OnSignal = Callable[[Signal], None]


@dataclass(slots=True)
class _Watched:
    """One engine process."""

    view: EngineView
    stall: StallWatch
    golden_at: float  # loop time of the next comparison
    silent: int = 0  # questions without an answer, in a row
    stalled: str | None = None
    steps: int | None = None
    errors: int = 0  # that it has told of
    error_at: float | None = None  # loop time of the newest
    error: str = ""
    compared_at: float | None = None  # UTC seconds
    compared_from: float = float("-inf")  # loop time: the last comparison began
    in_flight: int | None = None  # HTTP requests in work there
    verdict: str = "never"  # same, different, inconclusive, unrecorded
    details: list[str] = field(default_factory=list)
    weights_differ: bool = False
    logits_differ: bool = False


class EngineProbe:
    """The engines of one slot. `look` is called with each new view of its launcher, `beat` every few seconds."""

    def __init__(
        self,
        loop: Loop,
        errands: Errands,
        root: str,
        gpu: int,
        uuid: str,
        *,
        stall_timeout: float,
        golden_interval: float,
        on_signal: OnSignal,
        on_compared: Callable[[str], None] = lambda verdict: None,
    ) -> None:
        """root: Paths.under(root) has the releases. Seconds: `stall_timeout` without a step while work is queued;
        `golden_interval` between two comparisons of one engine."""
        self._loop, self._errands, self._root = loop, errands, root
        self.gpu, self.uuid = gpu, uuid
        self._stall_timeout, self._golden_interval = stall_timeout, golden_interval
        self._on_signal, self._on_compared = on_signal, on_compared
        self._view: LauncherView | None = None
        self._restarts: dict[str, int] = {}  # release -> as last seen
        self._failed: set[str] = set()
        self._watched: dict[str, _Watched] = {}
        self._questions: dict[str, Question] = {}

    def look(self, view: LauncherView | None) -> None:
        """Takes note of engines that came, went or died."""
        before, self._view = self._view, view
        if view is before:
            return
        there = {engine.release: engine for engine in view.engines} if view is not None else {}
        for release, engine in there.items():
            self._died(release, engine)
        for release, watched in list(self._watched.items()):
            now = there.get(release)
            if now is None or not now.ready or now.pid != watched.view.pid:
                self._forget(release)
        for release, engine in there.items():
            if engine.ready and release not in self._watched:
                first = self._loop.time() + min(_FIRST_GOLDEN, self._golden_interval) * random.uniform(0.5, 1)
                self._watched[release] = _Watched(engine, StallWatch(self._stall_timeout), first)

    def _died(self, release: str, engine: EngineView) -> None:
        known = self._restarts.get(release)
        self._restarts[release] = engine.restarts
        gave_up = engine.state == "failed" and release not in self._failed
        (self._failed.add if engine.state == "failed" else self._failed.discard)(release)
        ended = known is not None and engine.restarts > known
        if gave_up or ended:
            why = engine.last_exit or "it ended by itself"
            if key := cause_of(why):
                self._signal(release, key, f"{release}{' gave up' if gave_up else ''}: {why}")

    def _forget(self, release: str) -> None:
        del self._watched[release]
        self._errands.forget(self._errand(release))
        if release in self._questions:
            self._questions.pop(release).cancel()

    # -- heartbeat
    def beat(self) -> None:
        """Asks every ready engine how it is, and compares those whose time has come."""
        for release, watched in self._watched.items():
            if release not in self._questions and watched.view.socket is not None:
                answered = partial(self._answered, release)
                self._questions[release] = Question(
                    self._loop, watched.view.socket, "GET /admin/state", ASK_SECONDS, answered
                )
            if self._loop.time() >= watched.golden_at:
                self.compare(release)

    def _answered(self, release: str, reply: Reply | None) -> None:
        self._questions.pop(release, None)
        watched = self._watched.get(release)
        if watched is None:
            return
        state = reply.json() if reply is not None and reply.status == 200 else None
        if state is None:
            watched.silent, watched.in_flight = watched.silent + 1, None
            if watched.silent == _UNANSWERED:
                self._signal(release, "engine:unreachable", f"{release}: {watched.silent} questions without an answer")
            return
        watched.silent = 0
        health = read_health(state)
        watched.steps, watched.in_flight = health.steps, health.in_flight
        stalled = watched.stall.answered(self._loop.time(), health)
        if stalled is not None and watched.stalled is None:
            self._signal(release, "engine:stalled", f"{release}: {stalled}")
        watched.stalled = stalled
        self._errors(release, watched, state)

    def _errors(self, release: str, watched: _Watched, state: dict[str, Any]) -> None:
        """What its kernels found wrong. Whether it is the GPU, the weights are what they should be and the answers are
        as recorded is looked at now, not at the next usual time."""
        errors = read_errors(state, watched.errors)
        watched.errors = errors.total
        if errors.age is not None:
            watched.error_at, watched.error = self._loop.time() - errors.age, errors.last
        for key, text in errors.found.items():
            self._signal(release, key, f"{release}: {text}")
        if errors.found:
            self._compare_soon(watched)

    @property
    def in_flight(self) -> int | None:
        """Requests in work on this GPU; None: an engine has not said."""
        known = [watched.in_flight for watched in self._watched.values() if watched.in_flight is not None]
        return sum(known) if len(known) == len(self._watched) and self._view is not None else None

    # -- golden answers
    def compare(self, release: str) -> bool:
        """Begins a comparison now; False: there is no such engine, or one is under way."""
        watched = self._watched.get(release)
        if watched is None or self._errands.busy(self._errand(release)):
            return False
        watched.compared_from = self._loop.time()
        watched.golden_at = watched.compared_from + self._golden_interval * random.uniform(0.9, 1.1)
        request = {"op": "verify", "root": self._root, "socket": str(watched.view.socket), "release": release}
        key = self._errand(release)
        self._errands.run(key, request, GOLDEN_SECONDS, lambda answer: self._compared(release, answer))
        return True

    def compare_all(self) -> None:
        for release in self._watched:
            self.compare(release)

    @property
    def comparing(self) -> bool:
        return any(self._errands.busy(self._errand(release)) for release in self._watched)

    def _errand(self, release: str) -> str:
        return f"golden {self.gpu} {release}"

    def _compared(self, release: str, answer: dict[str, Any]) -> None:
        watched = self._watched.get(release)
        if watched is None:
            return
        watched.compared_at = time.time()
        watched.verdict = str(answer.get("verdict", "inconclusive"))
        watched.weights_differ = bool(answer.get("weights_differ"))
        watched.logits_differ = bool(answer.get("logits_differ"))
        reason = answer.get("reason") or answer.get("error")
        watched.details = [*map(str, answer.get("details", [])), *([str(reason)] if reason else [])]
        self._on_compared(watched.verdict)
        text = f"{release}: {'; '.join(watched.details)}"
        if watched.weights_differ:
            self._signal(release, "checksum:mismatch", text, "checksum")
        if watched.logits_differ:
            self._signal(release, "golden:mismatch", text, "golden")

    def _compare_soon(self, watched: _Watched) -> None:
        watched.golden_at = min(watched.golden_at, max(self._loop.time(), watched.compared_from + _COMPARE_AGAIN))

    def _signal(self, release: str, key: str, detail: str, source: str = "engine") -> None:
        """What a release on trial does wrong may be the release's fault, and its canary judges it; whether it is the
        GPU's, the stable release's engine is asked at once. Weights that changed in the device memory are the GPU's."""
        if self._view is not None and not self._view.vouches(release) and key in _ON_TRIAL:
            key = _ON_TRIAL[key]
            for other, watched in self._watched.items():
                if self._view.vouches(other):
                    self._compare_soon(watched)
        self._on_signal(Signal(key, self.uuid, detail[:1000], time.time(), source))

    # -- what `healthcheck check` shows
    def checks(self) -> list[Check]:
        """Lines about this GPU's engines."""
        if self._view is None:
            return [Check("engine", Status.UNKNOWN, "its launcher does not run")]
        found = [self._engine_check(engine) for engine in self._view.engines]
        for release, watched in self._watched.items():
            found += _golden_checks(release, watched)
        return found or [Check("engine", Status.OK, "none, as asked")]

    def _engine_check(self, engine: EngineView) -> Check:
        name, watched = f"engine {engine.release}", self._watched.get(engine.release)
        if engine.state == "failed":
            return Check(name, Status.FAILED, f"gave up: {engine.last_exit}", engine.state)
        if watched is None:
            return Check(name, Status.DEGRADED, engine.problem or engine.state, engine.state)
        if watched.stalled is not None:
            return Check(name, Status.FAILED, watched.stalled, engine.state)
        if watched.silent:
            return Check(name, Status.UNKNOWN, f"{watched.silent} questions without an answer", engine.state)
        if watched.error_at is not None and self._loop.time() - watched.error_at < _RECENT:
            return Check(name, Status.DEGRADED, f"{watched.errors} errors, the last one {watched.error}", engine.state)
        return Check(name, Status.OK, f"ready, {watched.steps or 0} steps", engine.state)


def _golden_checks(release: str, watched: _Watched) -> list[Check]:
    names = [f"golden answers {release}", f"weights {release}"]
    if watched.compared_at is None:
        return [Check(name, Status.UNKNOWN, "not compared yet") for name in names]
    if watched.verdict == "inconclusive":
        return [Check(name, Status.UNKNOWN, "; ".join(watched.details) or "no answer") for name in names]
    when = time.strftime("%H:%M:%SZ", time.gmtime(watched.compared_at))
    found = []
    if watched.verdict == UNRECORDED:
        found.append(Check(names.pop(0), Status.UNKNOWN, "; ".join(watched.details)))
        return [*found, Check(names[0], Status.OK, f"as loaded, at {when}")]
    for name, differs in zip(names, (watched.logits_differ, watched.weights_differ)):
        text = "; ".join(watched.details) if differs else f"as recorded, at {when}"
        found.append(Check(name, Status.FAILED if differs else Status.OK, text))
    return found
