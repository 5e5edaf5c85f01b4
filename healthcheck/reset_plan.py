"""What a reset of one GPU takes, decided from what was read, and what its result means. Pure: healthcheck/reset_host.py
reads, healthcheck/reset.py does.

Sources: nvidia-smi(1) ("--gpu-reset", "RETURN VALUE", "GPU Recovery Action"); NVSentinel #1690 (persistence mode counts
as a client), #1691 (so does every telemetry agent); mig-parted #181 (nvidia_drm holds the GPU without a process);
NCCL #1488 (a fabric manager that is stopped breaks the other GPUs: it is left alone).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from appliance.command import Result
from appliance.gpus import Gpu

UUID = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|CPU-\d{1,4}")
CLIENT_UNITS = (
    "nvidia-dcgm.service", "dcgm.service", "nvidia-dcgm-exporter.service", "dcgm-exporter.service", "nvsm.service",
)  # fmt: skip
"""Services that keep every GPU of the host open for as long as they run. Stopped for the reset, started after it."""
PERSISTENCED = "nvidia-persistenced.service"
_LEFT_ALONE = (PERSISTENCED, "nvidia-fabricmanager.service")  # nvidia-smi and the driver agree with these by themselves
_DONE = re.compile(r"GPU \S+ was successfully reset")
_IN_USE = re.compile(r"in use by another|currently being used by", re.I)
_UNKNOWN_VALUES = ("", "n/a", "[n/a]", "[not supported]", "[unknown error]")

Needs = Literal["human", "reboot"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds that each part may take. Together below TimeoutStartSec= of appliance-gpu-reset@.service."""

    free: float = 30.0  # until engines, our NVML and whoever else holds the GPU have let go of it
    unit: float = 30.0  # stop or start of one service
    reset: float = 60.0  # nvidia-smi --gpu-reset; 5 to 10 s are usual
    query: float = 30.0  # any other call of nvidia-smi: the first one after a reset initialises the GPU


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that has the GPU's device node open or mapped."""

    pid: int
    name: str
    unit: str | None  # systemd's, from its cgroup

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}{f', {self.unit}' if self.unit else ''})"


@dataclass(frozen=True, slots=True)
class Facts:
    """The host before a reset. None is unknown."""

    uuid: str
    gpu: Gpu | None  # None: the driver does not show it, or a slot of the CPU backend
    nvidia_smi: str | None  # path; None: not installed
    stand_in: bool  # the path was given by hand: tests, drills
    slot: int | None
    stopped: bool | None  # nothing starts an engine meanwhile: the slot is held at "stop", or has no launcher
    scopes: tuple[str, ...] = ()  # of this slot, with processes in them
    holders: tuple[Holder, ...] = ()
    clients: tuple[str, ...] = ()  # of the client units, those that are active
    persistence: bool | None = None
    persistenced: bool = False  # the daemon is active
    drm: bool = False  # module nvidia_drm is in use
    mig: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    message: str
    hint: str
    needs: Needs | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What is changed for the reset and put back after it."""

    uuid: str
    nvidia_smi: str
    node: str | None  # /dev/nvidiaN
    stop_units: tuple[str, ...]
    persistence_off: bool

    def lines(self) -> list[str]:
        """For --dry-run, in the order in which they happen."""
        smi = self.nvidia_smi
        wait = [f"wait until nobody holds {self.node}"] if self.node else []
        return [
            *(f"systemctl stop {unit}" for unit in self.stop_units),
            *([f"{smi} -pm 0 -i {self.uuid}"] if self.persistence_off else []),
            *wait,
            f"{smi} --gpu-reset -i {self.uuid}",
            f"{smi} --query-gpu=gpu_recovery_action -i {self.uuid}",
            *([f"{smi} -pm 1 -i {self.uuid}"] if self.persistence_off else []),
            *(f"systemctl start {unit}" for unit in self.stop_units),
        ]


def plan(facts: Facts) -> Plan | Refusal:
    """Refusals that waiting does not mend. Whom to wait for: `blockers`."""
    virtual = facts.uuid.startswith("CPU-")
    if facts.nvidia_smi is None:
        return Refusal("nvidia-smi is not installed", "it comes with the driver's utilities", "human")
    if virtual and not facts.stand_in:
        return Refusal(f"{facts.uuid} is a slot of the CPU backend: there is no GPU to reset", "", "human")
    if facts.gpu is None and not virtual:
        hint = (
            "a GPU that fell off the bus comes back with a reboot: see `appliance doctor` and `journalctl -k -g NVRM`"
        )
        return Refusal(f"the driver does not show {facts.uuid}", hint, "reboot")
    if facts.mig:
        return Refusal(f"{facts.uuid} is divided by MIG", "turn MIG off: the appliance serves whole GPUs", "human")
    if facts.stopped is False:
        hint = "the watchdog holds it before a reset; by hand: `appliance stop GPU`, then start this unit again"
        return Refusal(f"slot {facts.slot} is neither held nor stopped: an engine could start during the reset", hint)
    # Unknown, while the daemon that keeps it on is there: a GPU that wants a reset often answers no query.
    on = facts.persistence if facts.persistence is not None else facts.persistenced
    node = f"/dev/nvidia{facts.gpu.minor}" if facts.gpu is not None else None
    return Plan(facts.uuid, facts.nvidia_smi, node, facts.clients, on)


def blockers(facts: Facts) -> list[str]:
    """Who has to be gone before anything is touched: engines, and holders that the plan does not stop by itself."""
    known = {*facts.clients, *_LEFT_ALONE}
    return [
        *(f"engine {scope}" for scope in facts.scopes),
        *(str(one) for one in facts.holders if one.unit not in known),
    ]


def still_holding(holders: tuple[Holder, ...]) -> list[str]:
    """Who has to be gone right before the reset: everybody but those that nvidia-smi talks to itself."""
    return [str(one) for one in holders if one.unit not in _LEFT_ALONE]


@dataclass(frozen=True, slots=True)
class Verdict:
    ok: bool
    detail: str
    needs: Needs | None = None
    timed_out: bool = False
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class After:
    """nvidia-smi's answers after the reset. None: no answer."""

    uuid: str | None
    recovery_action: str | None


