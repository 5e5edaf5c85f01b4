"""The child that becomes the engine, still waiting (launcher/trampoline.py), and the place of its socket."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import sys
import time
from pathlib import Path

from appliance.launcher.spec import EngineSpec
from engine.spawn import python_env

_CHANNEL_FD = 3
_MODE = 0o750  # of the directory of the sockets


def spawn_trampoline(spec: EngineSpec, uid: int, gid: int) -> tuple[int, socket.socket]:
    """(pid, our end of its channel, non-blocking). Standard output and error are ours (the journal). OSError where no
    process can be made."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    order = {
        "fd": _CHANNEL_FD, "uid": uid, "gid": gid, "denied": spec.denied, "argv": spec.argv, "env": spec.env,
    }  # fmt: skip
    argv = [sys.executable, "-P", "-m", "appliance.launcher.trampoline", json.dumps(order)]
    with theirs:
        try:
            pid = os.posix_spawn(
                argv[0],
                argv,
                python_env(),
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, theirs.fileno(), _CHANNEL_FD),
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                ],
                setsigmask=[],
                setsigdef=[signal.SIGPIPE],
            )
        except OSError:
            ours.close()
            raise
    return pid, ours


def prepare_socket(path: Path, uid: int, gid: int) -> None:
    """Nothing is at `path`, and the engine (`uid`) can make its socket there. OSError.

    The directory is the engines' own, and they may have put anything there. Where unlink is not enough the directory is
    taken from them meanwhile (without CAP_FOWNER root can neither unlink in a sticky directory of others nor change its
    mode); a directory at `path` is moved aside, not walked through."""
    directory = path.parent
    directory.mkdir(mode=_MODE, exist_ok=True)
    if stat.S_IMODE(directory.stat().st_mode) == _MODE and not _is_directory(path):
        path.unlink(missing_ok=True)
    else:
        os.chown(directory, os.geteuid(), -1)
        directory.chmod(_MODE)
        if _is_directory(path):
            path.rename(directory / f".{path.name}.{time.monotonic_ns()}")
        path.unlink(missing_ok=True)
    os.chown(directory, uid, gid)


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
