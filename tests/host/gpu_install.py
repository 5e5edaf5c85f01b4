"""Installs a bundle (`make bundle GPU=1`) in a box with the collection's own code, without Ansible: what the module
`bundle` does, but for Debian packages, which the box's root has. Runs in the box: /usr/bin/python3 gpu_install.py FILE,
with the collection below /opt/collections (installed Ansible is not needed by what is imported here).
"""

# mypy: ignore-errors
# The collection is found only in the box.

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def run(command, cwd=None, environ_update=None):
    """As AnsibleModule.run_command."""
    env = os.environ | (environ_update or {})
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def main() -> None:
    sys.path.append("/opt/collections")
    from ansible_collections.appliance.host.plugins.module_utils.host_commands import build_version, settle
    from ansible_collections.appliance.host.plugins.module_utils.installation import (
        Installation,
        parse_manifest,
        read_bundle_manifest,
    )

    bundle, host = Path(sys.argv[1]), Installation()
    data = read_bundle_manifest(bundle)
    manifest, state = parse_manifest(data), host.read()
    version = manifest["version"]
    build_version(run, host, bundle, data, version, lambda unpacked: None)
    plan = host.plan(host.read(), data, activate=True, missing_packages=[], prune=[])
    host.apply_files(plan, manifest)
    settle(run, [*plan.write, *plan.remove])
    host.switch(version)
    host.remember(state, manifest, [])
    print(json.dumps({"version": version, "files": plan.write}))


if __name__ == "__main__":
    main()
