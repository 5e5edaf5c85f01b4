"""From the launcher to the engine: `python -P -m appliance.launcher.trampoline ORDER` (JSON, launcher/spawn.py).

A fresh process without threads. It waits on the socket `fd` until the launcher has put it into its scope and checked
that; so no engine code ever runs outside. Then it gives up what it has as root, looks at itself, and becomes `argv`. If
anything is not as it should be it says so through `fd` and ends with status 126; `fd` closing without a word means that
the engine runs.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from pathlib import Path

GO = b"go\n"
REFUSED = 126
_FILES = 65536  # open ones; one for each connection
# linux/prctl.h
_PR_CAPBSET_READ, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 23, 24, 38, 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION_3 = 0x20080522  # linux/capability.h


class Refusal(Exception):
    """The engine must not run like this."""


def set_limits() -> None:
    """Hard limits are the unit's to raise (LimitNOFILE=, LimitMEMLOCK=; `appliance doctor` looks); here the soft ones
    are raised to them, and core files, which would hold prompts, are off."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))


def drop_privileges(uid: int, gid: int) -> None:
    """Everything at once and for good: groups, capabilities (bounding set too), ids; setuid programs gain nothing."""
    libc = ctypes.CDLL(None, use_errno=True)
    _prctl(libc, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    capability = 0
    while libc.prctl(_PR_CAPBSET_READ, capability, 0, 0, 0) >= 0:
        _prctl(libc, _PR_CAPBSET_DROP, capability)
        capability += 1
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)  # from 0 to another uid: permitted and effective set become empty
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    if libc.capset(header, (ctypes.c_uint32 * 6)()) != 0:  # the inheritable set too
        raise Refusal(f"capset: {os.strerror(ctypes.get_errno())}")
    _prctl(libc, _PR_SET_NO_NEW_PRIVS, 1)


def _prctl(libc: ctypes.CDLL, option: int, value: int) -> None:
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise Refusal(f"prctl({option}, {value}): {os.strerror(ctypes.get_errno())}")


def check_self(uid: int, gid: int, status: Path = Path("/proc/self/status")) -> None:
    """The kernel's word for it (proc(5)): ids, groups, capability sets, no_new_privs."""
    fields = {}
    for line in status.read_text().splitlines():
        name, _, value = line.partition(":")
        fields[name] = value.split()
    expected = {"Uid": [str(uid)] * 4, "Gid": [str(gid)] * 4, "Groups": [], "NoNewPrivs": ["1"]}
    expected |= {name: ["0" * 16] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")}
    wrong = [
        f"{name} {' '.join(fields.get(name, []))}" for name, value in expected.items() if fields.get(name) != value
    ]
    if wrong:
        raise Refusal(f"privileges were not dropped: {', '.join(wrong)}")


def check_denied(nodes: list[str]) -> None:
    """The nodes of other GPUs cannot be opened. The filter says no before any driver is asked, so this is harmless,
    and a node without a driver behind it (ENXIO) was let through."""
    for node in nodes:
        try:
            os.close(os.open(node, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
        except (PermissionError, FileNotFoundError):
            continue
        except OSError as error:
            raise Refusal(f"the device policy lets {node} through ({error.strerror})") from None
        raise Refusal(f"the device policy lets {node} through")


def main(argv: list[str]) -> int:
    order = json.loads(argv[0])
    fd: int = order["fd"]
    os.set_inheritable(fd, False)
    if os.read(fd, len(GO)) != GO:
        return REFUSED  # the launcher is gone or has changed its mind
    try:
        set_limits()
        drop_privileges(order["uid"], order["gid"])
        check_self(order["uid"], order["gid"])
        check_denied(order["denied"])
        os.umask(0o077)
        for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):  # those that Python itself sets
            signal.signal(number, signal.SIG_DFL)
        os.chdir("/")
        os.execve(order["argv"][0], order["argv"], order["env"])
    except (Refusal, OSError) as error:
        os.write(fd, str(error).encode()[:1000])
    return REFUSED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
