"""System calls that Python 3.11 has no name for: prctl(2), mount(2), umount2(2), pivot_root(2), unshare(2), setns(2).

Each raises OSError with the call's name and arguments in it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC = 1, 2, 4, 8, 32, 4096, 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2
CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS = 0x00020000, 0x02000000, 0x04000000
CLONE_NEWIPC, CLONE_NEWPID, CLONE_NEWNET = 0x08000000, 0x20000000, 0x40000000

_PR_SET_PDEATHSIG = 1
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    converted = [os.fsencode(value) if isinstance(value, (str, os.PathLike)) else value for value in arguments]
    if getattr(_libc, name)(*converted) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{arguments}: {os.strerror(number)}")


def mount(source: str, target: os.PathLike[str] | str, kind: str | None = None, flags: int = 0, data: str = "") -> None:
    _call("mount", source, target, kind, ctypes.c_ulong(flags), data or None)


def unmount(target: os.PathLike[str] | str, flags: int = 0) -> None:
    _call("umount2", target, flags)


def bind(source: os.PathLike[str] | str, target: os.PathLike[str] | str, *, writable: bool) -> None:
    """`source` at `target`, without the mounts below it: a recursive bind would leave those writable."""
    mount(os.fspath(source), target, None, MS_BIND)
    if not writable:
        mount("none", target, None, MS_BIND | MS_REMOUNT | MS_RDONLY)


def pivot_root(new: str, old: str) -> None:
    _call("syscall", ctypes.c_long(_SYS_PIVOT_ROOT[platform.machine()]), new, old)


def unshare(flags: int) -> None:
    _call("unshare", flags)


def setns(fd: int, flags: int) -> None:
    _call("setns", fd, flags)


def die_with_parent() -> None:
    """SIGKILL for this process when the thread that forked it ends, however that ends. Kept over execve."""
    _call("prctl", _PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
