"""The namespace box: a Debian root's systemd as pid 1 of its own namespaces, at native speed and without a VM.

    with Box(root_filesystem(BOX)) as box:
        box.run(["systemctl", "start", "appliance.target"])

`python -m tests.host.box shell [--appliance]` (as root) holds one by hand: a shell in it, and it is gone at the end.

Own pid, mount, network, ipc, uts and cgroup namespaces; real iptables; the root is an overlay, so each box is fresh.
Root in the box is root of this machine: a box keeps tests apart, it does not lock anyone in.
Call order: Box.start -> box_init.py:main (stays as its parent) -> _be_init -> systemd.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import IO, Any

from tests.host.box_init import remove_cgroup
from tests.host.evidence import Evidence
from tests.host.roots import HostError, Recipe, cache_directory

BOOT_SECONDS = 60.0
RUN_SECONDS = 60.0
NUMBERS = 64
CHECKOUT = Path(__file__).resolve().parents[2]

BOX = Recipe(
    name="box",
    packages=(
        "systemd", "systemd-sysv", "dbus", "python3", "python3-gi", "python3-pydbus", "iproute2", "iptables",
        "nftables", "conntrack", "procps", "kmod", "zstd", "xz-utils", "sudo", "ca-certificates",
    ),
    commands=(
        # Nothing in a box has a console, and what looks after a machine's disks and packages has no business here.
        "systemctl mask console-getty.service getty.target apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer"
        " fstrim.timer e2scrub_all.timer e2scrub_reap.service systemd-networkd-wait-online.service"
        " systemd-firstboot.service sys-kernel-debug.mount sys-kernel-tracing.mount sys-fs-fuse-connections.mount",
        "echo box > /etc/hostname; printf \"127.0.0.1 localhost box\\n::1 localhost box\\n\" > /etc/hosts",
    ),
)  # fmt: skip

Command = Sequence[str | os.PathLike[str]]


class Box:
    """A booted box. It goes with `stop`, with the test process, or when its systemd ends, and leaves nothing behind.

    root:     a root filesystem (roots.py:root_filesystem); only read
    bind:     paths of this machine to show inside: "/opt/a" (same place), ("/opt/a", "/srv/a"), both read-only, or
              ("/opt/a", "/srv/a", "rw"). Mounts below such a path are not shown.
    network:  a veth pair: `box.address` and `box.address6` can be reached from here. Otherwise loopback only.
    size:     of the tmpfs that takes what is written in the box
    """

    pid: int  # of its pid 1, as this machine counts

    def __init__(
        self,
        root: Path,
        bind: Sequence[str | os.PathLike[str] | tuple[Any, ...]] = (),
        *,
        network: bool = True,
        hostname: str = "box",
        size: str = "4g",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.root, self.hostname = Path(root), hostname
        self.environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}
        self.environment |= environment or {}
        self._bind = [_bind_entry(entry) for entry in bind]
        self._network, self._size = network, size
        self._parent: subprocess.Popen[str] | None = None
        self._log: IO[str] | None = None
        self._booted_cursor = ""
        self.evidence = Evidence(f"journal of the box {hostname} since it was up", self._journal_since_boot)

    # -- life
    def __enter__(self) -> Box:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.evidence.keep()
        self.stop()

    def start(self, timeout: float = BOOT_SECONDS) -> Box:
        """Boots it; returns once systemd says `running`, else HostError with the failed units and the journal."""
        deadline = time.monotonic() + timeout
        remove_abandoned()
        self.number, number_socket = _take_number()
        self.cgroup = cgroup2_mount() / f"appliance-box-{self.number}"
        net = self._addresses() if self._network else None
        with number_socket:
            spec = {
                "parent": os.getpid(), "number_fd": number_socket.fileno(), "root": str(self.root),
                "scratch": str(cache_directory() / "boxes" / str(self.number)), "cgroup": str(self.cgroup),
                "bind": self._bind, "net": net, "hostname": self.hostname, "size": self._size,
            }  # fmt: skip
            self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by stop
            self._parent = subprocess.Popen(
                [sys.executable, "-m", "tests.host.box_init", json.dumps(spec)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, cwd=CHECKOUT,
                pass_fds=[number_socket.fileno()], start_new_session=True,
            )  # fmt: skip
        try:
            self._enable_controllers()
            assert self._parent.stdout
            if not select.select([self._parent.stdout], [], [], timeout)[0]:
                raise HostError(f"the box was not made in {timeout:g} s")
            line = self._parent.stdout.readline()
            if not line:
                self._parent.wait(30)
                self._log.seek(0)
                raise HostError(f"the box could not be made:\n{self._log.read()[-4000:]}")
            self.pid = json.loads(line)["pid"]
            self._wait_booted(deadline)
        except BaseException:
            self.stop()
            raise
        self.evidence.live()
        return self

    def _wait_booted(self, deadline: float) -> None:
        state = ""
        while time.monotonic() < deadline and self.alive():
            # Fails while systemd does not listen yet; says "running" or "degraded" once all jobs are done.
            done = self.run(["systemctl", "is-system-running"], check=False)
            state = done.stdout.strip() or done.stderr.strip()
            if state == "running":
                shown = self.run(["journalctl", "--quiet", "--lines=1", "--show-cursor"]).stdout
                self._booted_cursor = shown.rpartition("-- cursor: ")[2].strip()
                return
            if state in ("degraded", "maintenance"):
                break
            time.sleep(0.05)
        text = f"the box did not boot ({state or 'its systemd ended'})"
        if self.alive():
            failed = self.run(["systemctl", "--no-pager", "list-units", "--failed", "--plain"], check=False).stdout
            jobs = self.run(["systemctl", "--no-pager", "list-jobs"], check=False).stdout
            text += f"\n{failed}\n{jobs}\n{self.journal(lines=60)}"
        raise HostError(text)

    def alive(self) -> bool:
        return self._parent is not None and self._parent.poll() is None

    def stop(self) -> None:
        """Ends everything in it at once, as a power cut would. Does nothing where it is stopped already."""
        if self._parent is None:
            return
        self.evidence.gone()
        parent, self._parent = self._parent, None
        assert parent.stdin and parent.stdout and self._log
        parent.stdin.close()  # what the parent waits for
        try:
            status = parent.wait(30)
        except subprocess.TimeoutExpired:
            parent.kill()
            status = parent.wait(30)
        parent.stdout.close()
        self._log.seek(0)
        text = self._log.read()
        self._log.close()
        if status and hasattr(self, "pid"):
            raise HostError(f"the box's parent ended with status {status}:\n{text[-4000:]}")

    # -- inside
    def popen(
        self, command: Command, *, user: str | None = None, cwd: str = "/", **options: Any
    ) -> subprocess.Popen[Any]:
        """As subprocess.Popen, with the process in the box's namespaces and cgroup (init.scope). It dies with the
        returned process. `env` is added to `self.environment`."""
        environment = self.environment | dict(options.pop("env", None) or {})
        as_user = ["--reuid", user, "--regid", user, "--init-groups"] if user else []
        # Into its cgroup before its namespaces: from inside, a mount with nsdelegate refuses to move us in, and
        # systemd-run --scope then fails without a word.
        join = 'echo $$ > "$1/cgroup.procs" && shift && exec nsenter "$@"'
        return subprocess.Popen(
            [
                "sh", "-c", join, "box", self.cgroup / "init.scope", "-t", str(self.pid), "-a", "--",
                "/usr/bin/setpriv", "--pdeathsig", "KILL", *as_user, "--",
                "/usr/bin/env", "-i", "-C", cwd, *(f"{key}={value}" for key, value in environment.items()), *command,
            ],
            **options,
        )  # fmt: skip

    def run(
        self, command: Command, *, check: bool = True, timeout: float = RUN_SECONDS, input: str | None = None,
        user: str | None = None, cwd: str = "/", env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Waits for the command; stdout and stderr are kept. With `check` a status other than 0 raises HostError that
        shows both."""
        # Files instead of pipes: a daemon that the command leaves behind would hold pipes open.
        with ExitStack() as files:
            out, err, given = (files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3))
            given.write(input or "")
            given.seek(0)
            with self.popen(command, user=user, cwd=cwd, env=env, stdin=given, stdout=out, stderr=err) as process:
                try:
                    process.wait(timeout)
                except BaseException:
                    process.kill()
                    raise
            for file in (out, err):
                file.seek(0)
            words = [os.fspath(word) for word in command]
            done = subprocess.CompletedProcess(words, process.returncode, out.read(), err.read())
        if check and done.returncode:
            raise HostError(
                f"in the box: {words} ended with status {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
            )
        return done

    def write(self, path: str, text: str, mode: int = 0o644, owner: str = "root:root") -> None:
        """Parent directories are made. The file appears complete."""
        script = 'mkdir -p "${1%/*}"; cat > "$1.new"; chown "$3" "$1.new"; chmod "$2" "$1.new"; mv "$1.new" "$1"'
        self.run(["sh", "-euc", script, "write", path, f"{mode:o}", owner], input=text)

    def read(self, path: str) -> str:
        return self.run(["cat", path]).stdout

    def exists(self, path: str) -> bool:
        return self.run(["test", "-e", path], check=False).returncode == 0

    def copy(self, source: Path, target: str) -> None:
        """A file or directory of this machine to `target` in the box (its name there, not the folder to put it in);
        modes are kept, the owner is root."""
        parent = PurePosixPath(target).parent
        into = ["tar", "-x", "--no-same-owner", "-C", str(parent)]
        pack = [
            "tar",
            "-c",
            "--owner=0",
            "--group=0",
            "--transform",
            f"s,^{source.name},{PurePosixPath(target).name},S",
        ]
        self.run(["mkdir", "-p", str(parent)])
        with subprocess.Popen([*pack, "-C", source.parent, source.name], stdout=subprocess.PIPE) as tar:
            unpack = self.popen(into, stdin=tar.stdout)
            if unpack.wait(300) or tar.wait(30):
                raise HostError(f"{source} could not be copied to {target} in the box")

    # -- systemd
    def show(self, unit: str, *properties: str) -> dict[str, str]:
        """`systemctl show` of a unit, those properties only (all if none is named)."""
        wanted = [f"--property={','.join(properties)}"] if properties else []
        shown = self.run(["systemctl", "show", *wanted, "--", unit]).stdout
        return dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)

    def wait_for(self, unit: str, state: str = "active", timeout: float = 30.0) -> None:
        """Until the unit's ActiveState is `state`; HostError with its status and journal when it is not in time, or
        at once when it has failed and that is not what was waited for."""
        deadline = time.monotonic() + timeout
        while (now := self.show(unit, "ActiveState").get("ActiveState")) != state:
            if time.monotonic() > deadline or (now == "failed" and self.show(unit, "Job").get("Job") in ("", "0")):
                status = self.run(["systemctl", "--no-pager", "status", "--", unit], check=False).stdout
                raise HostError(f"{unit} is {now}, not {state}\n{status}\n{self.journal(unit)}")
            time.sleep(0.05)

    def journal(self, unit: str | None = None, lines: int = 100) -> str:
        """The end of the journal, of one unit or of everything."""
        of_unit = ["--unit", unit] if unit else []
        command = ["journalctl", "--no-pager", "--output=short-precise", "--lines", str(lines), *of_unit]
        return self.run(command, check=False).stdout

    def _journal_since_boot(self) -> str:
        command = ["journalctl", "--no-pager", "--output=short-precise", "--after-cursor", self._booted_cursor]
        return "\n".join(self.run(command, check=False).stdout.splitlines()[-300:])

    # -- what it can do
    @property
    def controllers(self) -> frozenset[str]:
        """The cgroup v2 controllers that bite in the box. Empty where this machine's v1 hierarchies own them."""
        return frozenset((self.cgroup / "cgroup.controllers").read_text().split())

    def _enable_controllers(self) -> None:
        """What the parent cgroup has is handed down as far as the kernel lets us (in a container whose own processes
        sit in that cgroup it does not: see `controllers`)."""
        parent = self.cgroup.parent
        for name in (parent / "cgroup.controllers").read_text().split():
            try:
                (parent / "cgroup.subtree_control").write_text(f"+{name}")
            except OSError:
                continue

    def _addresses(self) -> dict[str, str]:
        self.address = f"10.213.{self.number}.2"
        self.address6 = f"fd21:3a:{self.number:x}::2" if Path("/proc/net/if_inet6").exists() else ""
        outside6 = self.address6[:-1] + "1" if self.address6 else ""
        return {"name": f"apbox{self.number}", "outside4": f"10.213.{self.number}.1", "inside4": self.address,
                "outside6": outside6, "inside6": self.address6}  # fmt: skip


