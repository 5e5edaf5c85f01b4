"""The box's parent: makes the namespaces, starts systemd in them as pid 1, and cleans up whatever happens.

`python -m tests.host.box_init SPEC` (JSON, see box.py:Box). It lives until its stdin closes, the test process dies or
systemd ends. Then it kills pid 1, by which the kernel kills everything in the box, frees its mounts and its network,
and removes the cgroup and the mount point. Should it be killed itself, pid 1 dies with it (PR_SET_PDEATHSIG), and the
next box removes what is left (box.py:remove_abandoned).
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tests.host import linux

_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_NODES = ("null", "zero", "full", "random", "urandom", "tty")
_NVIDIA = ("nvidia[0-9]*", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
_ENVIRONMENT = {
    "container": "box",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
}


def main() -> int:
    spec: dict[str, Any] = json.loads(sys.argv[1])
    os.set_inheritable(spec["number_fd"], False)  # the number is ours as long as this process lives
    parent = os.pidfd_open(spec["parent"])
    if os.getppid() != spec["parent"]:
        return 1  # it died before the line above: the number means somebody else
    cgroup, scratch = Path(spec["cgroup"]), Path(spec["scratch"])
    scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
    pid = 0
    try:
        cgroup.mkdir()
        pid = _start(spec)
        print(json.dumps({"pid": pid}), flush=True)
        _wait(parent, os.pidfd_open(pid))
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)  # a child not waited for: the number cannot be anyone else's
            os.waitpid(pid, 0)
        remove_cgroup(cgroup)
        scratch.rmdir()
    return 0


def _wait(*pidfds: int) -> None:
    """Until a process ends or the test process closes our stdin."""
    poll = select.poll()
    for fd in (*pidfds, 0):
        poll.register(fd, select.POLLIN | select.POLLHUP)
    poll.poll()


def _start(spec: dict[str, Any]) -> int:
    """Pid of the box's pid 1, after execve of systemd; OSError or RuntimeError with the reason."""
    ours = os.open("/proc/self/ns/pid", os.O_RDONLY)
    told_read, told = os.pipe()
    go, go_write = os.pipe()
    linux.unshare(linux.CLONE_NEWPID)
    pid = os.fork()
    if pid == 0:
        os.close(told_read)
        os.close(go_write)
        _be_init(spec, told, go)  # does not return
    linux.setns(ours, linux.CLONE_NEWPID)  # children from here on are this machine's again
    os.close(told)
    os.close(go)
    try:
        if os.read(told_read, 1) == b"n":
            if spec["net"]:
                _connect(spec["net"], pid)
            os.write(go_write, b"g")
        problem = b""
        while part := os.read(told_read, 65536):  # ends with execve: the pipe is close-on-exec
            problem += part
        if problem:
            raise RuntimeError(problem.decode())
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    os.close(go_write)
    return pid


def _connect(net: dict[str, str], pid: int) -> None:
    """A veth pair: `eth0` in the box, net["name"] here. It goes when the box's network namespace goes."""
    outside = [
        f"link add {net['name']} type veth peer name eth0 netns {pid}",
        f"address add {net['outside4']}/30 dev {net['name']}",
        f"link set {net['name']} up",
    ]
    inside = [f"address add {net['inside4']}/30 dev eth0", "link set eth0 up"]
    if net["inside6"]:
        outside.append(f"address add {net['outside6']}/126 dev {net['name']} nodad")
        inside.append(f"address add {net['inside6']}/126 dev eth0 nodad")
    for prefix, lines in (([], outside), (["nsenter", "-t", str(pid), "-n", "--"], inside)):
        done = subprocess.run(
            [*prefix, "ip", "-batch", "-"], input="\n".join(lines), capture_output=True, text=True, timeout=30
        )
        if done.returncode:
            raise RuntimeError(f"ip could not make the box's network: {done.stderr}")


def _be_init(spec: dict[str, Any], told: int, go: int) -> None:
    try:
        linux.die_with_parent()
        # The cgroup first: the namespace's root is the cgroup one is in. The parent stays outside: a process of its
        # own in the root would keep systemd from enabling controllers, and MemoryMax= would be without effect.
        Path(spec["cgroup"], "cgroup.procs").write_text("0")
        linux.unshare(
            linux.CLONE_NEWNS | linux.CLONE_NEWUTS | linux.CLONE_NEWIPC | linux.CLONE_NEWNET | linux.CLONE_NEWCGROUP
        )
        linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
        os.write(told, b"n")
        if os.read(go, 1) != b"g":
            os._exit(1)  # the parent is gone
        _set_loopback_up()
        socket.sethostname(spec["hostname"])
        root = _make_root(Path(spec["root"]), Path(spec["scratch"]), spec["size"])
        _make_mounts(root)
        _make_devices(root / "dev")
        for source, target, writable in spec["bind"]:
            _bind(Path(source), root / target.lstrip("/"), writable)
        os.chdir(root)
        linux.pivot_root(".", ".")  # the old root is now stacked on top of the new one
        linux.unmount(".", linux.MNT_DETACH)
        os.chdir("/")
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1):
            os.dup2(null, fd)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        command = ["/lib/systemd/systemd", "--system", "--log-target=journal", "--show-status=0"]
        os.execve(command[0], command, _ENVIRONMENT)
    except BaseException:
        os.write(told, traceback.format_exc().encode())
        os._exit(1)


