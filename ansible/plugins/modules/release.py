#!/usr/bin/python
# Copyright: the LLM appliance maintainers
# SPDX-License-Identifier: Apache-2.0
"""A release on a host; DOCUMENTATION below."""

from __future__ import annotations

DOCUMENTATION = r"""
module: release
short_description: Make a release of a stored model and put it into service
description:
  - Runs C(appliance release add) and C(appliance release use).
  - A release never changes. Where one of that name is there with another model or other options, the task fails.
version_added: 0.1.0
author: LLM appliance maintainers (@appliance)
options:
  name:
    description: Name of the release.
    type: str
    required: true
  model:
    description: Name of the model in the store. Not needed where the release is there already.
    type: str
  model_name:
    description: What clients call it. The default is O(model).
    type: str
  options:
    description: V(max_model_len), V(max_batch_seqs), V(max_queued_requests).
    type: dict
    default: {}
  arguments:
    description: Further arguments of the engine.
    type: list
    elements: str
    default: []
  golden:
    description: Whether golden answers are recorded.
    type: str
    choices: [auto, skip]
    default: auto
  link:
    description: Link to the stored model instead of copying it.
    type: bool
    default: false
  slot:
    description: The slot that has to serve it; V(none) only makes the release.
    type: str
    choices: [stable, canary, none]
    default: stable
attributes:
  check_mode:
    description: Says what it would do.
    support: full
  diff_mode:
    description: Shows release and slot.
    support: full
"""

EXAMPLES = r"""
- name: Serve release v1
  appliance.host.release:
    name: v1
    model: llama-3.1-8b
"""

RETURN = r"""
added: {description: The release was made., type: bool, returned: always}
used: {description: The slot was switched., type: bool, returned: always}
previous: {description: The release that the slot served before., type: str, returned: always}
releases: {description: "All releases with engine_version and slots.", type: list, elements: dict, returned: always}
warnings: {description: What the command warned of., type: list, elements: str, returned: when there are some}
"""

import json
from typing import Any

from ansible.module_utils.basic import AnsibleModule

APPLIANCE = "/usr/bin/appliance"


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "model": {"type": "str"},
            "model_name": {"type": "str"},
            "options": {"type": "dict", "default": {}},
            "arguments": {"type": "list", "elements": "str", "default": []},
            "golden": {"type": "str", "choices": ["auto", "skip"], "default": "auto"},
            "link": {"type": "bool", "default": False},
            "slot": {"type": "str", "choices": ["stable", "canary", "none"], "default": "stable"},
        },
        supports_check_mode=True,
    )
    module.run_command_environ_update = {"LC_ALL": "C.UTF-8", "LANG": "C.UTF-8"}
    params, check = module.params, module.check_mode
    name, slot = params["name"], params["slot"]
    if check and not _installed():
        releases = []
    else:
        releases = _run(module, ["release", "list"])["releases"]
    there = next((release for release in releases if release["name"] == name), None)
    if there is not None and (problem := difference(there, params)):
        module.fail_json(msg=f"the release {name} is there {problem}; a release never changes: choose another name")
    if there is None and not params["model"]:
        module.fail_json(msg=f"there is no release {name}, and no model to make it of: give `model`")
    previous = next((release["name"] for release in releases if slot in release["slots"]), None)
    result = {"added": there is None, "used": slot != "none" and previous != name, "previous": previous}
    result["changed"] = result["added"] or result["used"]
    result["diff"] = {
        "before": _text(there is not None, name, slot, previous),
        "after": _text(True, name, slot, previous if slot == "none" else name),
    }
    if not check:
        if there is None:
            result["changed"] |= bool(_run(module, _add(params))["changed"])
        if result["used"]:
            _run(module, ["release", "use", name, "--slot", slot, "--quiet"])
        releases = _run(module, ["release", "list"])["releases"] if result["changed"] else releases
    module.exit_json(releases=releases, **result)


def difference(release: dict[str, Any], params: dict[str, Any]) -> str | None:
    """What the release that is there has other than asked for; None if it is the same."""
    if release.get("problem"):
        return f"but damaged ({release['problem']})"
    wanted = {key: int(value) for key, value in params["options"].items()}
    options = dict(release.get("options") or {})
    arguments = list(options.pop("arguments", None) or [])
    options = {key: value for key, value in options.items() if value is not None}
    pairs = [("options", options, wanted), ("arguments", arguments, params["arguments"])]
    if params["model"]:
        pairs += [("model", release.get("model"), params["model"])]
        pairs += [("model_name", release.get("model_name"), params["model_name"] or params["model"])]
    for what, now, asked in pairs:
        if now != asked:
            return f"with {what} {now!r} instead of {asked!r}"
    return None


def _add(params: dict[str, Any]) -> list[str]:
    command = ["release", "add", params["name"], "--quiet", "--model", params["model"], "--golden", params["golden"]]
    command += ["--model-name", params["model_name"]] if params["model_name"] else []
    command += ["--link"] if params["link"] else []
    command += [word for key, value in sorted(params["options"].items()) for word in ("--option", f"{key}={value}")]
    return command + [f"--argument={argument}" for argument in params["arguments"]]


def _run(module: AnsibleModule, arguments: list[str]) -> dict[str, Any]:
    """The JSON document of `appliance ARGUMENTS --json`; what it warned of becomes a warning of the task."""
    status, out, error = module.run_command([APPLIANCE, *arguments, "--json"])
    if status != 0:
        module.fail_json(msg=f"appliance {' '.join(arguments[:3])}: {error.strip() or out.strip()}", rc=status)
    for line in error.splitlines():
        if line.startswith("warning: "):
            module.warn(line.removeprefix("warning: "))
    document: dict[str, Any] = json.loads(out)
    return document


def _installed() -> bool:
    try:
        open(APPLIANCE, "rb").close()
    except OSError:
        return False
    return True


def _text(there: bool, name: str, slot: str, serving: str | None) -> str:
    lines = [f"release {name}: {'there' if there else 'absent'}\n"]
    return "".join(lines + ([] if slot == "none" else [f"{slot}: {serving or 'nothing'}\n"]))


if __name__ == "__main__":
    main()
