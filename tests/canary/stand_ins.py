"""What a controller gets in tests instead of netfilter, gateways and statistics: files, so that several processes share
them. Faults are scripted in script.json."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from appliance.log import ApplianceError
from appliance.paths import Paths
from canary.controller import Times
from canary.seams import Parts, Reading, RuleState
from canary.types import Finding, Outcome, Policy, SideCounts, Verdict

FAST = Times(tick=0.01, drift=0.1, sample=0.02)


class Script:
    """verdict: pass, fail, inconclusive; fail_at: weight at which it turns to fail; alive; rules_error; samples_error."""

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

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)

    def diff(self) -> str:
        return ""

    def draining(self) -> int | None:
        return 0


class ScriptedSamples:
    def __init__(self, paths: Paths) -> None:
        self._script = Script(paths)

    def read(self) -> tuple[SideCounts, SideCounts | None]:
        script = self._script.get()
        if error := script.get("samples_error"):
            raise ApplianceError(error)
        side = SideCounts(epoch="1", at=0.0, requests=100, connections=10)
        canary = SideCounts(epoch="1", at=0.0, requests=100, connections=10, alive=script.get("alive", True))
        return canary, side

    def problem(self, policy: Policy) -> str | None:
        return self._script.get().get("metrics_problem")


class ScriptedJudge:
    def __init__(self, script: Script, policy: Policy, evidence: dict[str, Any] | None) -> None:
        self._script, self._policy, self.looks = script, policy, int((evidence or {}).get("looks", 0))
        self._weight = 0.0

    def begin_step(self) -> None:
        pass

    def observe(self, reading: Reading) -> None:
        self.looks += 1
        self._weight = reading.weight

    def verdict(self, *, final: bool) -> Verdict:
        script = self._script.get()
        outcome = Outcome(script.get("verdict", "pass"))
        if (at := script.get("fail_at")) is not None and self._weight >= at:
            outcome = Outcome.FAIL
        if outcome is Outcome.PASS and not final:
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
        FileRules(paths), ScriptedSamples(paths), lambda policy, evidence: ScriptedJudge(script, policy, evidence)
    )
