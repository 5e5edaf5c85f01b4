"""A unit with the sandbox of appliance-gpu@.service in which gpu_probe.py runs instead of the launcher; and, should
CUDA not live in that sandbox, which of its lines it is."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.host.gpu_world import PYTHON, UID, Slot, World
from tests.host.roots import HostError

UNIT = "gpu-host-probe.service"
OUTPUT, ORDER = "/run/gpu-host-probe.out", "/run/gpu-host-probe.order"
_NOT_OURS = re.compile(
    r"(Type|NotifyAccess|ExecStart|ExecReload|ExecStopPost|KillMode|Restart\w*|Timeout\w+|WatchdogSec|SyslogIdentifier"
    r"|RuntimeDirectory\w*|Description|Documentation|PartOf|Wants|After|OnFailure|StartLimit\w+)="
)
LOOSER = {
    "network": ["PrivateNetwork=no", "RestrictAddressFamilies=", "IPAddressDeny="],
    "system calls": ["SystemCallFilter="],
    "files": ["ProtectSystem=no", "PrivateTmp=no", "ProtectKernelTunables=no", "ProtectControlGroups=no"],
    "capabilities": ["CapabilityBoundingSet=~"],
    "kernel logs, modules, clock": ["ProtectKernelLogs=no", "ProtectKernelModules=no", "ProtectClock=no"],
    "namespaces, realtime, personality": ["RestrictNamespaces=no", "RestrictRealtime=no", "LockPersonality=no"],
}
"""Tried one by one, then all together, only where CUDA fails under the unit as it is shipped."""


def unit_text(shipped: str, gpu: int, looser: list[str]) -> str:
    """The launcher's unit with another command: every line of its sandbox, limits and slice is kept."""
    lines = shipped.replace("%i", str(gpu)).partition("[Install]")[0].splitlines()
    kept = [line for line in lines if line and not line.startswith("#") and not _NOT_OURS.match(line)]
    command = f'ExecStart={PYTHON} -P /opt/tests/tests/host/gpu_probe.py outside \'{{"file": "{ORDER}"}}\''
    own = ["Type=oneshot", command, f"StandardOutput=truncate:{OUTPUT}", "StandardError=journal"]
    own += ["TimeoutStartSec=60", *looser]
    return "\n".join([*kept, *own]) + "\n"


def probe(
    world: World, slot: Slot, inside: dict[str, Any], *, looser: list[str] | None = None, **limits: Any
) -> dict[str, Any]:
    """What gpu_probe.py saw in a scope with this slot's devices and these limits (fields of ScopePlan)."""
    order = {
        "gpu": slot.gpu, "devices": slot.nodes, "uuid": slot.uuid if slot.uuid.startswith("GPU-") else None,
        "uid": UID, "inside": inside, "limits": limits,
    }  # fmt: skip
    box, shipped = world.box, world.box.read("/usr/lib/systemd/system/appliance-gpu@.service")
    box.write(f"/run/systemd/system/{UNIT}", unit_text(shipped, slot.gpu, looser or []))
    box.write(ORDER, json.dumps(order))
    box.run(["rm", "-f", OUTPUT])
    box.run(["systemctl", "daemon-reload"])
    done = box.run(["systemctl", "start", UNIT], check=False, timeout=90)
    found: dict[str, Any] = {}
    for line in box.run(["cat", OUTPUT], check=False).stdout.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    box.run(["systemctl", "reset-failed", UNIT], check=False)  # it is no unit of the appliance
    if "outside" not in found:
        raise HostError(f"the probe did not report (status {done.returncode}):\n{box.journal(UNIT, 20)}")
    return found


def drop_in(world: World, lines: list[str]) -> None:
    """For every launcher; as an admin would."""
    world.box.write(
        "/etc/systemd/system/appliance-gpu@.service.d/gpu-host.conf", "\n".join(["[Service]", *lines]) + "\n"
    )
    world.box.run(["systemctl", "daemon-reload"])


def cuda_works(found: dict[str, Any], slot: Slot) -> bool:
    """One device, the slot's, that computes."""
    seen = found.get("inside", {}).get("cuda", {}).get("as the launcher starts it", {})
    return seen.get("uuids") == [slot.uuid] and seen.get("right") is True


def search(world: World, slot: Slot, inside: dict[str, Any]) -> tuple[list[str] | None, dict[str, Any]]:
    """(lines with which CUDA works, what each try gave); None where it works with none of them."""
    tries: dict[str, Any] = {}
    everything = [line for lines in LOOSER.values() for line in lines]
    for name, lines in [*LOOSER.items(), ("all of them", everything)]:
        try:
            found = probe(world, slot, inside, looser=lines)
        except HostError as error:
            tries[name] = str(error)[-500:]
            continue
        tries[name] = found.get("inside", {}).get("cuda")
        if cuda_works(found, slot):
            return lines, tries
    return None, tries
