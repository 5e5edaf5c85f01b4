"""The appliance in a box, put there by hand as an install does it: the shipped units, the user, a venv of our code.

    install(box); add_release(box, tmp_path, "v1"); use(box, "v1")
    box.run(["systemctl", "start", "appliance.target"])

The bundle and its installer are tested in the machine (tests/ansible); this is for what the units and the programs do.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from appliance import __version__
from tests.host.box import CHECKOUT, Box
from tests.release_files import release_json
from tests.tiny import make_tiny_model

SYSTEMD = CHECKOUT / "systemd"
VENV = f"/usr/lib/appliance/{__version__}/venv"
PYTHON = "/usr/lib/appliance/current/venv/bin/python"
CODE, SITE = "/opt/checkout", "/opt/site-packages"
UID = 870  # systemd/sysusers.d
GATEWAYS = ("appliance-gateway@stable.service", "appliance-gateway@canary.service")
CONFIG = """
schema = 1
[gpus]
backend = "cpu"
cpu_slots = {slots}
[engine]
max_model_len = 512
drain_timeout = 5
arguments = ["--threads", "1", "--kv-tokens", "4096"]
{engine}
"""


BIND = ((CHECKOUT, CODE), (sysconfig.get_path("purelib"), SITE))
"""For Box: our code and its packages inside."""


def why_not_here() -> str | None:
    """Why the box's Python cannot load our compiled parts; None if it can."""
    version: tuple[int, ...] = sys.version_info[:2]
    if version == (3, 11):
        return None
    return "the box has Debian 12's Python 3.11, our compiled parts here are for another version"


def boot_options() -> dict[str, Any]:
    """For Box, in a test: skips where our code cannot run inside."""
    if reason := why_not_here():
        pytest.skip(reason)
    return {"bind": BIND, "network": False}


def units(slots: int = 1) -> tuple[str, ...]:
    """All that runs: the target, the rules, the launchers, the gateways, the watchdog, the canary's controller."""
    launchers = (f"appliance-gpu@{number}.service" for number in range(slots))
    last = ("appliance-watchdog.service", "appliance-canary.service")
    return ("appliance.target", "appliance-netfilter.service", *launchers, *GATEWAYS, *last)


def install(box: Box, *, slots: int = 1, config: str | None = None) -> None:
    """Files, user, directories, slots of backend "cpu"; no release, nothing enabled."""
    # systemd shares mounts outside of containers (mount_setup.c); credentials need it.
    box.run(["mount", "--make-rshared", "/"])
    for pattern, target in (
        ("*.service", "system"), ("*.target", "system"), ("*.slice", "system"), ("preset/*.preset", "system-preset"),
    ):  # fmt: skip
        for file in SYSTEMD.glob(pattern):
            box.write(f"/usr/lib/systemd/{target}/{file.name}", file.read_text())
    for kind in ("sysusers", "tmpfiles"):
        box.write(f"/usr/lib/{kind}.d/appliance.conf", (SYSTEMD / f"{kind}.d/appliance.conf").read_text())
    box.run(["systemd-sysusers"])
    box.run(["systemd-tmpfiles", "--create", "appliance.conf"])
    _make_venv(box)
    box.write("/etc/appliance/appliance.toml", CONFIG.format(slots=slots, engine="") if config is None else config)
    gpus = [{"slot": number, "uuid": f"CPU-{number}", "state": "HEALTHY"} for number in range(slots)]
    box.write("/var/lib/appliance/gpus.json", json.dumps({"schema": 1, "gpus": gpus}))
    box.run(["systemctl", "daemon-reload"])


def _make_venv(box: Box) -> None:
    box.write(f"{VENV}/pyvenv.cfg", "home = /usr/bin\ninclude-system-site-packages = true\nversion = 3.11.2\n")
    box.write(f"{VENV}/lib/python3.11/site-packages/appliance.pth", f"{CODE}\n{SITE}\n")
    box.run(["mkdir", "-p", f"{VENV}/bin"])
    box.run(["ln", "-s", "/usr/bin/python3", f"{VENV}/bin/python"])
    box.run(["ln", "-s", __version__, "/usr/lib/appliance/current"])


def add_release(box: Box, folder: Path, name: str, **changes: Any) -> None:
    """A tiny real model; `changes` are of its release.json."""
    model = make_tiny_model(folder / name / "model", seed=len(name))
    box.copy(model.parent, f"/var/lib/appliance/releases/{name}")
    release = release_json(name, **{"engine_version": __version__, "python": PYTHON} | changes)
    box.write(f"/var/lib/appliance/releases/{name}/release.json", json.dumps(release))
    box.run(["chmod", "-R", "a+rX", "/var/lib/appliance/releases"])


def use(box: Box, release: str, slot: str = "stable") -> None:
    box.run(["ln", "-sfn", f"../releases/{release}", f"/var/lib/appliance/slots/{slot}"])


def stop(box: Box) -> None:
    """`appliance stop`: returns when all of it has ended."""
    box.run([PYTHON, "-P", "-m", "appliance", "stop"], timeout=150)
