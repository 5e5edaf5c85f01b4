"""The host as a reset needs to see it: who holds the GPU, which services run, what nvidia-smi answers. Changes nothing.

Holders are found by the device number of their open files, not by name: a container may have the node elsewhere. The
kernel lets only a process with CAP_SYS_PTRACE look at the files of others; whom we cannot see, the driver still counts
as a client and refuses the reset.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from dataclasses import dataclass, field, replace
from pathlib import Path

from appliance import command
from appliance.gpus import Gpu, mig_gpus, read_slots, visible_gpus
from appliance.launcher.scope import CGROUPS, own_cgroup, processes_in, scope_groups, slice_name
from appliance.log import ApplianceError
from appliance.paths import Paths
from appliance.statefile import read_state
from healthcheck.reset_plan import CLIENT_UNITS, PERSISTENCED, After, Facts, Holder, Limits

_SEARCH = "/usr/bin:/usr/sbin:/bin:/sbin"
_RUNNING = ("active", "activating", "reloading", "deactivating")
_HOLDS_SCHEMA = 1  # appliance/launcher/holds.py


@dataclass(slots=True)
class ResetHost:
    """Reads from `proc`, `dev` ... (tests: other roots) and through `run`."""

    paths: Paths
    run: command.Runner = command.run
    nvidia_smi: str | None = None  # given by hand; None: the driver's, from the usual places
    client_units: tuple[str, ...] = CLIENT_UNITS
    limits: Limits = field(default_factory=Limits)
    proc: Path = Path("/proc")
    nvidia: Path = Path("/proc/driver/nvidia")
    dev: Path = Path("/dev")
    pci: Path = Path("/sys/bus/pci/devices")
    cgroups: Path = CGROUPS

    @property
    def smi(self) -> str | None:
        return self.nvidia_smi or shutil.which("nvidia-smi", path=_SEARCH)

    def boot_id(self) -> str:
        return (self.proc / "sys/kernel/random/boot_id").read_text().strip()

    def read(self, uuid: str) -> Facts:
        """Everything; ApplianceError where systemd or our own files cannot be read."""
        gpu = self.gpu(uuid)
        slot = next((n for n, entry in read_slots(self.paths.gpus).items() if entry["uuid"] == uuid), None)
        return Facts(
            uuid=uuid,
            gpu=gpu,
            nvidia_smi=self.smi,
            stand_in=self.nvidia_smi is not None,
            slot=slot,
            stopped=None if slot is None else self._is_stopped(slot),
            scopes=self.scopes(slot),
            holders=self.holders(gpu),
            clients=tuple(unit for unit in self.client_units if self.is_running(unit)),
            persistence=None if self.smi is None else self._persistence(uuid),
            persistenced=self.is_running(PERSISTENCED),
            drm=_is_used("nvidia_drm", self.proc),
            mig=gpu is not None and gpu.minor in mig_gpus(self.nvidia),
        )

    def look_again(self, facts: Facts) -> Facts:
        """The same, with who is in the way now. Cheap: no command is run."""
        return replace(facts, scopes=self.scopes(facts.slot), holders=self.holders(facts.gpu))

    def gpu(self, uuid: str) -> Gpu | None:
        found = visible_gpus(self.nvidia / "gpus", self.pci)
        return next((gpu for gpu in found if gpu.uuid == uuid), None)

    def scopes(self, slot: int | None) -> tuple[str, ...]:
        """Of this slot, those with a process in them. Without cgroup v2 nobody can tell: the holders still can."""
        names = [] if slot is None else scope_groups(slot, self.cgroups) or []
        return tuple(
            name for name in names if processes_in(f"appliance.slice/{slice_name(slot or 0)}/{name}", self.cgroups)
        )

    def _is_stopped(self, slot: int) -> bool:
        """Held at "stop" by anybody, or its launcher is down (its state file goes with it)."""
        holds = (read_state(self.paths.holds(slot), schema=_HOLDS_SCHEMA) or {}).get("holds")
        held = isinstance(holds, dict) and any(
            isinstance(hold, dict) and hold.get("level") == "stop" for hold in holds.values()
        )
        return held or not self.paths.launcher_state(slot).exists()

    def is_running(self, unit: str) -> bool:
        result = self.run(["systemctl", "show", "--property=ActiveState", "--value", unit], timeout=self.limits.query)
        return command.check(result, f"cannot see whether {unit} runs").text.strip() in _RUNNING

    def ask(self, uuid: str, name: str) -> str | None:
        """One value of nvidia-smi --query-gpu; None: no answer, or a field that this driver does not know."""
        if self.smi is None:
            return None
        argv = [self.smi, f"--query-gpu={name}", "--format=csv,noheader", "-i", uuid]
        result = self.run(argv, timeout=self.limits.query)
        return result.text.strip() or None if result.ok else None

    def _persistence(self, uuid: str) -> bool | None:
        return {"Enabled": True, "Disabled": False}.get(self.ask(uuid, "persistence_mode") or "")

    def after(self, uuid: str) -> After:
        return After(self.ask(uuid, "uuid"), self.ask(uuid, "gpu_recovery_action"))

    # -- who holds a device

    def holders(self, gpu: Gpu | None) -> tuple[Holder, ...]:
        """Processes with the GPU's node open or mapped, but us."""
        node = None if gpu is None else self.dev / f"nvidia{gpu.minor}"
        try:
            found = None if node is None else node.stat()
        except FileNotFoundError:
            return ()
        if node is None or found is None:
            return ()
        if not stat.S_ISCHR(found.st_mode):
            raise ApplianceError(f"{node} is no device", hint="`systemctl start appliance-gpu-nodes` makes it again")
        pids = sorted(int(entry) for entry in os.listdir(self.proc) if entry.isdecimal())
        return tuple(
            Holder(pid, self._name(pid), self._unit(pid))
            for pid in pids
            if pid != os.getpid() and (self._has_open(pid, found.st_rdev) or self._has_mapped(pid, str(node)))
        )

    def _has_open(self, pid: int, device: int) -> bool:
        directory = self.proc / str(pid) / "fd"
        with contextlib.suppress(OSError):  # it ended, or is a kernel thread's
            for name in os.listdir(directory):
                path = directory / name
                with contextlib.suppress(OSError):
                    # Only nodes are looked at: stat() of a file on a dead NFS server would never return.
                    if "/dev/" in os.readlink(path) and path.stat().st_rdev == device:
                        return True
        return False

    def _has_mapped(self, pid: int, node: str) -> bool:
        """A mapping outlives the file descriptor that made it."""
        try:
            text = (self.proc / str(pid) / "maps").read_bytes()
        except OSError:
            return False
        wanted = node.encode()
        lines = (line.split(maxsplit=5) for line in text.splitlines() if wanted in line)
        return any(words[5].removesuffix(b" (deleted)") == wanted for words in lines if len(words) == 6)

    def _name(self, pid: int) -> str:
        try:
            return (self.proc / str(pid) / "comm").read_text(errors="replace").strip()
        except OSError:
            return "?"

    def _unit(self, pid: int) -> str | None:
        """The innermost unit of its cgroup: appliance-gpu0-v1.scope, nvidia-dcgm.service."""
        parts = (own_cgroup(pid, self.proc) or "").split("/")
        return next((part for part in reversed(parts) if part.endswith((".service", ".scope"))), None)


def _is_used(module: str, proc: Path) -> bool:
    """Whether a kernel module is loaded: /proc/modules."""
    try:
        lines = (proc / "modules").read_text().splitlines()
    except OSError:
        return False
    return any(line.split(" ", 1)[0] == module for line in lines)
