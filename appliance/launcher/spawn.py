"""The child that becomes the engine, still waiting (launcher/trampoline.py)."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

from appliance.launcher.spec import EngineSpec
from engine.spawn import python_env

_CHANNEL_FD = 3


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
