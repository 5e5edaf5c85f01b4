"""Faults in a box (tests/host): our stand-in for nvidia-smi, a service that holds the GPUs as DCGM does.

    install(box, uuids, on_reset=[{"file": "/var/lib/appliance/nvml.json", "merge": {...}}])
    state(box)["gpus"][0]["resets"]; change(box, reset="hang")

The stand-in lies in /var/lib/appliance, the only place that the sandbox of appliance-gpu-reset@.service can write to.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tests.healthcheck.reset_world import STAND_IN
from tests.host.box import Box

SMI = "/var/lib/appliance/nvidia-smi"
DCGM = "nvidia-dcgm.service"
_CLIENT = "/run/dcgm-has-the-gpus"  # there while the service runs: the stand-in refuses a reset then
_UNIT = f"""
[Service]
ExecStart=/bin/sleep infinity
ExecStartPost=/usr/bin/touch {_CLIENT}
ExecStopPost=/bin/rm -f {_CLIENT}
"""


def install(box: Box, uuids: Sequence[str], *, on_reset: Sequence[dict[str, Any]] = ()) -> None:
    """After tests.host.appliance_box.install. DCGM runs, persistence mode is on, every GPU wants a reset."""
    box.write(SMI, STAND_IN.read_text())
    box.run(["chmod", "755", SMI])
    gpus = [
        {"uuid": uuid, "pci": f"00000000:{27 + number:02X}:00.0", "persistence": True, "recovery_action": "Reset"}
        for number, uuid in enumerate(uuids)
    ]
    _write(box, {"gpus": gpus, "clients": [_CLIENT], "calls": [], "on_reset": list(on_reset)})
    box.write("/etc/default/appliance", f"APPLIANCE_NVIDIA_SMI={SMI}\n")
    box.write(f"/etc/systemd/system/{DCGM}", _UNIT)
    box.run(["systemctl", "daemon-reload"])
    box.run(["systemctl", "start", DCGM])


def state(box: Box) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(box.read(f"{SMI}.json"))
    return found


def change(box: Box, **changes: Any) -> None:
    """As the stand-in's docstring names them: reset="hang", query="fail" ..."""
    _write(box, state(box) | changes)


def result(box: Box, uuid: str) -> dict[str, Any]:
    """Of the last reset."""
    found: dict[str, Any] = json.loads(box.read(f"/var/lib/appliance/resets/{uuid}.json"))
    return found


def all_is_back(box: Box) -> bool:
    running = box.show(DCGM, "ActiveState")["ActiveState"] == "active"
    return running and all(gpu["persistence"] for gpu in state(box)["gpus"])


def _write(box: Box, value: dict[str, Any]) -> None:
    box.write(f"{SMI}.json", json.dumps(value))
