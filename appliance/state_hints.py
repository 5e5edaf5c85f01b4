"""What to do about a state file that cannot be understood, by what it holds: what is lost where it is moved away, and
what brings it back. appliance/statefile.py, which knows no meanings, asks here when it has bad news."""

from __future__ import annotations

from pathlib import Path

_RELEASE = "a release cannot be without it: `appliance release remove {0}`, then `appliance release add {0} ...` again"
_EVENTS = "`healthcheck history` and /var/lib/appliance/events.jsonl"
_BY_NAME = {
    "release.json": _RELEASE,
    "manifest.json": _RELEASE,
    "gpus.json": "keep a copy: slot numbers, quarantines and counted resets are in it. Restore a backup or repair the "
    "entry; else look in `healthcheck history` which GPUs were quarantined, move it away, `appliance gpus bind`, "
    "`appliance drain` those, and restart appliance-watchdog",
    "canary.json": "keep a copy: a canary may be on, and its rules in force. `canary status`, `canary cleanup`, then "
    "move it away and restart appliance-canary",
    "canary-abort.json": "move it away, restart appliance-canary, and ask again: `canary rollback`",
    "leases.json": "it names engines that run beside what the slots say: move it away, look in `appliance status`, and "
    "`appliance restart GPU` where one is left",
    "drain.json": "it says that this host is drained for load balancers: move it away, then `appliance drain --all "
    "--reason TEXT` or `appliance undrain --all`",
    "watchdog.json": "counters that the watchdog has seen are in it, no decisions: move it away and restart "
    "appliance-watchdog; they are counted from now on",
    "state.json": "the launcher writes it anew: `appliance restart GPU`",
}
_BY_FOLDER = {
    "holds": f"keep a copy: why this GPU is out of service is in it; see {_EVENTS}. Move it away, `appliance start "
    "GPU`, and `appliance drain GPU --reason TEXT` if it must stay out",
    "golden": "answers are recorded once: `appliance release remove`, then `appliance release add --golden auto`",
    "resets": "services that a reset has stopped may be in it: `systemctl --failed` and `systemctl status "
    "nvidia-persistenced`, start what is missing, then move it away",
    "canary-runs": "a run that is over: move it away, nothing else needs it",
}
_OTHER = 'keep a copy, move it away; what it held is in README, "Where state lives"'


def damaged_hint(path: Path) -> str:
    """The next step for the damaged file `path`."""
    if by_name := _BY_NAME.get(path.name):  # first: a release may be called "holds"
        return by_name.format(path.parent.name)
    return _BY_FOLDER.get(path.parent.name, _OTHER)
