"""Alert rules: promtool's judgement, that what they read exists in the code, and one runbook each."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from appliance.cli import COMMANDS
from appliance.gateway.engine_metrics import LABELS
from appliance.golden import Verdict
from appliance.paths import SLOT_NAMES
from canary.cli import COMMANDS as CANARY_COMMANDS
from tests.host.promtool import promtool

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "appliance/alerts"
RULES = yaml.safe_load((FOLDER / "appliance.rules.yml").read_text())
TESTS = [test for path in FOLDER.glob("*.test.yml") for test in yaml.safe_load(path.read_text())["tests"]]
ALL = [rule for group in RULES["groups"] for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in ALL if "alert" in rule}
WATCHDOG_RULES = [rule for group in RULES["groups"] if group["name"] == "appliance-watchdog" for rule in group["rules"]]
RECORDS = {rule["record"]: rule for rule in ALL if "record" in rule}
SECTIONS = ["Symptom", "Impact", "Confirm", "Mitigate", "Fix", "Verify", "Escalate"]
RUNBOOKS = "file:///usr/share/doc/appliance/runbooks"
WATCHDOG = ROOT / "healthcheck/metrics.py"
SOURCES = [
    ROOT / "engine/api/metrics.py", *sorted((ROOT / "appliance/gateway").glob("*.py")),
    *([WATCHDOG] if WATCHDOG.exists() else []),
]  # fmt: skip
KINDS = {
    "Counter": ("_total",), "CounterMetricFamily": ("_total",), "Gauge": ("",), "GaugeMetricFamily": ("",),
    "Histogram": ("_bucket", "_sum", "_count"),
}  # fmt: skip
OURS = {"host", "job", "instance", "le"}  # labels that Prometheus or the scrape configuration adds
ENGINE_TARGET = set(LABELS)  # the stable gateway says which engine a metric is of


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([promtool(), *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=120)


def test_promtool_check() -> None:
    result = run("check", "rules", "--lint=all", "--lint-fatal", "appliance.rules.yml")
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{len(ALL)} rules found" in result.stdout


def test_promtool_unit_tests() -> None:
    result = run("test", "rules", *sorted(path.name for path in FOLDER.glob("*.test.yml")))
    assert result.returncode == 0, result.stdout + result.stderr


def test_promtool_takes_all_groups_in_their_order() -> None:
    """Those that a test file does not name it takes at random: alerts may read recordings of a step ago."""
    names = [group["name"] for group in RULES["groups"]]
    for path in FOLDER.glob("*.test.yml"):
        assert yaml.safe_load(path.read_text())["group_eval_order"] == names, path.name


def test_promtool_tests_can_fail(tmp_path: Path) -> None:
    """The same cases against rules with one limit moved."""
    rules = (FOLDER / "appliance.rules.yml").read_text()
    assert "p99_5m > 0.08" in rules
    (tmp_path / "appliance.rules.yml").write_text(rules.replace("p99_5m > 0.08", "p99_5m > 8"))
    (tmp_path / "appliance.test.yml").write_text((FOLDER / "appliance.test.yml").read_text())
    command = [promtool(), "test", "rules", "appliance.test.yml"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=120).returncode == 1


def test_example_of_the_scrape_configuration() -> None:
    result = run("check", "config", "prometheus.example.yml")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", ALERTS)
def test_each_alert_says_what_an_operator_needs(name: str) -> None:
    rule = ALERTS[name]
    assert re.fullmatch(r"Appliance([A-Z][a-z0-9]+)+", name)
    assert re.fullmatch(r"\d+[mh]", rule["for"])
    assert rule["labels"] == {"severity": rule["labels"]["severity"]}
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["runbook_url"] == f"{RUNBOOKS}/{name}.md"
    assert "$labels.host" in rule["annotations"]["summary"], "which host?"


@pytest.mark.parametrize("name", ALERTS)
def test_each_alert_is_seen_to_fire_and_to_be_silent(name: str) -> None:
    cases = [case for test in TESTS for case in test["alert_rule_test"] if case["alertname"] == name]
    assert any(case["exp_alerts"] for case in cases)
    assert any(not case["exp_alerts"] for case in cases)


def test_runbooks_are_one_to_one() -> None:
    assert {path.stem for path in (FOLDER / "runbooks").iterdir()} == set(ALERTS)


@pytest.mark.parametrize("name", ALERTS)
def test_runbook(name: str) -> None:
    text = (FOLDER / f"runbooks/{name}.md").read_text()
    assert text.startswith(f"# {name}\n")
    assert re.findall(r"^## (.*)$", text, re.M) == SECTIONS
    assert all(part.strip() for part in re.split(r"^## .*$", text, flags=re.M)[1:])
    (confirm,) = re.findall(r"^## Confirm\n(.*?)^## ", text, re.M | re.S)
    assert re.search(r"^```\n(.+\n)+```$", confirm, re.M), "commands to copy"
    for other in re.findall(r"\bAppliance[A-Z]\w+", text):
        assert other in ALERTS, f"{other} is no alert"


@pytest.mark.parametrize("name", ALERTS)
def test_commands_of_the_runbook_exist(name: str) -> None:
    text = (FOLDER / f"runbooks/{name}.md").read_text()
    code = "\n".join(re.findall(r"^```\n(.*?)^```", text, re.M | re.S) + re.findall(r"`([^`\n]+)`", text))
    known = {command.name for command in COMMANDS}
    if "release" in known:  # the host's commands are there
        used = set(re.findall(r"^appliance ([a-z-]+)", code, re.M))
        assert used <= known
    assert set(re.findall(r"^canary ([a-z-]+)", code, re.M)) <= {command.name for command in CANARY_COMMANDS}
    units = {path.name for path in (ROOT / "systemd").iterdir()}
    for unit in re.findall(r"\bappliance-[\w-]+@?", code):
        assert any(file.startswith(unit) for file in units), f"no unit {unit}"


# -- what the rules read


def code_metrics() -> dict[str, set[str]]:
    """Metric name as scraped -> labels, from the calls that make metrics in the code."""
    found: dict[str, set[str]] = {}
    for path in SOURCES:
        engine = path.is_relative_to(ROOT / "engine")
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in KINDS:
                continue
            if not node.args or not isinstance(node.args[0], ast.Constant):
                continue
            name = str(node.args[0].value)
            values = [*node.args[1:], *(keyword.value for keyword in node.keywords)]
            lists = [value for value in values if isinstance(value, ast.Tuple | ast.List)]
            labels = {item.value for one in lists for item in one.elts if isinstance(item, ast.Constant)}
            for suffix in KINDS[node.func.id]:
                full = name if name.endswith(suffix) else name + suffix
                found[full] = {str(label) for label in labels} | (ENGINE_TARGET if engine else set())
    return found


def selectors(expression: str) -> list[tuple[str, dict[str, str]]]:
    """(metric, {label: matched value}) of each selector."""
    out = []
    for name, _, inside in re.findall(r"\b((?:appliance|host\w*:appliance)_[\w:]+|up\b)(\{([^}]*)\})?", expression):
        out.append((name, dict(re.findall(r'(\w+)(?:=|!=|=~|!~)"([^"]*)"', inside))))
    return out


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.get("alert") or rule["record"])
def test_each_metric_and_label_exists_in_the_code(rule: dict[str, Any]) -> None:
    if not (ROOT / "appliance/gateway/probes.py").exists():
        pytest.skip("the gateway is not in this tree yet")
    metrics = code_metrics()
    read = selectors(rule["expr"])
    assert read
    if not WATCHDOG.exists() and rule in WATCHDOG_RULES:
        pytest.skip("the watchdog's metrics are not in this tree yet")
    for name, matchers in read:
        assert name in metrics or name in RECORDS or name == "up", f"{name} is no metric of ours"
        if name in metrics:
            assert set(matchers) <= metrics[name] | OURS, name
    grouped = {word.strip() for words in re.findall(r"\bby \(([^)]*)\)", rule["expr"]) for word in words.split(",")}
    every = set().union(*(metrics.get(name, set()) for name, _ in read), OURS)
    assert grouped <= every | {"release", "slot", "gpu"}


def test_code_metrics_sees_the_kinds() -> None:
    """The reader of the code itself, on names that are known."""
    metrics = code_metrics()
    assert {"appliance_preemptions_total", "appliance_kv_pages_free", "appliance_engine_up"} <= set(metrics)
    assert "appliance_time_to_first_token_seconds_bucket" in metrics
    assert metrics["appliance_http_responses_total"] >= {"route", "method", "code"}


def test_label_values_exist_in_the_code() -> None:
    """States, routes and slots that the rules compare with."""
    lifecycle = ROOT / "appliance/launcher/lifecycle.py"
    if not lifecycle.exists():
        pytest.skip("the launcher is not in this tree yet")
    from appliance.gateway.probes import own_routes
    from appliance.launcher.lifecycle import State

    for rule in ALL:
        for name, matchers in selectors(rule["expr"]):
            if name != "appliance_gpu_state":
                assert matchers.get("state", "ready") in set(State)
            assert matchers.get("slot", "stable") in SLOT_NAMES
            if "route" in matchers:
                assert set(matchers["route"].split("|")) == {*own_routes, "malformed"}


def test_label_values_of_the_watchdog() -> None:
    """States, results, verdicts, keys and the number of resets that its rules compare with."""
    if not WATCHDOG.exists():
        pytest.skip("the watchdog's metrics are not in this tree yet")
    from healthcheck.machine_types import OUT, State
    from healthcheck.policy import load_policy

    policy = load_policy()
    for rule in WATCHDOG_RULES:
        for _, matchers in selectors(rule["expr"]):
            states = set(matchers["state"].split("|")) if "state" in matchers else set()
            assert states in (set(), OUT - {State.QUARANTINED})
            assert matchers.get("result", "ok") in ("ok", "failed")
            assert matchers.get("verdict", "different") in {verdict.value for verdict in Verdict}
            if "key" in matchers:
                assert policy.rule(matchers["key"]).pattern == matchers["key"]
    limit = re.search(r">= (\d+)", ALERTS["ApplianceGpuResetsUsedUp"]["expr"])
    assert limit and int(limit[1]) == policy.attempts.resets


def test_the_table_in_the_readme_is_right() -> None:
    rows = re.findall(r"^\| (Appliance\w+) \| (\w+) \| (\w+) \|", (FOLDER / "README.md").read_text(), re.M)
    assert rows == [(name, rule["labels"]["severity"], rule["for"]) for name, rule in ALERTS.items()]
