"""The real launcher of one GPU slot, systemd replaced by FakeScopes: `python launcher_process.py ROOT GPU`.

What appliance.launcher does as root under systemd, without both; engines are the real ones.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from appliance.gpus import read_slots
from appliance.hostconfig import load_config
from appliance.launcher.launcher import Launcher, User
from appliance.launcher.loop import Loop
from appliance.notify import Notifier
from appliance.paths import Paths
from tests.appliance.launcher.world import FakeScopes, _spawn


def main(root: Path, gpu: int) -> None:
    paths, loop = Paths.under(root), Loop()
    paths.engine_socket(gpu, "x").parent.mkdir(parents=True, exist_ok=True)
    user = User(os.getuid(), os.getgid(), frozenset({os.getuid()}))
    scopes = FakeScopes(loop)
    uuid = read_slots(paths.gpus)[gpu]["uuid"]
    launcher = Launcher(paths, gpu, uuid, load_config(paths.config), user, loop, scopes, Notifier({}))
    launcher.around.spawn = _spawn
    launcher.around.compare_scope = lambda *_: scopes.findings
    signal.signal(signal.SIGTERM, lambda *_: loop.later(0, launcher.terminate))
    launcher.start()
    loop.run(timeout=600)
    launcher.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
