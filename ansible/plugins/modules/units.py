#!/usr/bin/python
# Copyright: the LLM appliance maintainers
# SPDX-License-Identifier: Apache-2.0
"""All units in one go; DOCUMENTATION below."""

from __future__ import annotations

DOCUMENTATION = r"""
module: units
short_description: Enable and start the appliance's systemd units, all in one go
description:
  - Asks systemd once about all units, enables those that are not enabled and starts those that do not run, each with
    one command.
  - M(ansible.builtin.systemd_service) takes one unit a call; with eight units and eight GPUs that is sixteen.
version_added: 0.1.0
author: LLM appliance maintainers (@appliance)
options:
  names:
    description: Units with their suffix, in the order in which they are started.
    type: list
    elements: str
    required: true
attributes:
  check_mode:
    description: Says what it would do.
    support: full
  diff_mode:
    description: Shows what is enabled and runs, before and after.
    support: full
"""

EXAMPLES = r"""
- name: Enable and start
  appliance.host.units:
    names: [appliance.target, appliance-gateway@stable.service]
"""

RETURN = r"""
enabled: {description: Units that were enabled., type: list, elements: str, returned: always}
started: {description: Units that were started., type: list, elements: str, returned: always}
"""

from ansible.module_utils.basic import AnsibleModule

_RUNS = ("active", "activating", "reloading")


def parse(text: str) -> dict[str, dict[str, str]]:
    """Unit -> property -> value, of `systemctl show --property=Id,LoadState,UnitFileState,ActiveState UNIT...`."""
    blocks = [dict(line.split("=", 1) for line in block.splitlines() if "=" in line) for block in text.split("\n\n")]
    return {block["Id"]: block for block in blocks if "Id" in block}


def plan(names: list[str], shown: dict[str, dict[str, str]]) -> tuple[list[str], list[str], list[str]]:
    """(not there, to enable, to start)"""
    known = [name for name in names if name in shown and shown[name]["LoadState"] != "not-found"]
    enable = [name for name in known if shown[name]["UnitFileState"] != "enabled"]
    start = [name for name in known if shown[name]["ActiveState"] not in _RUNS]
    return [name for name in names if name not in known], enable, start


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "names": {"type": "list", "elements": "str", "required": True},
        },
        supports_check_mode=True,
    )
    names = module.params["names"]
    command = ["systemctl", "show", "--property=Id,LoadState,UnitFileState,ActiveState", "--", *names]
    missing, enable, start = plan(names, parse(_run(module, command)))
    if missing:
        module.fail_json(msg=f"systemd has no unit {', '.join(missing)}; install the bundle first")
    if not module.check_mode:
        for verb, units in (("enable", enable), ("start", start)):
            if units:
                _run(module, ["systemctl", verb, "--", *units])
    before = "".join(f"{name}: enabled\n" for name in names if name not in enable)
    before += "".join(f"{name}: runs\n" for name in names if name not in start)
    after = "".join(f"{name}: enabled\n" for name in names) + "".join(f"{name}: runs\n" for name in names)
    module.exit_json(
        changed=bool(enable or start), enabled=enable, started=start, diff={"before": before, "after": after}
    )


def _run(module: AnsibleModule, command: list[str]) -> str:
    status, out, err = module.run_command(command)
    if status:
        failed = f"`{' '.join(command)}`: {err.strip() or out.strip() or status}"
        module.fail_json(msg=f"{failed}. `systemctl --failed` names the unit, `journalctl -u UNIT` says why")
    return str(out)


if __name__ == "__main__":
    main()
