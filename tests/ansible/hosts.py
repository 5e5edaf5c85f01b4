"""A bare server for the playbooks, and ansible-playbook as a controller runs it.

The server is the namespace box with sshd; ssh's ProxyCommand starts `sshd -i` inside it and speaks to it over a pipe.
So the connection plugin, file transfer and pipelining are the real ones, and no network is needed.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.host.box import BOX, Box
from tests.host.roots import Recipe

PLAY_SECONDS = 900

# Nothing of what the bundle has to bring: no gi, no pydbus, no pip.
SERVER = Recipe(
    name="server",
    packages=("systemd", "systemd-sysv", "dbus", "python3", "openssh-server", "iproute2", "procps", "kmod", "udev"),
    commands=BOX.commands,
)
# Changed by whatever a host does: logs, caches, package and unit databases, what Ansible and sudo leave with the user.
MOVING = re.compile(
    r"/(proc|sys|dev|run|tmp|var/tmp|var/log|var/cache|var/lib/(dpkg|systemd|apt|private)|root|home/[^/]+/\.(ansible|sudo_as_admin_successful))(/|$)"
    r"|/etc/((passwd|group|shadow|gshadow|subuid|subgid)-|ld\.so\.cache|\.pwd\.lock)$"
)


@dataclass(frozen=True)
class Play:
    """What one run of ansible-playbook did on its one host, from the recap."""

    status: int
    output: str
    ok: int
    changed: int
    failed: int
    rescued: int
    skipped: int

    def tasks(self, state: str = "changed") -> list[str]:
        """Names of the tasks (and handlers) that ended so on the host."""
        found, name = [], ""
        for line in self.output.splitlines():
            if matched := re.match(r"(?:TASK|RUNNING HANDLER) \[(?:[\w.]+ : )?(.*?)\]", line):
                name = matched[1]
            elif line.startswith(f"{state}: [") and name not in found:
                found.append(name)
        return found


def key_pair(directory: Path) -> Path:
    """A new ssh key; its path."""
    key = directory / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True, timeout=60)
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


def ssh_variables(key: Path, proxy: str) -> dict[str, Any]:
    """Inventory variables of a host that `proxy` reaches."""
    options = ["-o", f"ProxyCommand={proxy.replace('%', '%%')}", "-o", "StrictHostKeyChecking=no"]
    options += ["-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]
    return {
        "ansible_host": "localhost", "ansible_user": "root", "ansible_ssh_private_key_file": str(key),
        "ansible_ssh_common_args": shlex.join(options), "ansible_python_interpreter": "/usr/bin/python3",
    }  # fmt: skip


def inventory(path: Path, hosts: dict[str, dict[str, Any]]) -> Path:
    """An inventory file with these hosts and their variables in the group `appliance`."""
    path.write_text(json.dumps({"appliance": {"hosts": hosts}}))
    return path


@dataclass(frozen=True)
class Controller:
    """ansible-playbook with an inventory and variables, in a directory of its own."""

    binaries: Path
    directory: Path
    inventory: Path
    variables: dict[str, Any]

    def play(self, playbook: str, *options: str, timeout: float = PLAY_SECONDS, **variables: Any) -> Play:
        """Runs appliance.host.PLAYBOOK. `variables` come on top of the controller's."""
        given = self.directory / "variables.json"
        given.write_text(json.dumps(self.variables | variables))
        command = [self.binaries / "ansible-playbook", "-i", self.inventory, f"appliance.host.{playbook}"]
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("ANSIBLE_", "PYTHON"))}
        environment |= {
            "ANSIBLE_HOME": str(self.directory / "home"), "ANSIBLE_PIPELINING": "true", "ANSIBLE_NOCOLOR": "true",
            "ANSIBLE_LOCALHOST_WARNING": "false", "LC_ALL": "C.UTF-8",
        }  # fmt: skip
        done = subprocess.run(
            [*map(str, command), "--diff", "--extra-vars", f"@{given}", *options],
            cwd=self.directory, env=environment, capture_output=True, text=True, timeout=timeout,
        )  # fmt: skip
        output = done.stdout + done.stderr
        recap = re.search(
            r"ok=(\d+)\s+changed=(\d+)\s+unreachable=(\d+)\s+failed=(\d+)\s+skipped=(\d+)\s+rescued=(\d+)", output
        )
        assert recap, output
        ok, changed, unreachable, failed, skipped, rescued = map(int, recap.groups())
        assert not unreachable, output
        return Play(done.returncode, output, ok, changed, failed, rescued, skipped)


def listing(text: str) -> dict[str, str]:
    """Path -> type, mode, owner and link target, from `find / -xdev -printf LISTING`, without what moves by itself."""
    rows = (line.split("\t") for line in text.splitlines())
    return {row[0]: " ".join(row[1:]) for row in rows if not MOVING.match(row[0])}


LISTING = r"%p\t%y %m %u:%g\t%l\n"


def boiled_down(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """What differs, a line each: + there now, - gone, ~ other."""
    lines = [f"+ {path}" for path in sorted(after.keys() - before.keys())]
    lines += [f"- {path}" for path in sorted(before.keys() - after.keys())]
    return lines + [f"~ {path}: {before[path]} -> {now}" for path, now in after.items() if before.get(path, now) != now]
