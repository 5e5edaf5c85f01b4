"""Warm-up and verification of one GPU's engines: every ready engine of its launcher, as errands beside the loop.

A GPU without a release has no engine: there is nothing to warm up, and its NVML levels alone verify it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from healthcheck.engines import EngineView, LauncherView
from healthcheck.errand_child import UNRECORDED
from healthcheck.errands import Errands

WARMUP_SECONDS = 60.0  # of one inference
VERIFY_SECONDS = 180.0
_KILL_AFTER = 10.0
_PROMPT = "The capital of France is Paris, and the capital of Italy is"


@dataclass(frozen=True, slots=True)
class Found:
    """What a verification found. `ok` None: inconclusive."""

    ok: bool | None
    detail: str
    key: str | None = None


@dataclass(slots=True)
class _Round:
    """Answers of several engines, joined."""

    waiting: int
    done: Callable[[dict[str, dict[str, Any]]], None]
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, release: str, answer: dict[str, Any]) -> None:
        self.answers[release] = answer
        if len(self.answers) == self.waiting:
            self.done(self.answers)


class Verification:
    """For all slots; a newer round of one slot replaces the one before."""

    def __init__(self, errands: Errands, root: str) -> None:
        """root: Paths.under(root) has the releases."""
        self._errands, self._root = errands, root

    def warm_up(self, view: LauncherView, done: Callable[[str | None], None]) -> None:
        """done: None, or what went wrong."""

        def finish(answers: dict[str, dict[str, Any]]) -> None:
            failed = {release: str(answer.get("error")) for release, answer in answers.items() if not answer["ok"]}
            done("; ".join(f"{name}: {error}" for name, error in failed.items() if view.vouches(name)) or None)

        request = {"op": "warmup", "prompt": _PROMPT, "timeout": WARMUP_SECONDS}
        self._run("warmup", view, request, 3 * WARMUP_SECONDS + _KILL_AFTER, finish)

    def verify(self, view: LauncherView, done: Callable[[Found], None]) -> None:
        """Golden answers and the checksum of the weights."""
        request = {"op": "verify", "root": self._root}
        if not any(engine.ready for engine in view.engines):
            done(_without_engine(view))
            return
        self._run("verify", view, request, VERIFY_SECONDS, lambda answers: done(judge(answers, view)))

    def forget(self, gpu: int) -> None:
        """No answer of a round of this slot counts any more."""
        self._errands.forget_all(f"warmup {gpu} ")
        self._errands.forget_all(f"verify {gpu} ")

    def _run(
        self,
        op: str,
        view: LauncherView,
        request: dict[str, Any],
        seconds: float,
        finish: Callable[[dict[str, dict[str, Any]]], None],
    ) -> None:
        self.forget(view.gpu)
        engines = [engine for engine in view.engines if engine.ready]
        if not engines:
            finish({})
            return
        joined = _Round(len(engines), finish)
        for engine in engines:
            self._errand(op, view.gpu, engine, request, seconds, joined)

    def _errand(
        self, op: str, gpu: int, engine: EngineView, request: dict[str, Any], seconds: float, joined: _Round
    ) -> None:
        whole = request | {"socket": str(engine.socket), "model": engine.model, "release": engine.release}
        key = f"{op} {gpu} {engine.release}"
        self._errands.run(key, whole, seconds, lambda answer: joined.add(engine.release, answer))


def judge(answers: dict[str, dict[str, Any]], view: LauncherView) -> Found:
    """One verdict of several engines': what differs outweighs what is not known, and that what is the same. Answers of
    a release on trial are told and decide nothing."""
    unknown, notes = [], []
    for release, answer in answers.items():
        verdict = answer.get("verdict")
        text = "; ".join(map(str, answer.get("details") or [])) or str(answer.get("reason") or answer.get("error"))
        if answer.get("weights_differ"):
            return Found(False, f"{release}: {text}", "checksum:mismatch")
        if not view.vouches(release):
            notes.append(f"{release}, on trial: golden answers {verdict or 'not known'}")
            continue
        if answer.get("logits_differ"):
            return Found(False, f"{release}: {text}", "golden:mismatch")
        if verdict == UNRECORDED:
            notes.append(f"{release}: weights as loaded; {text}")
        elif verdict == "same":
            notes.append(f"{release}: golden answers and weights as recorded")
        else:
            unknown.append(f"{release}: {text}")
    if unknown:
        return Found(None, "; ".join(unknown))
    return Found(True, "; ".join(notes))


def _without_engine(view: LauncherView) -> Found:
    """Only where none is wanted that vouches: then NVML's levels alone verify the GPU."""
    if view.wanted and not view.vouched:
        return Found(True, "only a release on trial, which has no engine: no golden answers to compare")
    if view.engines or (view.wanted and not any(level == "stop" for level in view.holds.values())):
        return Found(None, "no engine is ready")
    if view.wanted:
        return Found(True, "its engines are stopped: golden answers are compared when they are back")
    return Found(True, "no release: no golden answers to compare")