def _bind_entry(entry: str | os.PathLike[str] | tuple[Any, ...]) -> tuple[str, str, bool]:
    source, *rest = entry if isinstance(entry, tuple) else (entry,)
    target = os.fspath(rest[0]) if rest else os.fspath(source)
    source = Path(source)
    if not source.exists() or not target.startswith("/") or ".." in PurePosixPath(target).parts:
        raise HostError(f"cannot bind {source} to {target}: the source must exist and the target be absolute")
    if rest[1:] not in ([], ["rw"], ["ro"]):
        raise HostError(f"bind of {source}: {rest[1:]} is neither 'ro' nor 'rw'")
    return str(source.resolve()), target, rest[1:] == ["rw"]


def _hold(number: int) -> socket.socket | None:
    """The number of a box, unless a living one has it: an abstract socket, which the kernel frees with its holder."""
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        holder.bind(f"\0appliance-test-box-{number}")
    except OSError:
        holder.close()
        return None
    return holder


def _take_number() -> tuple[int, socket.socket]:
    for number in range(NUMBERS):
        if holder := _hold(number):
            return number, holder
    raise HostError(f"all {NUMBERS} boxes are in use")


def remove_abandoned() -> None:
    """What boxes left whose parent was killed: an empty cgroup and a mount point."""
    boxes = cache_directory() / "boxes"
    for scratch in boxes.iterdir() if boxes.is_dir() else ():
        if holder := _hold(int(scratch.name)):
            with holder:
                remove_cgroup(cgroup2_mount() / f"appliance-box-{scratch.name}")
                scratch.rmdir()


