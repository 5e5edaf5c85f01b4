"""Calls to systemd that hang, die or talk nonsense: the launcher hears one answer in time, whatever happens."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from appliance.launcher import scopes
from appliance.launcher.loop import Loop
from appliance.launcher.scope import ScopePlan
from appliance.launcher.scopes import Call, SystemdScopes


def call(monkeypatch: pytest.MonkeyPatch, script: str, seconds: float = 10) -> dict[str, Any]:
    """One call answered by `script` in the place of scope_call."""
    monkeypatch.setattr(Call, "argv", (sys.executable, "-I", "-S", "-c", script))
    loop = Loop()
    before = set(os.listdir("/proc/self/fd"))
    answers: list[dict[str, Any]] = []
    Call(loop, {"op": "stop", "name": "x" * 100_000}, seconds, answers.append)
    assert loop.run(until=lambda: bool(answers), timeout=30)
    loop.run(timeout=0.05)
    assert len(answers) == 1
    assert set(os.listdir("/proc/self/fd")) == before  # nothing stays open
    loop.close()
    return answers[0]


def test_the_answer_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    echo = "import json, sys; r = json.load(sys.stdin); print(json.dumps({'ok': True, 'n': len(r['name'])}))"
    assert call(monkeypatch, echo) == {"ok": True, "n": 100_000}


def test_one_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scopes, "_KILL_GRACE", 0.1)
    answer = call(monkeypatch, "import time; time.sleep(100)", seconds=0.3)
    assert answer == {"ok": False, "error": "systemd did not answer within 0.3 s"}


@pytest.mark.parametrize(
    "script",
    ["import os; os._exit(3)", "print('Traceback')", "print('[1]')", "import os; os.kill(os.getpid(), 9)",
     "import os, sys; os.close(0); sys.stdout.write('{')"],
)  # fmt: skip
def test_one_that_ends_without_an_answer(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    answer = call(monkeypatch, script)
    assert answer["ok"] is False and "call to systemd ended" in answer["error"]


def test_one_that_never_stops_talking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scopes, "_KILL_GRACE", 0.1)
    answer = call(monkeypatch, "while True: print('x' * 1000)", seconds=0.5)
    assert answer["ok"] is False


def test_no_call_where_no_scope_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def groups(gpu: int) -> list[str]:
        return ["appliance-gpu0-other.scope"]

    monkeypatch.setattr(scopes, "scope_groups", groups)
    monkeypatch.setattr(Call, "argv", ("/bin/false",))
    loop = Loop()
    answers: list[dict[str, Any]] = []
    SystemdScopes(loop).stop(0, "r1", answers.append)
    loop.run(until=lambda: bool(answers), timeout=5)
    assert answers == [{"ok": True}]
    SystemdScopes(loop).stop(0, "other", answers.append)  # that one is there: systemd has to be asked
    loop.run(until=lambda: len(answers) == 2, timeout=5)
    assert answers[1]["ok"] is False
    loop.close()


def test_a_plan_travels_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import json, sys; print(json.dumps({'ok': True, 'request': json.load(sys.stdin)}))"
    monkeypatch.setattr(Call, "argv", (sys.executable, "-I", "-S", "-c", script))
    plan = ScopePlan(0, "r1", 1 << 30, 100, 64, allowed_cpus=(1,), devices=("/dev/nvidia0",))
    loop = Loop()
    answers: list[dict[str, Any]] = []
    SystemdScopes(loop).start(plan, 77, answers.append)
    loop.run(until=lambda: bool(answers), timeout=10)
    request = answers[0]["request"]
    assert request["name"] == "appliance-gpu0-r1.scope" and request["pid"] == 77
    assert request["properties"]["DeviceAllow"] == ["a(ss)", [["/dev/nvidia0", "rw"]]]
    assert request["properties"]["AllowedCPUs"] == ["ay", [2]]
    loop.close()
