"""A bare server for the playbooks: the namespace box with sshd, and an inventory that reaches it.

ssh's ProxyCommand starts `sshd -i` inside the box and speaks to it over a pipe: the connection plugin, become, file
transfer and pipelining are the real ones, and no network is needed.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

from tests.host.box import BOX, Box
from tests.host.roots import Recipe

ROOT = Path(__file__).resolve().parents[2]
ANSIBLE = ROOT / ".venv-ansible" / "bin"
PLAY_SECONDS = 900

# Nothing of what the bundle has to bring: no gi, no pydbus, no venv, no pip.
SERVER = Recipe(
    name="server",
    packages=("systemd", "systemd-sysv", "dbus", "python3", "openssh-server", "iproute2", "procps", "kmod", "udev"),
    commands=BOX.commands,
)


def key_pair(directory: Path) -> Path:
    """A new ssh key; its path."""
    key = directory / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True, timeout=60)
    return key


def let_in(box: Box, key: Path) -> str:
    """Lets `key` into the box as root; the ProxyCommand that reaches it."""
    # systemd shares mounts only outside of containers (mount_setup.c); credentials of units need it.
    box.run(["mount", "--make-rshared", "/"])
    box.run(["mkdir", "-p", "-m", "700", "/root/.ssh", "/run/sshd"])
    box.write("/root/.ssh/authorized_keys", key.with_suffix(".pub").read_text(), mode=0o600)
    # Into its cgroup before its namespaces, as Box.popen does.
    join = 'echo $$ > "$1/cgroup.procs" && shift && exec nsenter "$@"'
    sshd = ["/usr/sbin/sshd", "-i", "-o", "UsePAM=no", "-o", "LogLevel=ERROR"]
    command = ["sh", "-c", join, "box", str(box.cgroup / "init.scope"), "-t", str(box.pid), "-a", "--", *sshd]
    return shlex.join(command)


def inventory(directory: Path, hosts: dict[str, dict[str, Any]]) -> Path:
    """An inventory file with these hosts and their variables in the group `appliance`."""
    path = directory / "inventory.json"
    path.write_text(json.dumps({"appliance": {"hosts": hosts}}))
    return path


def ssh_variables(key: Path, proxy: str) -> dict[str, Any]:
    options = ["-o", f"ProxyCommand={proxy.replace('%', '%%')}", "-o", "StrictHostKeyChecking=no"]
    options += ["-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]
    return {
        "ansible_host": "localhost", "ansible_user": "root", "ansible_ssh_private_key_file": str(key),
        "ansible_ssh_common_args": shlex.join(options), "ansible_python_interpreter": "/usr/bin/python3",
    }  # fmt: skip
