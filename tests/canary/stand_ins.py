"""What a controller gets in tests instead of netfilter, gateways and statistics: files, so that several processes share
them. Faults are scripted in script.json."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from typing import Any

from appliance.log import ApplianceError
from appliance.paths import Paths
from canary.controller import Times
from canary.samples import Reading, SamplesError
from canary.seams import Parts
from canary.types import Finding, Outcome, SideCounts, Verdict

FAST = Times(tick=0.01, drift=0.1, sample=0.02)


class Script:
    """verdict: pass, fail, inconclusive; fail_at: weight from which on it fails; alive; rules_error; samples_error."""

    def __init__(self, paths: Paths) -> None:
        self.path = paths.run / "script.json"

    def get(self) -> dict[str, Any]:
        try:
            return json.loads(self.path.read_text())  # type: ignore[no-any-return]
        except FileNotFoundError:
            return {}

    def set(self, **values: Any) -> None:
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.get() | values))
        os.replace(temporary, self.path)


@dataclass(frozen=True)
class RuleState:
    weight: float | None
    run: str | None
    drift: tuple[str, ...] = ()
    conntrack_percent: float | None = 1.0


class FileRules:
    """The kernel is a file: it survives the controller, and not the boot."""

    def __init__(self, paths: Paths) -> None:
        self._path, self._script = paths.run / "rules.json", Script(paths)

    def _load(self) -> dict[str, Any]:
        if error := self._script.get().get("rules_error"):
            raise ApplianceError(error)
        try:
            return json.loads(self._path.read_text())  # type: ignore[no-any-return]
        except FileNotFoundError:
            return {"weight": None, "run": None, "history": []}

    def read(self) -> RuleState:
        value = self._load()
        return RuleState(value["weight"], value["run"])

    def set_weight(self, run: str, weight: float) -> None:
        value = self._load()
        history = [*value["history"], weight][-100:]
        self._write({"weight": weight, "run": run, "history": history})

    def _write(self, value: dict[str, Any]) -> None:
        temporary = self._path.with_name(f"rules.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(value))
        os.replace(temporary, self._path)

    def flush(self) -> None:
        """Another tool empties the tables."""
        self._write(self._load() | {"weight": None, "run": None})

    def history(self) -> list[float]:
        return list(self._load()["history"])

    def repair(self) -> list[str]:
        return []

    def counters(self) -> dict[str, int]:
        self._load()
        return {"canary": 0, "stable": 0}

    def notes(self) -> list[str]:
        return []

    def diff(self) -> str:
        return ""

    def draining(self) -> int | None:
        return 0


class ScriptedSamples:
    def __init__(self, paths: Paths) -> None:
        self._script = Script(paths)

    def read(self) -> Reading:
        script, at = self._script.get(), time.monotonic()
        if error := script.get("samples_error"):
            return Reading(at=at, canary=None, stable=None, invalid=error)
        alive = script.get("alive", True)
        stable = SideCounts(epoch="1", at=at, requests=100, connections=10)
        canary = SideCounts(epoch="1", at=at, requests=100, connections=10, alive=alive)
        return Reading(at=at, canary=canary, stable=stable, not_alive={} if alive else {"canary": "scripted"})

    def check(self) -> None:
        if problem := self._script.get().get("metrics_problem"):
            raise SamplesError(problem)


class ScriptedJudge:
    def __init__(self, script: Script, evidence: dict[str, Any] | None) -> None:
        self._script, self.looks, self.golden = script, int((evidence or {}).get("looks", 0)), 0

    def begin_step(self, weight: float) -> None:
        self.golden = 0

    def look(self, reading: Reading, *, weight: float, kernel: int | None, golden_ok: bool | None) -> Verdict:
        self.looks += 1
        script = self._script.get()
        outcome = Outcome(script.get("verdict", "pass"))
        if (at := script.get("fail_at")) is not None and weight >= at:
            outcome = Outcome.FAIL
        if golden_ok is False:
            outcome = Outcome.FAIL
        self.golden += golden_ok is True
        if outcome is Outcome.PASS and not self.golden:
            outcome = Outcome.INCONCLUSIVE
        return Verdict(
            outcome=outcome,
            findings=[Finding(metric="errors", outcome=outcome, text="as scripted", numbers={"looks": self.looks})],
            reason=f"scripted {outcome}",
        )

    def evidence(self) -> dict[str, Any]:
        return {"looks": self.looks}


def make_parts(paths: Paths) -> Parts:
    script = Script(paths)
    return Parts(
        FileRules(paths), lambda _policy, _releases: ScriptedSamples(paths),
        lambda _policy, evidence: ScriptedJudge(script, evidence),
    )  # fmt: skip