def cgroup2_mount() -> Path:
    """Where cgroup v2 is mounted: /sys/fs/cgroup, or .../unified beside the v1 hierarchies."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        options = fields.split()[5].split(",")
        if rest.startswith("cgroup2 ") and "rw" in options:
            return Path(fields.split()[4])
    raise HostError("no writable cgroup2 mount: mount -t cgroup2 none /sys/fs/cgroup")


def why_no_box() -> str | None:
    """Why this machine cannot have boxes, or None."""
    if os.geteuid() != 0:
        return "the box needs root"
    for program, package in (("nsenter", "util-linux"), ("ip", "iproute2"), ("mmdebstrap", "mmdebstrap")):
        if not shutil.which(program):
            return f"{program} is missing: apt-get install {package}"
    missing = [
        kind for kind in ("pid", "mnt", "net", "ipc", "uts", "cgroup") if not Path("/proc/self/ns", kind).exists()
    ]
    if missing:
        return f"this kernel has no {', '.join(missing)} namespaces"
    try:
        parent = cgroup2_mount()
    except HostError as error:
        return str(error)
    return None if os.access(parent, os.W_OK) else f"{parent} is not writable"


def main(argv: Sequence[str] | None = None) -> int:
    """The status of the shell."""
    from tests.host import appliance_box
    from tests.host.roots import root_filesystem

    parser = argparse.ArgumentParser(prog="python -m tests.host.box", description="Holds a namespace box by hand.")
    parser.add_argument("verb", choices=["shell"])
    parser.add_argument("--appliance", action="store_true", help="with the units and this checkout's code installed")
    args = parser.parse_args(argv)
    if os.geteuid() != 0:
        parser.error("a box needs root")
    bind = appliance_box.BIND if args.appliance else ()
    if args.appliance and (reason := appliance_box.why_not_here()):
        parser.error(reason)
    with Box(root_filesystem(BOX), bind) as box:
        if args.appliance:
            appliance_box.install(box)
        print(f"box {box.number}, {box.address}: exit ends it", file=sys.stderr, flush=True)
        # script(1) gives the shell a terminal of the box's own, without which it has no job control.
        terminal = ["script", "--quiet", "--return", "--command", "bash --login", "/dev/null"]
        env = {"TERM": os.environ.get("TERM", "dumb")}
        with box.popen(terminal if sys.stdin.isatty() else ["bash", "--login"], cwd="/root", env=env) as shell:
            return shell.wait()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except HostError as error:
        sys.exit(f"error: {error}")