_BY_CODE: dict[int, tuple[str, Needs | None]] = {  # nvidia-smi(1), RETURN VALUE
    2: ("nvidia-smi does not take the UUID or the option: is the driver older than 470?", "human"),
    3: ("this GPU or platform cannot be reset alone (nvidia-smi(1), --gpu-reset)", "human"),
    4: ("no permission: the unit runs without CAP_SYS_ADMIN, or not as root", "human"),
    6: ("nvidia-smi does not find this GPU", "reboot"),
    8: ("the GPU's external power cables are not attached", "human"),
    9: ("the NVIDIA driver is not loaded", "human"),
    10: ("the kernel found an interrupt problem of the GPU", "reboot"),
    12: ("libnvidia-ml.so is not found: the driver's packages are of different versions", "human"),
    13: ("libnvidia-ml.so is older than nvidia-smi: the driver's packages are of different versions", "human"),
    14: ("the GPU's infoROM is corrupted", "human"),
    15: ("the GPU has fallen off the bus", "reboot"),
}


def judge_command(result: Result, facts: Facts, seconds: float) -> Verdict | None:
    """What nvidia-smi --gpu-reset said; None: that it worked, which is still to be checked (`judge_after`)."""
    if result.timed_out:
        detail = f"nvidia-smi --gpu-reset did not end in {seconds:g} s: the driver hangs"
        return Verdict(False, detail, "reboot", timed_out=True)
    text = (result.stdout + b"\n" + result.stderr).decode(errors="replace")
    if _IN_USE.search(text):
        detail = f"in use by another client: {', '.join(map(str, facts.holders)) or 'no process is seen to hold it'}"
        if facts.drm:
            detail += "; the module nvidia_drm is loaded, which holds it (`modprobe -r nvidia_drm`)"
        return Verdict(False, detail, "human" if facts.drm and not facts.holders else None)
    if result.ok and _DONE.search(text):
        return None
    said, needs = _BY_CODE.get(result.code, (result.why(), None))
    words = " ".join(text.split())[:300]
    if result.ok:
        said = "nvidia-smi ended with 0 but did not say that it reset the GPU"
    return Verdict(False, f"{said}: {words}" if words else said, needs)


def judge_after(uuid: str, after: After) -> Verdict:
    """The effect counts, not the exit status (mig-parted #9)."""
    if after.uuid is None:
        return Verdict(False, "the GPU does not answer after the reset", "reboot")
    if after.uuid != uuid:
        return Verdict(False, f"after the reset {after.uuid} answers in its place", "human")
    action = (after.recovery_action or "").strip()
    if action.lower() == "none":
        return Verdict(True, "reset; the driver asks for no further action")
    if action.lower() in _UNKNOWN_VALUES:
        return Verdict(True, "reset; this driver does not say whether more is needed")
    needs: Needs = "reboot" if "reboot" in action.lower() else "human"
    return Verdict(False, f"reset, but the driver still asks for: {action}", needs)
