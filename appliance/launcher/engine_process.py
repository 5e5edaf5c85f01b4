"""One engine on one GPU: start in its scope, watch, drain, stop, start again.

Call order of a start: plan_engine -> trampoline spawned -> Scopes.start -> check_scope -> GO -> exec -> /admin/state
until ready. Of an end, however it came: the child is reaped -> Scopes.stop (nothing is left in the scope) -> gone,
backoff or failed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from appliance.hostconfig import HostConfig
from appliance.launcher.health import Health, Question, Reply, StallWatch, read_health
from appliance.launcher.last_words import LastWords
from appliance.launcher.lifecycle import LIVE, NO_SCOPE, State, check_transition
from appliance.launcher.loop import READ, Loop, Timer
from appliance.launcher.restart import FINAL_STATUSES, Backoff, exit_text
from appliance.launcher.scope import Findings, check_scope, oom_kills, own_cgroup, processes_in
from appliance.launcher.scopes import Scopes
from appliance.launcher.spawn import prepare_socket, spawn_trampoline
from appliance.launcher.spec import EngineSpec
from appliance.launcher.trampoline import GO
from appliance.log import ApplianceError, ExitCode

ADMISSION_LEAD = 0.3  # seconds between "draining" in state.json and SIGTERM: the gateways look ten times a second
EXEC_SECONDS = 20.0
LOADING_POLL, READY_POLL = 0.2, 1.0
_QUESTION_SECONDS = 5.0
_STOP_GRACE = 15.0
_CLEAN_RETRY = 5.0


@dataclass(slots=True)
class Surroundings:
    """What all engines of one launcher share."""

    loop: Loop
    scopes: Scopes
    gpu: int
    uid: int
    gid: int
    config: HostConfig
    plan: Callable[[str], EngineSpec]
    changed: Callable[[], None]  # after every change of what as_dict() shows
    event: Callable[..., None]
    gpu_facts: Callable[[], dict[str, Any]] = dict  # what became of the GPU, for the event of an engine that gave up
    compare_scope: Callable[..., Findings] = check_scope
    spawn: Callable[[EngineSpec, int, int, int], tuple[int, socket.socket]] = spawn_trampoline


class EngineProcess:
    """The engine of `release`. `start`, `stop` and `restart` return at once; `changed` follows."""

    def __init__(self, around: Surroundings, release: str) -> None:
        self._around, self._loop = around, around.loop
        self.release, self.state = release, State.GONE
        self.since = time.time()
        self.restarts = 0
        self.last_exit: str | None = None
        self.problem: str | None = None  # why a ready engine takes no requests
        self.progress: float | None = None
        self.in_flight: int | None = None
        self.health_at = 0.0  # monotonic, of the last answer
        self.unknown: tuple[str, ...] = ()  # limits that could not be read back
        self.spec: EngineSpec | None = None
        self.pid: int | None = None
        self.retry_at: float | None = None  # UTC seconds
        self.progress_at = self._loop.time()
        limits = around.config.restart
        self._backoff = Backoff(limits.first_delay, limits.max_delay, limits.limit, limits.window)
        self._stall = StallWatch(around.config.engine.stall_timeout)
        self._timers: dict[str, Timer] = {}
        self._question: Question | None = None
        self._channel: socket.socket | None = None
        self._words: LastWords | None = None
        self._cgroup: str | None = None
        self._kill_reason: str | None = None
        self._final = False  # the next end is for good
        self._asked_to_end = False
        self._start_again = False
        self._scoping = False  # a call for a scope is under way
        self._ooms: int | None = None

    # -- what others see
    @property
    def live(self) -> bool:
        return self.state in LIVE

    @property
    def serving(self) -> bool:
        return self.state is State.READY and self.problem is None

    def as_dict(self, *, gpu_admitted: bool) -> dict[str, Any]:
        """An entry of "engines" in state.json."""
        spec = self.spec
        return {
            "release": self.release,
            "model": spec.release.model_name if spec else None,
            "engine_version": spec.release.engine_version if spec else None,
            "socket": str(spec.socket) if spec else None,
            "state": str(self.state),
            "admitted": gpu_admitted and self.serving,
            "problem": self.problem,
            "scope": spec.scope.name if spec else None,
            "pid": self.pid,
            "since": round(self.since, 3),
            "restarts": self.restarts,
            "last_exit": self.last_exit,
            "progress": self.progress,
            "retry_at": self.retry_at,
            "memory_max": spec.scope.memory_max if spec else None,
            "unknown_limits": list(self.unknown),
        }

    # -- what others ask for
    def start(self) -> None:
        """From gone, backoff or failed; somebody asked, so earlier ends do not count."""
        if not self.live:
            self._backoff.reset()
            self._start()

    def stop(self, *, abort: bool = False) -> None:
        """Ends it: gracefully, or with `abort` by SIGKILL at once. Idempotent; a second one may abort the first."""
        self._asked_to_end, self._start_again = True, False
        self._end(abort=abort)

    def restart(self, *, abort: bool = False) -> None:
        self._backoff.reset()
        if self.live:
            self._asked_to_end = self._start_again = True
            self._end(abort=abort)
        else:
            self._start()

    # -- start
    def _start(self) -> None:
        self._cancel_timers()
        self._asked_to_end = self._start_again = self._final = False
        self._kill_reason = self.problem = self.progress = self.retry_at = self.in_flight = self._cgroup = None
        try:
            self.spec = self._around.plan(self.release)
            prepare_socket(self.spec.socket, self._around.uid, self._around.gid)
            self._ooms = oom_kills(self._around.gpu)
            self._words = LastWords()
            self.pid, self._channel = self._around.spawn(self.spec, self._around.uid, self._around.gid, self._words.fd)
        except (ApplianceError, OSError) as error:
            self._hear_last_words()
            refused = isinstance(error, ApplianceError) and error.exit_code is ExitCode.REFUSED
            self.last_exit = f"cannot start: {error}"
            self._settle(State.FAILED if refused else None)
            return
        self._stall = StallWatch(self._around.config.engine.stall_timeout)
        self._loop.watch_child(self.pid, self._ended)
        self._move(State.STARTING)
        self._scoping = True
        self._around.scopes.start(self.spec.scope, self.pid, self._scoped)

    def _scoped(self, answer: dict[str, Any]) -> None:
        """systemd has made the scope, or has not."""
        self._scoping = False
        if self.pid is None:
            self._clean()
        if self.state is not State.STARTING or self.pid is None or self.spec is None:
            return  # it was told to end meanwhile
        if not answer["ok"]:
            self._kill(f"{NO_SCOPE}{answer['error']}")
            return
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return  # it died, and is reaped next: what it leaves in /proc is not to be judged
        path = own_cgroup(self.pid)
        findings = self._around.compare_scope(self.spec.scope, path, answer["unit"])
        self._cgroup, self.unknown = path, findings.unknown
        if findings.unknown:
            self._around.event("engine_limits_unknown", release=self.release, unknown=findings.unknown)
        if findings.wrong:
            self._final = True
            self._kill(f"its scope is not as asked: {'; '.join(findings.wrong)}")
            return
        assert self._channel is not None
        with contextlib.suppress(OSError):  # it died just now
            self._channel.send(GO)
        self._loop.watch(self._channel.fileno(), READ, self._trampoline_said)
        self._timer("exec", EXEC_SECONDS, lambda: self._kill(f"the engine was not executed in {EXEC_SECONDS:g} s"))

    def _trampoline_said(self) -> None:
        assert self._channel is not None
        try:
            text = self._channel.recv(1000)
        except BlockingIOError:
            return
        except ConnectionResetError:
            text = b""
        self._cancel("exec")
        self._close_channel()
        if text:
            self._final = True
            self._kill(f"refused before it started: {text.decode(errors='replace')}")
        elif self.state is State.STARTING:
            self.progress_at = self._loop.time()
            self._move(State.LOADING)
            self._ask_again(LOADING_POLL)

    # -- watch
    def _ask_again(self, seconds: float) -> None:
        self._timer("ask", seconds, self._ask)

    def _ask(self) -> None:
        assert self.spec is not None
        self._question = Question(
            self._loop, self.spec.socket, "GET /admin/state", _QUESTION_SECONDS, lambda reply: self._told(reply)
        )

    def _told(self, reply: Reply | None) -> None:
        self._question = None
        table = reply.json() if reply is not None and reply.status == 200 else None
        now = self._loop.time()
        if table is None:
            stalled = self._stall.silent(now) if self.state is State.READY else None
        else:
            health = read_health(table)
            self.health_at, self.in_flight = now, health.in_flight
            stalled = self._stall.answered(now, health) if self.state is State.READY else None
            self._judge(health)
        if self.state is State.LOADING and now - self.progress_at > self._around.config.engine.start_timeout:
            stalled = f"no progress of the load for {now - self.progress_at:.0f} s"
        if stalled is not None:
            self._kill(f"stalled: {stalled}")
        elif self.state in (State.LOADING, State.READY, State.DRAINING):
            self._ask_again(READY_POLL if self.state is State.READY else LOADING_POLL)
        self._around.changed()

    def _judge(self, health: Health) -> None:
        if self.state is State.LOADING:
            if health.progress is not None and health.progress != self.progress:
                self.progress, self.progress_at = health.progress, self._loop.time()
            if health.ready:
                self._confirm(health)
        elif self.state is State.READY:
            self.problem = None if health.ready else health.reason

    def _confirm(self, health: Health) -> None:
        """It says it is ready; does it have the device that it was given?"""
        backend = self._around.config.gpus.backend
        wanted = self.spec.env.get("CUDA_VISIBLE_DEVICES") if self.spec else None
        if health.backend != backend or (wanted is not None and health.uuid != wanted):
            self._final = True
            self._kill(f"it runs on {health.backend} {health.uuid or ''}, not on {backend} {wanted or ''}")
            return
        self.progress = self.problem = None
        self._move(State.READY)

    # -- end
    def _end(self, *, abort: bool) -> None:
        if self.state in (State.GONE, State.BACKOFF, State.FAILED):
            self._cancel_timers()
            self.retry_at = None
            if self.state is not State.GONE:
                self._move(State.GONE)
        elif abort or self.state is State.STARTING:  # no engine yet: nothing to drain
            self._kill(None)
        elif self.state is State.READY:
            self._move(State.DRAINING)
            self._timer("term", ADMISSION_LEAD, lambda: self._signal(signal.SIGTERM))
            self._limit_stop()
        elif self.state is State.LOADING:
            self._move(State.STOPPING)
            self._signal(signal.SIGTERM)
            self._limit_stop()

    def hurry(self) -> None:
        """A second SIGTERM: the engine then shortens its drain."""
        if self.state is State.DRAINING:
            self._signal(signal.SIGTERM)

    def _limit_stop(self) -> None:
        seconds = self._around.config.engine.drain_timeout + _STOP_GRACE
        self._timer("kill", seconds, lambda: self._kill(f"did not end within {seconds:g} s of SIGTERM"))

    def _kill(self, reason: str | None) -> None:
        """SIGKILL. `reason`: why we did it, if nobody asked for it."""
        self._kill_reason = self._kill_reason or reason
        if self.state is not State.STOPPING:
            self._move(State.STOPPING)
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.pid is not None:  # not reaped yet, so the number is still our child's
            os.kill(self.pid, number)

    def _ended(self, returncode: int) -> None:
        """The child has been reaped; engine-core, its child, may still be there."""
        self._cancel_timers()
        self._close_channel()
        if self._question is not None:
            self._question.cancel()
            self._question = None
        self.pid = None
        said = self._hear_last_words()
        before, now = self._ooms, oom_kills(self._around.gpu)
        oom = before is not None and now is not None and now > before
        if not self._asked_to_end or self._kill_reason or returncode != 0:
            self.last_exit = exit_text(returncode, killed_because=self._kill_reason, oom=oom, said=said)
            if returncode > 0 and not said:
                self.last_exit += f"; see `appliance logs --gpu {self._around.gpu}`"
        if not self._asked_to_end and returncode in FINAL_STATUSES:
            self._final = True
        if self.state is not State.STOPPING:
            self._move(State.STOPPING)
        if not self._scoping:  # else with its answer: two calls for one name would end each other's scope
            self._clean()

    def _clean(self) -> None:
        self._around.scopes.stop(self._around.gpu, self.release, self._cleaned)

    def _cleaned(self, answer: dict[str, Any]) -> None:
        if not answer["ok"]:
            left = self._kill_leftovers()
            self._around.event("scope_stop_failed", release=self.release, error=answer["error"], left=left)
            if left:  # they may hold the device: nothing may start before they are gone
                self._timer("clean", _CLEAN_RETRY, self._clean)
                return
        if self.spec is not None:
            with contextlib.suppress(OSError):  # the engine put something else there: cleared by the next start
                self.spec.socket.unlink(missing_ok=True)
        if self._asked_to_end:
            self._move(State.GONE)
            if self._start_again:
                self._start()
        else:
            self._settle(State.FAILED if self._final else None)

    def _kill_leftovers(self) -> list[int]:
        """Without systemd's help: what is still in the cgroup."""
        left = processes_in(self._cgroup) if self._cgroup is not None else []
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return left

    def _settle(self, state: State | None) -> None:
        """It ended by itself or could not be started: failed, or again after a while."""
        self.progress = None
        delay = None
        if state is None:
            no_scope = str(self.last_exit).startswith(NO_SCOPE)
            delay = self._backoff.not_started() if no_scope else self._backoff.ended(self._loop.time())
        if delay is not None:
            self.retry_at = round(time.time() + delay, 3)
            self._timer("retry", delay, self._retry)
        self._move(State.FAILED if delay is None else State.BACKOFF)

    def _retry(self) -> None:
        self.restarts += 1
        self._start()

    # -- small things
    def _move(self, state: State) -> None:
        """To `state`; backoff and failed may follow themselves, when a start is refused before there is a process."""
        check_transition(self.state, state)
        before, self.state, self.since = self.state, state, time.time()
        self._around.event(
            "engine", release=self.release, state=str(state), was=str(before), engine_pid=self.pid,
            reason=self._kill_reason if state is State.STOPPING else None,
            last_exit=self.last_exit if state in (State.BACKOFF, State.FAILED, State.GONE) else None,
            **(self._around.gpu_facts() if state is State.FAILED else {}),
        )  # fmt: skip
        self._around.changed()

    def _timer(self, name: str, seconds: float, callback: Callable[[], None]) -> None:
        self._cancel(name)
        self._timers[name] = self._loop.later(seconds, callback)

    def _cancel(self, name: str) -> None:
        if name in self._timers:
            self._timers.pop(name).cancel()

    def _cancel_timers(self) -> None:
        for name in list(self._timers):
            self._cancel(name)

    def _hear_last_words(self) -> str:
        words, self._words = self._words, None
        return words.take() if words is not None else ""

    def _close_channel(self) -> None:
        if self._channel is not None:
            self._loop.unwatch(self._channel.fileno())
            self._channel.close()
            self._channel = None
