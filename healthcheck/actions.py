"""Carries out what the state machine asks for, without ever blocking, and reports back by events.

The same command again while it is under way is that one (commands are given again after a crash, and where no answer
came); a newer one for the same GPU replaces it. Launchers are asked until they have done it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from appliance.launcher.loop import Loop, Timer
from appliance.launcher.state import say
from appliance.log import printable
from appliance.paths import Paths
from healthcheck.engines import Launchers
from healthcheck.errands import Errands
from healthcheck.lane import Lane
from healthcheck.machine_types import (
    Command,
    Drained,
    EngineFailed,
    EngineReady,
    Event,
    Hold,
    Needs,
    ResetDone,
    ResetGpu,
    RestartEngine,
    SetShare,
    Stopped,
    Unhold,
    Verified,
    Verify,
    WarmedUp,
    Warmup,
    WatchReset,
)
from healthcheck.resetter import Done as ResetEnd
from healthcheck.resetter import Resetter
from healthcheck.verification import Found, Verification

OWNER = "watchdog"
_MAX_REASON = 500  # what a launcher takes
_HOLD_SECONDS = 3600.0  # the machine has its own deadlines; this ends a connection that nobody needs
_ASK_SECONDS = 10.0
_LOOK_SECONDS = 0.2

Report = Callable[..., None]
Act = Callable[[Any, Report], None]
Levels = Callable[[int, Callable[[Found], None]], None]
"""(gpu, done): reads this GPU anew and says whether its levels allow it to serve."""


class Actions:
    def __init__(
        self,
        loop: Loop,
        paths: Paths,
        errands: Errands,
        launchers: Launchers,
        resetter: Resetter,
        emit: Callable[[Event], None],
        *,
        out_of_service: Callable[[int], bool],
        levels: Levels,
    ) -> None:
        """out_of_service: whether this slot's GPU is under repair (its verification includes the levels of NVML)."""
        self._loop, self._paths, self._launchers = loop, paths, launchers
        self._resetter, self._emit = resetter, emit
        self._out_of_service, self._levels = out_of_service, levels
        self._verification = Verification(errands, str(paths.etc.parents[1]))
        self._lanes: dict[int, Lane] = {}  # what is quickly done
        self._waits: dict[int, Lane] = {}  # for the end of what was begun so
        self._current: dict[tuple[int, str], Command] = {}  # under way
        self._looking: dict[int, Timer] = {}  # for an engine that is to become ready
        self._trouble: dict[int, str] = {}  # what was said last

    def perform(self, command: Command) -> bool:
        """False: it is none of ours (Reread, Alert, Record)."""
        match command:
            case Hold() | Unhold():
                self._place(command)
            case RestartEngine():
                self._begin(command.gpu, "restart", command, self._restart)
            case SetShare():
                self._begin(command.gpu, "share", command, self._share)
            case Warmup():
                self._begin(command.gpu, "engine", command, self._warm_up)
            case Verify():
                self._begin(command.gpu, "engine", command, self._verify)
            case ResetGpu():
                self._begin(command.gpu, "reset", command, self._reset)
            case WatchReset():
                self._begin(command.gpu, "reset", command, self._watch_reset)
            case _:
                return False
        return True

    def close(self) -> None:
        """Holds stay; what is under way is begun again by whoever comes next."""
        self._resetter.close()

    # -- one at a time for each GPU and kind
    def _begin(self, gpu: int, kind: str, command: Command, act: Act) -> None:
        if self._current.get((gpu, kind)) == command:
            return
        self._current[gpu, kind] = command

        def report(*events: Event) -> None:
            """The end of it, if it is still wanted."""
            if self._current.get((gpu, kind)) is command:
                del self._current[gpu, kind]
                for event in events:
                    self._emit(event)

        act(command, report)

    def _place(self, command: Hold | Unhold) -> None:
        """Where the engine is to be. What was being done about it before is over; on the way out of service also what
        was being done with it."""
        gpu = command.gpu
        if self._current.get((gpu, "place")) == command:
            return
        self._drop(gpu, "restart")
        self._lane(self._waits, gpu).drop("place")
        self._stop_looking(gpu)
        if isinstance(command, Hold) and command.level == "stop":
            self._current.pop((gpu, "engine"), None)
            self._verification.forget(gpu)
        self._begin(gpu, "place", command, self._hold if isinstance(command, Hold) else self._unhold)

    def _drop(self, gpu: int, kind: str) -> None:
        if self._current.pop((gpu, kind), None) is not None:
            self._lane(self._lanes, gpu).drop(kind)

    def _stop_looking(self, gpu: int) -> None:
        if (timer := self._looking.pop(gpu, None)) is not None:
            timer.cancel()

    # -- launchers
    def _lane(self, lanes: dict[int, Lane], gpu: int) -> Lane:
        if gpu not in lanes:
            lanes[gpu] = Lane(self._loop, self._paths.control_socket(gpu))
        return lanes[gpu]

    def _ask(
        self, gpu: int, kind: str, request: dict[str, Any], done: Callable[[dict[str, Any]], None],
        *, insist: bool = True,
    ) -> None:  # fmt: skip
        def answered(reply: dict[str, Any]) -> None:
            self._trouble.pop(gpu, None)
            done(reply)

        trouble = partial(self._say, gpu, request["op"])
        lane = self._lane(self._lanes, gpu)
        lane.ask(kind, request | {"wait": False}, _ASK_SECONDS, answered, insist=insist, trouble=trouble)

    def _say(self, gpu: int, op: str, error: str) -> None:
        text = f"gpu {gpu}: {op}: {error}"
        if self._trouble.get(gpu) != text:  # once, not at each attempt
            self._trouble[gpu] = text
            say(f"<4>{printable(text)}; tried again until it is done")

    def _hold(self, command: Hold, report: Report) -> None:
        gpu = command.gpu
        mode = command.mode if command.level == "stop" else "graceful"  # a drain waits for nobody's end but its own
        request = {
            "op": "hold", "owner": OWNER, "reason": _reason(command.reason), "level": command.level, "mode": mode,
        }  # fmt: skip

        def held(_: dict[str, Any]) -> None:
            if command.level == "drain" and self._out_of_service(gpu):
                if (gpu, "restart") in self._current:
                    report()  # which says when the engine is ready
                else:
                    self._await_engine(gpu, 0.0, report)
                return
            end = Stopped(gpu) if command.level == "stop" else Drained(gpu)
            waiting = request | {"wait": True, "timeout": _HOLD_SECONDS}
            self._lane(self._waits, gpu).ask("place", waiting, _HOLD_SECONDS, lambda _: report(end))

        self._ask(gpu, "place", request, held)

    def _unhold(self, command: Unhold, report: Report) -> None:
        self._ask(command.gpu, "place", {"op": "unhold", "owner": OWNER}, lambda _: report())

    def _restart(self, command: RestartEngine, report: Report) -> None:
        gpu, after = command.gpu, command.requested
        self._launchers.look([gpu])
        view = self._launchers.views.get(gpu)
        if view is not None and view.stopped_by_others(OWNER):
            report(EngineReady(gpu))  # somebody works at this GPU: there is no engine that could be restarted
            return
        if view is not None and view.starting(after):
            self._await_engine(gpu, after, report)  # it died and its launcher was faster, or this is asked again
            return

        def begun(reply: dict[str, Any]) -> None:
            if reply["ok"]:
                self._await_engine(gpu, after, report)
            else:
                report(EngineFailed(gpu, str(reply.get("error"))))

        release = view.stable if view is not None and view.vouched else None  # not that of a canary beside it
        self._ask(gpu, "restart", {"op": "restart", "release": release}, begun, insist=False)

    def _share(self, command: SetShare, report: Report) -> None:
        request = {"op": "share", "owner": OWNER, "share": command.share}
        self._ask(command.gpu, "share", request, lambda _: report())

    def _await_engine(self, gpu: int, after: float, report: Report) -> None:
        """Until every engine that should be there is ready, or one has failed. For how long is the machine's."""
        self._stop_looking(gpu)
        self._launchers.look([gpu])
        view = self._launchers.views.get(gpu)
        failed = view.failed(after) if view is not None else None
        if failed is not None:
            report(EngineFailed(gpu, f"{failed.release}: {failed.last_exit}"))
        elif view is not None and (view.settled(after) or (view.stopped_by_others(OWNER) and not view.engines)):
            report(EngineReady(gpu))
        else:
            self._looking[gpu] = self._loop.later(_LOOK_SECONDS, lambda: self._await_engine(gpu, after, report))

    # -- engines
    def _warm_up(self, command: Warmup, report: Report) -> None:
        gpu, view = command.gpu, self._launchers.views.get(command.gpu)
        if view is None:
            report(EngineFailed(gpu, "its launcher does not run"))
            return
        self._verification.warm_up(view, lambda error: report(EngineFailed(gpu, error) if error else WarmedUp(gpu)))

    def _verify(self, command: Verify, report: Report) -> None:
        gpu = command.gpu

        def finish(found: Found) -> None:
            report(Verified(gpu, found.ok, found.detail, found.key))

        def engines(levels: Found) -> None:
            view = self._launchers.views.get(gpu)
            if levels.ok is False:
                finish(levels)
            elif view is None:
                finish(Found(None, "its launcher does not run"))
            else:
                self._verification.verify(view, lambda found: finish(_both(levels, found)))

        if self._out_of_service(gpu):
            self._levels(gpu, engines)
        else:  # a second opinion for another GPU: this one is not suspected
            engines(Found(True, ""))

    # -- reset
    def _reset(self, command: ResetGpu, report: Report) -> None:
        self._resetter.reset(command.uuid, command.requested, self._reset_done(command.gpu, report))

    def _watch_reset(self, command: WatchReset, report: Report) -> None:
        self._resetter.watch(command.uuid, command.requested, self._reset_done(command.gpu, report))

    def _reset_done(self, gpu: int, report: Report) -> ResetEnd:
        def done(ok: bool, detail: str, needs: str | None, phases: dict[str, float]) -> None:
            spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in phases.items())
            text = f"{detail} ({spent})" if spent else detail
            known = Needs(needs) if needs in list(Needs) else None
            report(ResetDone(gpu, ok, text, known))

        return done


def _both(levels: Found, answers: Found) -> Found:
    if answers.ok is not True:
        return answers
    detail = "; ".join(filter(None, (levels.detail, answers.detail)))
    return Found(True if levels.ok else None, detail)


def _reason(text: str) -> str:
    return printable(text)[:_MAX_REASON] or "no reason was given"