def _set_loopback_up() -> None:
    """As `ip link set lo up`: netdevice(7)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack_from("H", fcntl.ioctl(control, _SIOCGIFFLAGS, request), 16)[0]
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


def _make_root(lower: Path, scratch: Path, size: str) -> Path:
    """What is written goes to a tmpfs of this mount namespace, so it is gone with the box. Where the kernel has no
    overlayfs, or refuses this lower directory, the root is copied there."""
    linux.mount("box", scratch, "tmpfs", 0, f"mode=0755,size={size}")
    root, upper, work = scratch / "root", scratch / "upper", scratch / "work"
    for directory in (root, upper, work):
        directory.mkdir(mode=0o755)
    try:
        linux.mount("box", root, "overlay", 0, f"lowerdir={lower},upperdir={upper},workdir={work}")
    except OSError as error:
        print(f"box: no overlay of {lower} ({error}); copying it", file=sys.stderr, flush=True)
        subprocess.run(["cp", "-a", f"{lower}/.", str(root)], check=True)
        linux.bind(root, root, writable=True)  # pivot_root wants a mount point
    (root / "etc/machine-id").write_text("")  # systemd makes a new one
    return root


def _make_mounts(root: Path) -> None:
    linux.mount("proc", root / "proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    # Sysctls belong to the whole machine, except those of the network namespace.
    for name in ("sys", "sysrq-trigger"):
        if (root / "proc" / name).exists():  # not every kernel has sysrq
            linux.bind(root / "proc" / name, root / "proc" / name, writable=False)
    linux.bind(root / "proc/sys/net", root / "proc/sys/net", writable=True)
    linux.mount("none", root / "proc/sys/net", None, linux.MS_BIND | linux.MS_REMOUNT)  # else read-only as its source
    linux.mount("sysfs", root / "sys", "sysfs", linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    linux.mount("cgroup2", root / "sys/fs/cgroup", "cgroup2", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    linux.mount("tmpfs", root / "run", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=0755")
    linux.mount("tmpfs", root / "tmp", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=1777")


def _make_devices(dev: Path) -> None:
    """Nodes of its own, never bind mounts: a getty in the box would chown the /dev/null of this machine."""
    linux.mount("tmpfs", dev, "tmpfs", linux.MS_NOSUID, "mode=0755")
    (dev / "pts").mkdir()
    (dev / "shm").mkdir()
    linux.mount(
        "devpts", dev / "pts", "devpts", linux.MS_NOSUID | linux.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620,gid=5"
    )
    linux.mount("tmpfs", dev / "shm", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=1777")
    nodes = [Path("/dev", name) for name in _NODES]
    nodes += [node for pattern in _NVIDIA for node in sorted(Path("/dev").glob(pattern))]
    os.umask(0)
    for node in nodes:
        os.mknod(dev / node.name, stat.S_IFCHR | 0o666, node.stat().st_rdev)
    os.mknod(dev / "console", stat.S_IFCHR | 0o600, Path("/dev/null").stat().st_rdev)
    os.umask(0o022)
    for name, target in (("ptmx", "pts/ptmx"), ("fd", "/proc/self/fd"), ("stdin", "/proc/self/fd/0"),
                         ("stdout", "/proc/self/fd/1"), ("stderr", "/proc/self/fd/2")):  # fmt: skip
        (dev / name).symlink_to(target)


def _bind(source: Path, target: Path, writable: bool) -> None:
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    linux.bind(source, target, writable=writable)


def remove_cgroup(cgroup: Path) -> None:
    """With everything in it. Its processes are dead or get killed; the kernel may need a moment to see that."""
    if not cgroup.is_dir():
        return
    kill = cgroup / "cgroup.kill"  # since Linux 5.14
    if kill.exists():
        kill.write_text("1")
    deadline = time.monotonic() + 10
    while True:
        try:
            for directory, _, _ in os.walk(cgroup, topdown=False):
                os.rmdir(directory)
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
