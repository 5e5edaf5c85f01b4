"""The watchdog: without it a sick GPU serves on, and nobody is told."""

from __future__ import annotations

import time

from appliance.doctor.report import Check, Finding, Host, degraded, failed, ok, unknown
from appliance.terminal import age
from healthcheck.document import STALE_SECONDS, Document, NoWatchdog, read_document

UNIT = "appliance-watchdog.service"
_LOOK = f"`systemctl status {UNIT}` and `journalctl -u {UNIT}` say why"
_LET_IT = "`healthcheck status` says what it saw; when that is mended, `healthcheck set-healthy GPU --reason TEXT`"
_REFUSED = {"2": "wrong arguments", "4": "refused: its policy, its configuration or gpus.json"}


def watchdog(host: Host) -> list[Finding]:
    """Runs, looks, and may act. Its state file stays when it dies, so systemd is asked as well."""
    show = host.units([UNIT], ["LoadState", "ActiveState", "SubState", "Result", "ExecMainStatus", "NRestarts"])
    down = _down(show[UNIT]) if show is not None else None
    if down is not None:
        return [down]
    try:
        document = read_document(host.paths)
    except NoWatchdog as error:
        return [failed(f"watchdog: {error.message}", error.hint or _LOOK)]
    if show is None and not document["running"]:
        return [failed("the watchdog does not run: nobody looks after these GPUs", f"systemctl start {UNIT}")]
    found = [*_probes(document, time.time()), *_automation(document), *_quarantined(document)]
    if show is None:
        found.append(unknown("watchdog: systemctl does not answer", "is systemd PID 1 here?"))
    return found or [ok(f"the watchdog runs; {document['status']}")]


def _down(state: dict[str, str]) -> Finding | None:
    """None where the unit is active."""
    if state.get("LoadState") != "loaded":
        return failed(f"watchdog: {UNIT} is {state.get('LoadState')}", "run the install playbook again")
    active, status = state.get("ActiveState", ""), state.get("ExecMainStatus", "")
    if active == "active":
        return None
    if active == "activating" and state.get("SubState") != "auto-restart":
        return degraded("the watchdog is starting", f"run it again; if it stays so: {_LOOK}")
    text = f"the watchdog does not run ({active}): nobody looks after these GPUs"
    if active == "failed":
        why = f"exit status {status}, {_REFUSED[status]}" if status in _REFUSED else state.get("Result", "")
        text = f"the watchdog has failed ({why}): nobody looks after these GPUs"
        again = f"systemctl reset-failed {UNIT}; systemctl restart {UNIT}"
        return failed(text, f"{_LOOK}; then `{again}`")
    if active == "activating":
        return failed(f"the watchdog ends again and again ({state.get('NRestarts')} restarts)", _LOOK)
    return failed(text, f"systemctl start {UNIT}")


def _probes(document: Document, now: float) -> list[Finding]:
    """With NVML every GPU has an answer that is not old. Without it (backend cpu) there is nothing to be probed."""
    if document.get("nvml") == "off":
        return []
    old = []
    starting = now - document["since"] < STALE_SECONDS
    for gpu in document["gpus"]:
        at = gpu.get("probed_at")
        if at is None and not starting:
            old.append(f"gpu {gpu['gpu']} was never probed")
        elif at is not None and now - at > STALE_SECONDS:
            old.append(f"gpu {gpu['gpu']} was last probed {age(now - at)} ago")
    return [failed(f"watchdog: {', '.join(old)}", f"`healthcheck status`, `journalctl -u {UNIT}`")] if old else []


def _automation(document: Document) -> list[Finding]:
    found = []
    if document["breaker"]:
        found.append(failed(f"watchdog: automation is stopped: {document['breaker']}", _LET_IT))
    if maintenance := document["maintenance"]:
        text = f"watchdog: in maintenance, it does nothing: {maintenance['reason']}"
        found.append(degraded(text, "when the work is done: `healthcheck maintenance off --reason TEXT`"))
    if document.get("saved") is False:
        text = "watchdog: gpus.json cannot be written: what it decided is gone with the next restart"
        found.append(failed(text, "free some space there, see `df -h` and `dmesg`"))
    return found


def _quarantined(document: Document) -> list[Finding]:
    return [
        failed(
            f"watchdog: gpu {gpu['gpu']} is quarantined and needs {gpu['needs'] or 'a human'}: {gpu['reason']}",
            f"`healthcheck history` has what led to it; repaired: `healthcheck set-healthy {gpu['gpu']} --reason TEXT`",
        )
        for gpu in document["gpus"]
        if gpu["state"] == "QUARANTINED"
    ]


CHECKS: dict[str, Check] = {"watchdog": watchdog}
