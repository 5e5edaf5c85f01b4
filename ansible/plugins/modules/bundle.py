#!/usr/bin/python
# Copyright: the LLM appliance maintainers
# SPDX-License-Identifier: Apache-2.0
"""The bundle on a host; DOCUMENTATION below."""

from __future__ import annotations

DOCUMENTATION = r"""
module: bundle
short_description: Install, switch or remove the appliance's code, units and Debian packages
description:
  - Brings a bundle made by C(make bundle) onto the host and makes its version the one that runs.
  - The bundle is copied only where its version is not there yet. Nothing is fetched from a network.
  - A version is built aside and appears by one rename; a run that was interrupted can simply be repeated.
  - Services are not restarted; RV(stale_units) are those that have to be.
version_added: 0.1.0
author: LLM appliance maintainers (@appliance)
options:
  src:
    description: The bundle on the controller. Not needed for O(version).
    type: path
  version:
    description: A version that is installed already, to switch back to, instead of O(src).
    type: str
  state:
    description:
      - V(active) has the version installed and running at the next start of the units.
      - V(present) has it installed beside the one that runs.
      - V(query) changes nothing and returns what is there.
      - V(absent) takes away all versions, vendor files and the Debian packages that a bundle brought.
    type: str
    choices: [active, present, query, absent]
    default: active
  keep_versions:
    description:
      - Versions that releases still need, as C(appliance release list) shows them. Others are removed, but never the
        current and the previous one. Without this option nothing is removed.
    type: list
    elements: str
  manifest:
    description: Set by the action plugin, the manifest of O(src).
    type: str
attributes:
  check_mode:
    description: Says what it would do.
    support: full
  diff_mode:
    description: Shows the steps.
    support: full
"""

EXAMPLES = r"""
- name: Install the bundle
  appliance.host.bundle:
    src: dist/appliance-0.1.0-debian12-x86_64.tar

- name: Go back to the version before
  appliance.host.bundle:
    version: 0.1.0
"""

