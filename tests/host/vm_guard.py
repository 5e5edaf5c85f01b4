"""Between a test and its qemu: `python -m tests.host.vm_guard SPEC`, so that neither qemu nor the machine's files stay
behind when the test process is killed.

Reads JSON lines from stdin: ["start", OPTION...] starts qemu with these further options and prints its pid, ["kill"]
ends it with SIGKILL and prints its status.
When stdin closes or the test process dies, qemu is killed and the machine's directories are removed.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.host import linux


def main() -> int:
    spec: dict[str, Any] = json.loads(sys.argv[1])
    os.set_inheritable(spec["lock"], False)  # held as long as this process lives: vm.py:remove_abandoned
    parent = os.pidfd_open(spec["parent"])
    if os.getppid() != spec["parent"]:
        return 1  # it died before the line above: the number means somebody else
    qemu: subprocess.Popen[bytes] | None = None
    try:
        poll = select.poll()
        poll.register(parent, select.POLLIN)
        poll.register(0, select.POLLIN | select.POLLHUP)
        while True:
            ready = dict(poll.poll())
            line = os.read(0, 4096) if 0 in ready else b""
            if not line:
                return 0
            command, *options = json.loads(line)
            if command == "start":
                qemu = _start(spec, options)
                print(qemu.pid, flush=True)
            elif command == "kill":
                print(_kill(qemu), flush=True)
                qemu = None
            else:
                raise ValueError(f"unknown command {command!r}")
    finally:
        _kill(qemu)
        for directory in spec["directories"]:
            shutil.rmtree(directory)


def _start(spec: dict[str, Any], options: list[str]) -> subprocess.Popen[bytes]:
    with Path(spec["log"]).open("ab") as log:
        return subprocess.Popen(
            [*spec["command"], *options], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            preexec_fn=linux.die_with_parent,
        )  # fmt: skip


def _kill(qemu: subprocess.Popen[bytes] | None) -> int | None:
    if qemu is None:
        return None
    qemu.kill()
    return qemu.wait()


if __name__ == "__main__":
    sys.exit(main())
