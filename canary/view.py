"""A run as text: `canary status`, `list`, `explain`. Colour and icons only on a terminal; words say it all."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import IO, Any

from appliance.log import use_color
from appliance.terminal import age, cut, mark, table, width_of
from canary.asking import Document
from canary.run import ENDED

_DIGEST = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{52}\b")
_MARKS = {"settled": "good", "failed": "bad", "aborted": "none", "rolling_back": "bad"}
_OUTCOME_MARKS = {"pass": "good", "fail": "bad", "inconclusive": "busy", "skipped": "none"}
_OUTCOME_ICONS = {"pass": "✔", "fail": "✖", "inconclusive": "?", "skipped": "→"}


def screen(document: Document, out: IO[str]) -> Iterator[str]:
    """The lines of `canary status`, cut to the width of `out`."""
    width = width_of(out)
    run, live = document["run"], document["live"]
    yield cut(f"{'Run:':<11} {run['id']}  {run['release']} (canary) vs {run['stable']} (stable)", width)
    kind = "held" if run["paused"] or run["held"] else _MARKS.get(run["phase"], "busy")
    yield f"{'Status:':<11} " + mark(kind, out) + cut(status_words(run, document["boot"]), width - 14)
    for label, text in _lines(run, live, document):
        yield cut(f"{label:<11} {text}", width)
    yield from _sides(live, width)
    if run["verdict"]:
        yield ""
        yield cut(f"Verdict:    {run['verdict']['outcome']}: {run['verdict']['reason']}", width)
        for finding in run["verdict"]["findings"]:
            text = f"{finding['outcome']:<13} {finding['metric']:<16} {finding['text']}"
            yield "  " + mark(_OUTCOME_MARKS[finding["outcome"]], out) + cut(text, width - 4)
    yield ""
    yield cut(f"{'Next:':<11} {_next(run)}", width)


def status_words(run: dict[str, Any], boot: float) -> str:
    """One line: the phase, since when, what it waits for."""
    words = str(run["phase"]).replace("_", " ")
    if run["phase"] == "step":
        words = f"step {run['step'] + 1}/{len(run['policy']['steps'])}"
        words += "" if run["stage"] == "held" and run["held"] else f", {run['stage']}"
        if run["stage"] == "observe":
            words += f" for {age(boot - run['step_began'])} of {age(run['policy']['step_seconds'])}"
            words += ", extended" if run["extended"] else ""
    elif run["phase"] not in ENDED:
        words += f", {run['stage']} for {age(boot - run['entered'])}"
    for key, text in (("paused", "paused: "), ("held", "held: "), ("reason", ""), ("problem", "waits: ")):
        if run[key]:
            words += f"; {text}{run[key]}"
    return words + (" (dry run)" if run["dry_run"] else "")


def _lines(run: dict[str, Any], live: dict[str, Any], document: Document) -> Iterator[tuple[str, str]]:
    if not document["controller"] and run["phase"] not in ENDED:
        yield "Controller:", f"DOWN: {document['controller_error']}; the rule stays as it is, `canary rollback` works"
    yield "Steps:", _steps(run)
    yield "Weight:", _weight(run, live)
    if run["phase"] not in ENDED and run["phase"] not in ("settling", "rolling_back") and not run["paused"]:
        left = run["policy"]["progress_deadline"] - (document["boot"] - run["progress"])
        yield "Deadline:", f"rolled back in {age(left)} without progress"
    if run["phase"] in ("rolling_back", "settling"):
        yield "Draining:", f"{_known(live.get('in_work'))} requests, {_known(live.get('draining'))} connections"
    if live.get("drift"):
        yield "Drift:", f"put back: {'; '.join(live['drift'])}"
    if live.get("rule_error"):
        yield "Rules:", f"cannot be used: {live['rule_error']}"


def _steps(run: dict[str, Any]) -> str:
    outcomes = {result["step"]: result["outcome"] for result in run["results"]}
    parts = []
    for number, weight in enumerate(run["policy"]["steps"]):
        sign = _OUTCOME_ICONS.get(outcomes.get(number, ""), "")
        if not sign and number == run["step"] and run["phase"] == "step":
            sign = "◌"
        parts.append(f"[{weight:g}%{' ' + sign if sign else ''}]")
    return "".join(parts)


def _weight(run: dict[str, Any], live: dict[str, Any]) -> str:
    rule = live.get("rule")
    text = f"set {run['weight']:g}%   rule {'unknown' if rule is None else f'{rule:g}%'}"
    if observed := live.get("observed"):
        total = observed["canary"] + observed["stable"]
        text += f"   observed {100 * observed['canary'] / total:.1f}% of {total} new connections" if total else ""
    return text


def _known(value: Any) -> str:
    return "unknown" if value is None else str(value)


def _sides(live: dict[str, Any], width: int) -> Iterator[str]:
    """Counts since the gateways started, beside each other."""
    samples = live.get("samples")
    if not samples:
        return
    if samples.get("invalid"):
        yield cut(f"{'Counters:':<11} {samples['invalid']}", width)
    rows = [["", "STABLE", "CANARY"]]
    sides = [samples.get("stable"), samples.get("canary")]
    for label in ("requests", "errors", "rejected", "connections", "clients"):
        values = [side[label] if side else None for side in sides]
        shown = [sum(value.values()) if isinstance(value, dict) else value for value in values]
        rows.append([label.capitalize(), *map(_known, shown)])
    yield ""
    yield from table(rows, width)


def _next(run: dict[str, Any]) -> str:
    number = run["id"]
    match run["phase"]:
        case "settled":
            return f"canary undo --to {number} puts {run['stable']} back"
        case "failed" | "aborted":
            return "canary explain; after the fix: canary retry, or another release"
        case "settling" if run["stage"] in ("serving", "bake"):
            return f"it ends by itself; until the bake is over canary rollback {number} takes {run['release']} back"
        case "rolling_back" | "settling":
            return "it ends by itself; canary status --wait"
        case _ if run["held"]:
            return f"canary promote {number}   or   canary rollback {number}"
        case _ if run["paused"]:
            return f"canary resume {number}   or   canary rollback {number}"
        case _:
            return f"by itself; canary pause {number}, canary rollback {number}"


def short_digests(text: str) -> str:
    """For people: 12 digits of a SHA-256 tell two apart."""
    return _DIGEST.sub(r"\1", text)


def one_line(document: Document) -> str:
    """For a pipe: printed when it changes."""
    run = document["run"]
    verdict = f"  {run['verdict']['outcome']}: {run['verdict']['reason']}" if run["verdict"] else ""
    where = f"{run['phase']}/{run['stage']}" + (f" {run['step'] + 1}" if run["phase"] == "step" else "")
    notes = "".join(f"  {key}: {run[key]}" for key in ("paused", "held", "reason", "problem") if run[key])
    return f"run {run['id']}  {run['release']}  {where}  weight {run['weight']:g}%{notes}{verdict}"


def list_rows(runs: list[dict[str, Any]], now: float) -> list[list[str]]:
    rows = [["RUN", "RELEASE", "STABLE", "STATUS", "STEP", "SET", "VERDICT", "AGE", "REASON"]]
    for run in runs:
        step = f"{run['step'] + 1}/{len(run['policy']['steps'])}"
        verdict = run["verdict"]["outcome"] if run["verdict"] else "-"
        rows.append([
            run["id"], run["release"], run["stable"], run["phase"], step, f"{run['weight']:g}%", verdict,
            age(now - run["created_at"]), short_digests(run["reason"] or ""),
        ])  # fmt: skip
    return rows


def explanation(run: dict[str, Any], out: IO[str]) -> Iterator[str]:
    """The numbers behind: policy, each step's result, and every number of the last verdict."""
    policy = run["policy"]
    yield f"run {run['id']}: {run['release']} against {run['stable']}: {run['phase']}" + (
        f" ({run['reason']})" if run["reason"] else ""
    )
    limits = ", ".join(
        f"{x['metric']} < {x['seconds'] * 1000:g} ms for {100 * (1 - x['share']):g} %" for x in policy["limits"]
    )
    errors = f"errors < {100 * policy['error_rate']:g} %"
    yield f"limits: {errors}; {limits or 'no latency limit'}; alpha {policy['alpha']:g}"
    yield ""
    rows = [["STEP", "WEIGHT", "OUTCOME", "TIME", "WHY"]]
    for result in run["results"]:
        rows.append([
            str(result["step"] + 1), f"{result['weight']:g}%", result["outcome"], age(result["seconds"]),
            result["reason"],
        ])  # fmt: skip
    yield from table(rows, width_of(out)) if len(rows) > 1 else ["no step was finished"]
    for finding in run["verdict"]["findings"] if run["verdict"] else ():
        yield ""
        sign = f"{_OUTCOME_ICONS[finding['outcome']]} " if use_color(out) else ""
        yield f"{sign}{finding['metric']}: {finding['outcome']}: {finding['text']}"
        for name, value in finding["numbers"].items():
            yield f"    {name:<20} {value:.6g}"