RETURN = r"""
version: {description: The version that runs now., type: str, returned: always}
was: {description: The version that ran before this task., type: str, returned: always}
previous: {description: The version that ran before the current one., type: str, returned: always}
versions: {description: What is installed., type: list, elements: str, returned: always}
steps: {description: What was done, or would be., type: list, elements: str, returned: always}
code_changed: {description: Units run other code than what is installed now., type: bool, returned: always}
stale_units:
  description: Units that have to be restarted for that, also those that an earlier run left behind.
  type: list
  elements: str
  returned: always
units_changed: {description: Units other than before., type: bool, returned: always}
need_bundle: {description: For the action plugin; the bundle has to be copied., type: bool, returned: always}
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.appliance.host.plugins.module_utils import host_probe
from ansible_collections.appliance.host.plugins.module_utils.host_commands import (
    build_version,
    install_packages,
    installed_packages,
    remove_packages,
    settle,
)
from ansible_collections.appliance.host.plugins.module_utils.installation import (
    Installation,
    InstallError,
    Plan,
    State,
    parse_manifest,
)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "src": {"type": "path"},
            "version": {"type": "str"},
            "state": {"type": "str", "default": "active", "choices": ["active", "present", "query", "absent"]},
            "keep_versions": {"type": "list", "elements": "str"},
            "manifest": {"type": "str"},
        },
        supports_check_mode=True,
    )
    module.run_command_environ_update = {"LC_ALL": "C.UTF-8", "LANG": "C.UTF-8"}
    try:
        result = run(module, Installation())
    except InstallError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"{error.strerror}: {error.filename}; is the disk full, or /usr mounted read-only?")
    module.exit_json(**result)


def run(module: AnsibleModule, host: Installation) -> dict[str, Any]:
    state, wanted = host.read(), module.params["state"]
    if wanted == "query":
        return _result(state, state, [])
    if wanted == "absent":
        return _remove(module, host, state)
    manifest_data = module.params["manifest"]
    if manifest_data is None:
        if not module.params["version"]:
            raise InstallError("give src (a bundle on the controller) or version (one that is installed)")
        data = host.manifest_of(module.params["version"])
    else:
        data = manifest_data.encode()
    manifest = parse_manifest(data)
    there = installed_packages(module.run_command)
    missing = [package for package in manifest["packages"] if package["name"] not in there]
    prune = _unneeded(module.params["keep_versions"], state)
    plan = host.plan(state, data, activate=wanted == "active", missing_packages=missing, prune=prune)
    stale = _stale_units(manifest["version"]) if wanted == "active" else []
    steps = [*plan.lines(manifest["version"]), *(f"restart {unit}" for unit in stale)]
    result = _result(state, state, steps) | {"diff": _diff(state.current, steps), "stale_units": stale}
    result["code_changed"] = plan.switch or bool(stale)
    result["units_changed"] = any("/systemd/" in name for name in (*plan.write, *plan.remove))
    source = module.params["src"]
    if not plan or module.check_mode:
        return result
    if (plan.build or plan.install_packages) and source is None:
        if manifest_data is None:
            names = ", ".join(package["name"] for package in missing)
            raise InstallError(f"version {manifest['version']} needs Debian packages that are gone: {names}; give src")
        return result | {"need_bundle": True}
    _apply(module, host, state, plan, data)
    return result | _versions(host.read())


def _apply(module: AnsibleModule, host: Installation, state: State, plan: Plan, data: bytes) -> None:
    run_command, manifest = module.run_command, parse_manifest(data)
    version, source = manifest["version"], Path(module.params["src"] or "")
    names = [package["name"] for package in plan.install_packages]

    def packages(unpacked: Path) -> None:
        if plan.install_packages:  # recorded first: an uninstall must know of them, whatever happens next
            host.remember(state, manifest, names, before=True)
            install_packages(run_command, unpacked, plan.install_packages)

    if plan.build:
        build_version(run_command, host, source, data, version, packages)
    elif plan.install_packages:  # somebody removed them
        with host.unpacked(source, data) as unpacked:
            packages(unpacked)
    if module.params["state"] == "active":
        host.remember(state, manifest, names, before=True)
        host.apply_files(plan, manifest)
        settle(run_command, [*plan.write, *plan.remove])
        if plan.switch:
            host.switch(version)
        host.remember(state, manifest, names)
        host.prune(plan.prune)


def _stale_units(version: str) -> list[str]:
    """Not only those that this run makes stale: a run that broke off between the switch and the restarts must not leave
    old code running for ever."""
    running = host_probe.running_versions(Path("/"))
    return sorted(unit for unit, versions in running.items() if versions - {version})


def _unneeded(keep: list[str] | None, state: State) -> list[str]:
    if keep is None:
        return []
    return [version for version in state.versions if version not in {*keep, state.current, state.previous}]


def _remove(module: AnsibleModule, host: Installation, state: State) -> dict[str, Any]:
    there = bool(state.versions or state.files or state.links or host.lib.is_dir())
    steps = [f"remove /{name}" for name, now in (*state.files.items(), *state.links.items()) if now is not None]
    steps += ["remove /usr/lib/appliance"] if there else []
    steps += [f"purge Debian package {name}" for name in state.packages]
    result = _result(state, State(), steps) | {"diff": _diff(state.current, steps)}
    result["units_changed"] = any("/systemd/" in name for name in state.files)
    if steps and not module.check_mode:
        _, kept = remove_packages(module.run_command, state.packages)
        host.remove_all(state)
        settle(module.run_command, [name for name in state.files if "/systemd/" in name or "/udev/" in name])
        if kept:
            module.warn(kept)
    return result


def _result(before: State, after: State, steps: list[str]) -> dict[str, Any]:
    quiet: dict[str, Any] = {"code_changed": False, "units_changed": False, "need_bundle": False, "stale_units": []}
    return {"changed": bool(steps), "was": before.current, "steps": steps, **quiet, **_versions(after)}


def _versions(state: State) -> dict[str, Any]:
    return {"version": state.current, "previous": state.previous, "versions": list(state.versions)}


def _diff(current: str | None, steps: list[str]) -> dict[str, str]:
    head = f"version {current or 'none'}\n"
    return {"before": head, "after": head + "".join(f"{step}\n" for step in steps)}


if __name__ == "__main__":
    main()
