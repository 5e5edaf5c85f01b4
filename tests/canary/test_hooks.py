"""Hooks by their documented answers: a program's exit code, a server's status, silence."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from appliance.log import UsageError
from canary import hooks
from canary.run import Hook, Run
from canary.settings import SettingsError, load_settings, merge
from canary.types import Policy
from tests.canary.test_machine import make


def script(tmp_path: Path, body: str) -> str:
    path = tmp_path / "hook.sh"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def with_hook(when: str = "step", **hook: Any) -> Run:
    return make(hooks=[Hook(when=when, **hook)])  # type: ignore[arg-type]


@pytest.mark.parametrize(("code", "outcome"), [(0, "ok"), (3, "wait"), (1, "fail"), (2, "fail"), (77, "fail")])
def test_exit_codes_of_a_gate(tmp_path: Path, code: int, outcome: str) -> None:
    result = hooks.call(with_hook(exec=[script(tmp_path, f"echo because; exit {code}")]), "step")
    assert result.outcome == outcome
    assert outcome == "ok" or "because" in result.text


def test_a_gate_that_says_nothing_in_time_says_not_yet(tmp_path: Path) -> None:
    assert hooks.call(with_hook(exec=["/bin/sleep", "30"], timeout=0.2), "step").outcome == "wait"


def test_told_hooks_are_all_called_and_stop_nothing(tmp_path: Path) -> None:
    path = script(tmp_path, f'echo "$CANARY_HOOK $CANARY_RUN $CANARY_RELEASE" >> {tmp_path}/said; exit 1')
    run = make(hooks=[Hook(when="post", exec=[path]), Hook(when="post", exec=[path]), Hook(when="pre", exec=[path])])
    result = hooks.call(run, "post")
    assert result.outcome == "ok" and "exit" in result.text
    assert (tmp_path / "said").read_text() == "post 1 v2\n" * 2


def test_a_command_gets_the_run_as_json_and_nothing_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "x")
    path = script(tmp_path, f'printf %s "$CANARY_EVENT" > {tmp_path}/event; env > {tmp_path}/env')
    assert hooks.call(with_hook(exec=[path]), "step").outcome == "ok"
    event = json.loads((tmp_path / "event").read_text())
    assert (event["run"], event["release"], event["stable"], event["hook"]) == ("1", "v2", "v1", "step")
    assert event["steps"] == [5, 50, 100] and "SECRET" not in (tmp_path / "env").read_text()


class Gate(HTTPServer):
    status, drip = 200, False
    bodies: list[dict[str, Any]]


class Handler(BaseHTTPRequestHandler):
    server: Gate

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if self.server.drip:
            for byte in b"HTTP/1.0 200 OK" + b" " * 600:
                try:
                    self.wfile.write(bytes([byte]))
                except OSError:
                    return
                time.sleep(0.05)
        self.send_response(self.server.status)
        self.send_header("Location", "/elsewhere")
        self.end_headers()


@pytest.fixture
def gate() -> Iterator[Gate]:
    with Gate(("127.0.0.1", 0), Handler) as server:
        server.bodies = []
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(200, "ok"), (204, "ok"), (403, "fail"), (409, "wait"), (503, "wait"), (500, "wait"), (302, "fail")],
)
def test_statuses_of_a_url(gate: Gate, status: int, outcome: str) -> None:
    gate.status = status
    url = f"http://127.0.0.1:{gate.server_port}/gate"
    assert hooks.call(with_hook(url=url, timeout=10), "step").outcome == outcome
    assert [body["hook"] for body in gate.bodies] == ["step"]


def test_a_server_that_drips_and_one_that_is_gone_say_not_yet(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_URL_GRACE", 1.0)
    gate.drip = True
    url = f"http://127.0.0.1:{gate.server_port}/gate"
    assert hooks.call(with_hook(url=url, timeout=0.5), "step").outcome == "wait"
    assert hooks.call(with_hook(url="http://127.0.0.1:9/", timeout=5), "step").outcome == "wait"


def test_settings_name_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "canary.toml"
    assert load_settings(path).policy == Policy()
    for text, said in (
        ("policy = 3", "policy"),
        ("[policy]\nerror_rat = 0.1", "error_rat"),
        ("[policy]\nerror_rate = 2", "error_rate"),
        ('[[policy.limits]]\nmetric = "itll"\nseconds = 1', "metric"),
        ("[policy]\nsteps = []", "steps"),
        ('[[hooks]]\nwhen = "never"\nexec = ["/bin/true"]', "when"),
        ('[[hooks]]\nwhen = "pre"', "either exec or url"),
        ('[[hooks]]\nwhen = "pre"\nexec = ["true"]', "absolute"),
        ('[[hooks]]\nwhen = "pre"\nexec = ["/no/such"]', "/no/such"),
        ('[[hooks]]\nwhen = "pre"\nurl = "file:///etc/passwd"', "http"),
        ("[policy", "TOML"),
    ):
        path.write_text(text)
        with pytest.raises(SettingsError, match=said):
            load_settings(path)
    path.write_text("[policy]\nsteps = [1, 100]\nstep_seconds = 7")
    policy = merge(load_settings(path).policy, {"alpha": 0.01})
    assert (policy.steps, policy.step_seconds, policy.alpha) == ([1, 100], 7, 0.01)
    with pytest.raises(UsageError, match="alfa"):
        merge(policy, {"alfa": 1})
