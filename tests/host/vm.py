"""The qemu machine: Debian 12 with its own kernel, every cgroup v2 controller, netfilter, a disk and ssh.

    with Machine(Image()) as vm:
        vm.run("systemctl is-system-running")
        vm.kill(); vm.boot()                      # a power cut; the disk is kept

It cannot reach anything outside, and only loopback ports of this machine lead to it: `vm.port(8000)`.
Call order: Machine.start -> vm_guard.py (owns qemu and the files) -> boot -> ssh.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from tests.host import qemu, vm_booted
from tests.host.evidence import Evidence
from tests.host.roots import HostError, cache_directory
from tests.host.vm_image import HOST_ALIAS, Image

BOOT_SECONDS = 300.0  # software emulation on a busy machine; 20 s on an idle one
RUN_SECONDS = 120.0
_CHECKOUT = Path(__file__).resolve().parents[2]


class Machine:
    """A machine with a disk of its own on top of the image. Gone, disk included, with `stop` or the test process.

    memory:   MiB
    internet: lets the guest out through this machine (off: an install must do without)
    cold:     boots at `start` as well; else, under software emulation, it wakes from a state saved after its first
              boot (vm_booted.py), seconds after it was asked for. `boot` is always a boot.
    """

    directory: Path  # disk.qcow2, console, qemu.log, ssh_config

    def __init__(
        self,
        image: Image | None = None,
        *,
        memory: int = 2048,
        cpus: int = 2,
        internet: bool = False,
        cold: bool = False,
    ) -> None:
        self._image, self._cold = image or Image(), cold
        self._options = {"memory": memory, "cpus": cpus, "internet": internet}
        self._guard: subprocess.Popen[str] | None = None
        self._monitor: qemu.Monitor | None = None
        self._pidfd = -1
        self._ports: dict[tuple[int, int], int] = {}  # (guest's port, number): ours
        self.evidence = Evidence("console and journal of the machine", self._last_words)

    # -- life
    def __enter__(self) -> Machine:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.evidence.keep()
        self.stop()

    def start(self, timeout: float = BOOT_SECONDS) -> Machine:
        """A fresh disk, switched on; returns when ssh works."""
        self.image = self._image.directory()
        woken = None if self._cold else vm_booted.find(self._image, self._options)
        remove_abandoned()
        self.directory = Path(tempfile.mkdtemp(dir=_machines()))
        lock = _lock(self.directory)
        assert lock
        self._sockets = _sockets(self.directory)
        self._sockets.mkdir(mode=0o700)
        self._qmp = self._sockets / "qmp"
        command = qemu.command_line(self.image, self.directory, self._qmp, **self._options)  # type: ignore[arg-type]
        spec = {
            "parent": os.getpid(), "command": command, "log": str(self.directory / "qemu.log"),
            "directories": [str(self._sockets), str(self.directory)], "lock": lock.fileno(),
        }  # fmt: skip
        with lock:
            self._guard = subprocess.Popen(
                [sys.executable, "-m", "tests.host.vm_guard", json.dumps(spec)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_CHECKOUT, start_new_session=True,
                pass_fds=[lock.fileno()],
            )  # fmt: skip
        self.evidence.live()
        try:
            base = woken / "disk.qcow2" if woken else self.image / "disk.raw"
            _check(
                "qemu-img", "create", "-q", "-f", "qcow2", "-F", base.suffix[1:], "-b", str(base),
                str(self.directory / "disk.qcow2"),
            )  # fmt: skip
            return self.boot(timeout, woken / "state" if woken else None)
        except BaseException:
            self.evidence.keep()
            self.stop()
            raise

    def boot(self, timeout: float = BOOT_SECONDS, state: Path | None = None) -> Machine:
        """Switches it on (after `kill` or `power_off`), from the disk as it is; returns when ssh works."""
        if self.alive():
            raise HostError("the machine runs already")
        deadline = time.monotonic() + timeout
        self._switched_off()
        wake = ["-incoming", f"exec:cat {shlex.quote(str(state))}"] if state else []
        pid = int(self._tell("start", *wake))
        try:
            self._pidfd = os.pidfd_open(pid)
            monitor = self._monitor = self._connect(deadline)
            if state:
                monitor.wake(deadline)
            for key, host in (self._ports or {(22, 0): 0}).items():
                self._ports[key] = monitor.forward(key[0], host)
        except (OSError, HostError) as error:
            raise HostError(f"qemu does not run ({error}): {self._read('qemu.log')}") from error
        self._write_ssh_config()
        self._wait_for_ssh(deadline)
        if state:
            self.run(f"date --utc --set=@{time.time():.0f}")  # its clock went on where it had stopped
        return self

    def save(self, directory: Path) -> None:
        """Stops the running machine and keeps its disk and memory as `disk.qcow2` and `state` (vm_booted.py)."""
        self._close_ssh()
        assert self._monitor
        self._monitor.save(directory / "state", time.monotonic() + 300)
        self.kill()
        shutil.copyfile(self.directory / "disk.qcow2", directory / "disk.qcow2")

    def alive(self) -> bool:
        return self._pidfd >= 0 and not select.select([self._pidfd], [], [], 0)[0]

    def kill(self) -> None:
        """A power cut: qemu gets SIGKILL. What the guest had flushed stays on its disk, see qemu.py:command_line."""
        self._tell("kill")
        self._switched_off()

    def power_off(self, timeout: float = 120.0) -> None:
        """An orderly shutdown."""
        self.run("systemctl poweroff", check=False)
        if not select.select([self._pidfd], [], [], timeout)[0]:
            raise HostError("the machine did not power off")
        self.kill()  # reaps qemu

    def reboot(self, timeout: float = BOOT_SECONDS) -> None:
        """`systemctl reboot`; returns when ssh works in the new boot."""
        deadline = time.monotonic() + timeout
        before = self.boot_id()
        self.run("systemctl reboot", check=False)
        self._close_ssh()
        while True:
            self._wait_for_ssh(deadline)
            try:
                if self.boot_id() != before:
                    return
            except HostError:  # the old boot's sshd went away in between
                if time.monotonic() > deadline:
                    raise
            self._close_ssh()
            time.sleep(0.5)

    def boot_id(self) -> str:
        return self.run("cat /proc/sys/kernel/random/boot_id", timeout=30).stdout.strip()

    def stop(self) -> None:
        """Ends it and removes its disk. Does nothing where it is stopped already."""
        if self._guard is None:
            return
        self.evidence.gone()
        guard, self._guard = self._guard, None
        self._switched_off()
        assert guard.stdin and guard.stdout
        guard.stdin.close()
        status = guard.wait(60)
        guard.stdout.close()
        if status:
            raise HostError(f"the machine's guard ended with status {status}")

    def _switched_off(self) -> None:
        self._close_ssh()
        if self._monitor:
            self._monitor.close()
            self._monitor = None
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        self._qmp.unlink(missing_ok=True)

    def _tell(self, *command: str) -> str:
        if self._guard is None:
            raise HostError("the machine is not started")
        assert self._guard.stdin and self._guard.stdout
        print(json.dumps(command), file=self._guard.stdin, flush=True)
        answer = self._guard.stdout.readline()
        if not answer:
            raise HostError("the machine's guard has ended")
        return answer

    def _connect(self, deadline: float) -> qemu.Monitor:
        while True:
            try:
                return qemu.Monitor(self._qmp)
            except OSError:
                if not self.alive() or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    # -- network and ssh
    def port(self, guest_port: int, number: int = 0) -> int:
        """The port on 127.0.0.1 that leads to this port of the machine; another one for each number. Kept over `kill`
        and `boot`. For one client each: qemu listens with a backlog of 1, and where two more connect before it has
        accepted, Linux answers with SYN cookies, of which it resets those that the full queue has no room for. Clients
        of several ports bind theirs, since the guest sees all of them at one address."""
        key = guest_port, number
        if key not in self._ports:
            if self._monitor is None:
                raise HostError("the machine is switched off")
            self._ports[key] = self._monitor.forward(guest_port)
        return self._ports[key]

    def _write_ssh_config(self) -> None:
        self.ssh_config.write_text(
            f"Host {HOST_ALIAS}\n HostName 127.0.0.1\n Port {self.port(22)}\n User root\n HostKeyAlias {HOST_ALIAS}\n"
            f" IdentityFile {self.image / 'key'}\n IdentitiesOnly yes\n StrictHostKeyChecking yes\n"
            f" UserKnownHostsFile {self.image / 'known_hosts'}\n GlobalKnownHostsFile /dev/null\n"
            " PasswordAuthentication no\n ServerAliveInterval 20\n ServerAliveCountMax 6\n LogLevel ERROR\n"
            # Software emulation takes seconds for a handshake, so all sessions share one connection.
            f" ControlMaster auto\n ControlPersist yes\n ControlPath {self._sockets}/%r\n"
        )

    @property
    def ssh_config(self) -> Path:
        """For `ssh -F`; the machine is called appliance-vm there. Log in as root (default) or admin (may sudo)."""
        return self.directory / "ssh_config"

    def write_inventory(self, path: Path, *, user: str = "root", **variables: object) -> Path:
        """An Ansible inventory (JSON, which is YAML) with this machine as its one host, in the group gpu_hosts."""
        host = {
            "ansible_host": HOST_ALIAS, "ansible_user": user, "ansible_become": user != "root",
            "ansible_python_interpreter": "/usr/bin/python3",
            # In place of Ansible's own arguments, which would open a second connection.
            "ansible_ssh_args": f"-F {shlex.quote(str(self.ssh_config))}", **variables,
        }  # fmt: skip
        path.write_text(json.dumps({"gpu_hosts": {"hosts": {"gpuhost": host}}}, indent=1) + "\n")
        return path

    def _wait_for_ssh(self, deadline: float) -> None:
        """A banner first (cheap to ask for), then a login."""
        while not (self._has_banner() and self._ssh("root", "true", 60).returncode == 0):
            if not self.alive():
                raise HostError(f"qemu ended while the machine booted: {self._read('qemu.log')}")
            if time.monotonic() > deadline:
                raise HostError("no ssh in time; the end of the console:\n" + self._read("console")[-3000:])
            time.sleep(0.1)

    def _has_banner(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self._ports[22, 0]), 5) as connection:
                connection.settimeout(3)
                return connection.recv(4) == b"SSH-"
        except OSError:
            return False

    def _ssh(
        self, user: str, command: str, timeout: float, input: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        arguments = ["ssh", "-F", str(self.ssh_config), "-l", user, HOST_ALIAS, "--", command]
        stdin: dict[str, Any] = {"stdin": subprocess.DEVNULL} if input is None else {"input": input}
        # Files instead of pipes: the shared connection goes to the background and would hold the pipes open.
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            done = subprocess.run(arguments, stdout=out, stderr=err, text=True, timeout=timeout, **stdin)
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(command, done.returncode, out.read(), err.read())

    def _close_ssh(self) -> None:
        for control in self._sockets.iterdir() if self._sockets.is_dir() else ():
            if control != self._qmp:
                subprocess.run(
                    ["ssh", "-F", str(self.ssh_config), "-l", control.name, "-O", "exit", HOST_ALIAS],
                    capture_output=True, timeout=30,
                )  # fmt: skip
                control.unlink(missing_ok=True)

    # -- inside
    def run(
        self, command: str, *, check: bool = True, timeout: float = RUN_SECONDS, input: str | None = None,
        user: str = "root",
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """A shell command line. With `check` a status other than 0 raises HostError that shows what it said."""
        # The shell must outlive its last command, else ssh makes 255 of every death by a signal.
        done = self._ssh(user, f"{command}\nexit $?", timeout, input)
        done.args = command
        if done.returncode == 255 and "exited" not in done.stderr and not self.alive():
            raise HostError(f"the machine is not running: {command}")
        if check and done.returncode:
            raise HostError(
                f"in the machine: {command!r} ended with status {done.returncode}\n"
                f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
            )
        return done

    def popen(self, command: str, *, user: str = "root", **options: Any) -> subprocess.Popen[Any]:
        """As subprocess.Popen, for a shell command line in the machine."""
        return subprocess.Popen(["ssh", "-F", self.ssh_config, "-l", user, HOST_ALIAS, "--", command], **options)

    def copy(self, source: Path, target: str, timeout: float = 300.0) -> None:
        """A file or directory of this machine to the path `target` in the machine; parents are made, root owns it."""
        target = target.rstrip("/")
        parent, name = target.rpartition("/")[::2]
        unpack = f"mkdir -p {shlex.quote(parent or '/')} && tar -x --no-same-owner -C {shlex.quote(parent or '/')}"
        pack = ["tar", "-c", "--owner=0", "--group=0", "--transform", f"s,^{source.name},{name},S"]
        with subprocess.Popen([*pack, "-C", source.parent, source.name], stdout=subprocess.PIPE) as tar:
            with self.popen(unpack, stdin=tar.stdout, stdout=subprocess.DEVNULL) as ssh:
                if ssh.wait(timeout) or tar.wait(30):
                    raise HostError(f"{source} could not be copied to {target} in the machine")

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Parents are made; the file appears complete."""
        to, new = shlex.quote(path), shlex.quote(f"{path}.new")
        script = f'mkdir -p "$(dirname {to})" && cat > {new} && chmod {mode:o} {new} && mv {new} {to}'
        self.run(script, input=text)

    def read(self, path: str) -> str:
        return self.run(f"cat -- {shlex.quote(path)}").stdout

    def wait_until(self, condition: Callable[[], bool], what: str, timeout: float = 120.0) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                raise HostError(f"after {timeout:g} s still not so: {what}")
            time.sleep(0.2)

    def wait_for(self, unit: str, state: str = "active", timeout: float = 120.0) -> None:
        """Until the unit's ActiveState is `state`; HostError with its journal when it is not in time."""
        show = f"systemctl show --property=ActiveState --value -- {shlex.quote(unit)}"
        try:
            self.wait_until(lambda: self.run(show).stdout.strip() == state, f"{unit} is {state}", timeout)
        except HostError as error:
            raise HostError(f"{error}\n{self.journal(unit)}") from error

    def wait_running(self, timeout: float = BOOT_SECONDS) -> None:
        """Until systemd has no jobs left; HostError with the failed units when it is not `running` then."""
        state = self.run("systemctl is-system-running --wait", check=False, timeout=timeout).stdout.strip()
        if state != "running":
            raise HostError(f"the machine is {state}\n{self.run('systemctl --failed --no-pager').stdout}")

    def journal(self, unit: str | None = None, lines: int = 100) -> str:
        of_unit = f"--unit {shlex.quote(unit)}" if unit else ""
        return self.run(f"journalctl --no-pager -o short-precise -n {lines} {of_unit}", check=False).stdout

    def _read(self, name: str) -> str:
        path = self.directory / name
        return path.read_text(errors="replace") if path.exists() else ""

    def _last_words(self) -> str:
        console = self._read("console")[-4000:]
        return f"{console}\n{self.journal(lines=200) if self.alive() else '(switched off)'}"


def _machines() -> Path:
    path = cache_directory() / "machines"
    path.mkdir(exist_ok=True)
    return path


def _sockets(directory: Path) -> Path:
    """A short path: unix(7) allows 108 characters, and ssh adds some."""
    return Path("/tmp", f"appliance-vm-{directory.name}")


def _lock(directory: Path, flags: str = "x") -> IO[str] | None:
    """Held by the guard as long as the machine lives; None if it is."""
    lock = (directory / "lock").open(flags)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


def remove_abandoned() -> None:
    """The files of machines whose guard was killed."""
    for directory in _machines().iterdir():
        try:
            lock = _lock(directory, "r+")
        except FileNotFoundError:
            continue  # it is being made, or removed, just now
        if lock:
            with lock:
                shutil.rmtree(_sockets(directory), ignore_errors=True)
                shutil.rmtree(directory, ignore_errors=True)


def _check(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise HostError(f"{command[0]}: {done.stderr}")
