"""qemu: its command line, whether KVM works, and its control socket (QMP)."""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.host.roots import HostError, cache_directory

PROGRAM = f"qemu-system-{platform.machine()}"
_PROBE_SECONDS = 20


def accelerator(kernel: Path) -> list[str]:
    """KVM where a kernel really runs in it, else qemu's own software emulation. A /dev/kvm proves nothing: inside
    some virtual machines it is there and qemu aborts. So the kernel is started without a disk; it must get as far as
    to panic for want of one. The verdict holds until the next boot of this machine."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    verdict = cache_directory() / "kvm-verdict"
    try:
        known, works = verdict.read_text().split()
    except (OSError, ValueError):
        known, works = "", ""
    if known != boot:
        works = "kvm" if os.access("/dev/kvm", os.R_OK | os.W_OK) and _kvm_boots(kernel) else "tcg"
        verdict.write_text(f"{boot} {works}\n")
    return ["-accel", "kvm"] if works == "kvm" else ["-accel", "tcg,thread=multi,tb-size=256"]


def _kvm_boots(kernel: Path) -> bool:
    command = [
        PROGRAM, "-accel", "kvm", "-cpu", "max", "-nodefaults", "-display", "none", "-m", "256", "-no-reboot",
        "-serial", "stdio", "-kernel", str(kernel), "-append", "console=ttyS0 panic=-1",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=_PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0 and b"Unable to mount root fs" in done.stdout


def command_line(
    image: Path, directory: Path, qmp: Path, *, memory: int, cpus: int, internet: bool, append: str = ""
) -> list[str]:
    """For a machine with `disk.qcow2` and `console` in `directory`; memory in MiB.

    cache=writeback: what the guest has flushed (fsync) is in this machine's page cache or on its disk, which is safe
    against the death of qemu. What it has not flushed may be lost with it, as in a power cut: qcow2 keeps its tables in
    memory until a flush. cache=unsafe would ignore the flushes, and cache=none only adds what protects against a
    crash of this machine."""
    return [
        PROGRAM, *accelerator(image / "vmlinuz"), "-cpu", "max,svm=off", "-smp", str(cpus), "-m", str(memory),
        "-nodefaults", "-display", "none", "-serial", f"file:{directory / 'console'}",
        "-qmp", f"unix:{qmp},server=on,wait=off",
        "-kernel", str(image / "vmlinuz"), "-initrd", str(image / "initrd"),
        "-append", f"root=/dev/vda rw console=ttyS0 quiet no5lvl {append}".strip(),
        "-drive", f"file={directory / 'disk.qcow2'},if=virtio,format=qcow2,cache=writeback",
        "-netdev", f"user,id=net0,restrict={'off' if internet else 'on'}", "-device", "virtio-net-pci,netdev=net0",
        "-device", "virtio-rng-pci", "-pidfile", str(directory / "pid"),
    ]  # fmt: skip


@functools.cache
def version() -> str:
    return subprocess.run([PROGRAM, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]


def why_no_qemu() -> str | None:
    """Why this machine cannot have qemu machines, or None."""
    if platform.machine() != "x86_64":
        return "the qemu machine is x86_64 only"
    for program, package in (
        (PROGRAM, "qemu-system-x86"), ("qemu-img", "qemu-utils"), ("ssh", "openssh-client"),
        ("mmdebstrap", "mmdebstrap"), ("mkfs.ext4", "e2fsprogs"),
    ):  # fmt: skip
        if not shutil.which(program):
            return f"{program} is missing: apt-get install {package}"
    return None if os.geteuid() == 0 else "building the machine's disk needs root"


class Monitor:
    """The QMP connection of a running qemu."""

    def __init__(self, path: Path, timeout: float = 30.0) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout)
        self._socket.connect(str(path))
        self._lines = self._socket.makefile("r")
        self._reply("QMP")
        self.execute("qmp_capabilities")

    def close(self) -> None:
        self._lines.close()
        self._socket.close()

    def execute(self, command: str, **arguments: Any) -> Any:
        self._socket.sendall(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
        return self._reply("return")

    def human(self, line: str) -> str:
        """A line of the human monitor: hostfwd_add and `info usernet` have no other form."""
        return str(self.execute("human-monitor-command", **{"command-line": line}))

    def _reply(self, key: str) -> Any:
        while line := self._lines.readline():
            message = json.loads(line)
            if "error" in message:
                raise HostError(f"qemu: {message['error']['desc']}")
            if key in message:
                return message[key]  # events have other keys
        raise HostError("qemu closed its control socket")

    def save(self, path: Path, deadline: float) -> None:
        """Stops the guest and writes its state (memory, devices) to `path`; its disk is flushed."""
        self.execute("stop")
        self.execute("migrate", uri=f"exec:cat > {shlex.quote(str(path))}")
        while (status := self.execute("query-migrate").get("status")) != "completed":
            if status in ("failed", "cancelled") or time.monotonic() > deadline:
                raise HostError(f"qemu did not save its state ({status})")
            time.sleep(0.1)

    def wake(self, deadline: float) -> None:
        """After a start with -incoming: lets the guest run once its state is read."""
        while (status := self.execute("query-status")["status"]) == "inmigrate":
            if time.monotonic() > deadline:
                raise HostError(f"qemu did not read its state ({status})")
            time.sleep(0.02)
        self.execute("cont")

    def forward(self, guest_port: int, host_port: int = 0) -> int:
        """One more loopback port of this machine that leads to the guest's; 0 lets the kernel choose."""
        before = self._forwarded(guest_port)
        answer = self.human(f"hostfwd_add net0 tcp:127.0.0.1:{host_port}-:{guest_port}")
        if answer.strip():
            raise HostError(f"qemu: {answer.strip()}")
        for port in self._forwarded(guest_port) - before:
            return port
        raise HostError(f"qemu does not list the forwarded port {guest_port}")

    def _forwarded(self, guest_port: int) -> set[int]:
        lines = self.human("info usernet").splitlines()
        found = (re.match(r"\s*TCP\[HOST_FORWARD\]\s+\S+\s+127\.0\.0\.1\s+(\d+)\s+\S+\s+(\d+)", line) for line in lines)
        return {int(one[1]) for one in found if one and int(one[2]) == guest_port}
