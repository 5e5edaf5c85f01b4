#!/usr/bin/python
# Copyright: the LLM appliance maintainers
# SPDX-License-Identifier: Apache-2.0
"""Facts for preflight; DOCUMENTATION below."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_facts
short_description: Read what preflight has to know of a host
description:
  - Distribution, systemd, cgroups, Python, disk, listeners, the NVIDIA driver and what is installed of the appliance,
    all in one round. Changes nothing.
version_added: 0.1.0
author: LLM appliance maintainers (@appliance)
options:
  ports:
    description: TCP ports; who listens on them is returned.
    type: list
    elements: int
    default: []
  paths:
    description: The free space of the file systems of these paths is returned.
    type: list
    elements: path
    default: []
attributes:
  check_mode:
    description: Nothing is changed anyway.
    support: full
  diff_mode:
    description: There is no difference to show.
    support: none
"""

EXAMPLES = r"""
- name: Look at the host
  appliance.host.host_facts:
    ports: [8000, 8001]
    paths: [/usr/lib/appliance]
"""

RETURN = r"""
appliance_host:
  description: The facts, also set as the variable C(appliance_host).
  type: dict
  returned: always
"""

import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.appliance.host.plugins.module_utils import host_probe
from ansible_collections.appliance.host.plugins.module_utils.installation import Installation, InstallError

ROOT = Path("/")


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "ports": {"type": "list", "elements": "int", "default": []},
            "paths": {"type": "list", "elements": "path", "default": []},
        },
        supports_check_mode=True,
    )
    try:
        state = Installation(ROOT).read()
    except InstallError as error:
        module.fail_json(msg=str(error))
    facts = {
        "distribution": host_probe.distribution(ROOT),
        "architecture": platform.machine(),
        "init": (host_probe.read_text(ROOT / "proc/1/comm") or "").strip(),
        "systemd": _systemd_version(module),
        "systemd_state": _systemd_state(module),
        "cgroup": host_probe.cgroup(ROOT),
        "python": _python(module),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": host_probe.memory_bytes(ROOT),
        "free_bytes": {path: host_probe.free_bytes(Path(path)) for path in module.params["paths"]},
        "listeners": host_probe.listeners(ROOT, module.params["ports"]),
        "nvidia": host_probe.nvidia(ROOT),
        "root": os.geteuid() == 0,
        "installed": {
            "version": state.current,
            "previous": state.previous,
            "versions": list(state.versions),
            "slots": host_probe.slots(ROOT),
        },
        "canary_run": host_probe.canary_run(ROOT),
        "configured": Path("/etc/appliance/appliance.toml").is_file(),
        "api_keys": host_probe.has_keys(ROOT),
    }
    module.exit_json(changed=False, appliance_host=facts, ansible_facts={"appliance_host": facts})


def _systemd_version(module: AnsibleModule) -> int | None:
    if shutil.which("systemctl") is None:
        return None
    status, out, _ = module.run_command(["systemctl", "--version"])
    words = out.split()
    return int(words[1]) if status == 0 and len(words) > 1 and words[1].isdecimal() else None


def _systemd_state(module: AnsibleModule) -> str | None:
    """running, degraded, starting, ... as `systemctl is-system-running` says it."""
    if shutil.which("systemctl") is None:
        return None
    return str(module.run_command(["systemctl", "is-system-running"])[1]).strip() or None


def _python(module: AnsibleModule) -> dict[str, Any]:
    """The distribution's Python, whichever one runs this module."""
    system = "/usr/bin/python3"
    if os.path.realpath(sys.executable) == os.path.realpath(system):
        return {"version": "{}.{}".format(*sys.version_info[:2]), "venv": _has_venv()}
    status, out, _ = module.run_command([system, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"])
    return {"version": out.strip() or None, "venv": status == 0}


def _has_venv() -> bool:
    try:
        import venv  # noqa: F401
    except ImportError:
        return False
    return True


if __name__ == "__main__":
    main()
