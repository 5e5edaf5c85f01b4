"""`python -P -m appliance.launcher --gpu N`: the launcher of a GPU slot; `--cleanup` stops what one left behind.

Exit status: 0 ended as asked, 1 failed, 2 usage, 4 refused (configuration, slot, user: a restart does not help), 5
another launcher has this slot.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import os
import pwd
import sys

from appliance.config_check import check_backend
from appliance.gpus import GpuError, read_slots
from appliance.hostconfig import HostConfig, HostConfigError, load_config
from appliance.launcher.launcher import Launcher, User
from appliance.launcher.loop import Loop
from appliance.launcher.scopes import SystemdScopes
from appliance.launcher.state import StateFile
from appliance.log import ApplianceError, BusyError, ExitCode, report_error
from appliance.notify import Notifier
from appliance.paths import Paths
from appliance.statefile import StateError

_CLEANUP_SECONDS = 60.0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m appliance.launcher", description="Run one GPU slot's engines.")
    parser.add_argument("--gpu", type=int, required=True, help="number of the slot, see `appliance gpus`")
    parser.add_argument("--user", default="appliance", help="whom engines run as")
    parser.add_argument("--cleanup", action="store_true", help="stop what a launcher left behind, and end")
    return parser.parse_args(argv)


def slot_uuid(paths: Paths, config: HostConfig, gpu: int) -> str:
    """The UUID bound to slot `gpu`; refused if it is bound to none or not ours to use."""
    entry = read_slots(paths.gpus).get(gpu)
    if entry is None:
        raise HostConfigError(f"GPU slot {gpu} is bound to no GPU", hint="`appliance gpus bind`")
    uuid = str(entry["uuid"])
    check_backend(config, gpu, uuid, paths.config)
    if not config.gpus.includes(uuid):
        raise HostConfigError(f"{uuid} of slot {gpu} is not in gpus.devices", hint=f"see {paths.config}")
    return uuid


def find_user(name: str) -> User:
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise HostConfigError(f"there is no user {name}", hint="systemd-sysusers makes it") from None
    if entry.pw_uid == 0:
        raise HostConfigError("engines do not run as root", hint="--user NAME")
    return User(entry.pw_uid, entry.pw_gid)


def lock_slot(paths: Paths, gpu: int) -> int:
    """Held as long as this process lives. BusyError: another launcher has it."""
    paths.gpu_run(gpu).mkdir(mode=0o755, parents=True, exist_ok=True)
    fd = os.open(paths.gpu_run(gpu) / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BusyError(f"another launcher has GPU slot {gpu}", hint=f"systemctl status appliance-gpu@{gpu}") from None
    return fd


def run(paths: Paths, args: argparse.Namespace) -> int:
    lock_slot(paths, args.gpu)
    config = load_config(paths.config)
    loop = Loop()
    launcher = Launcher(
        paths, args.gpu, slot_uuid(paths, config, args.gpu), config, find_user(args.user), loop, SystemdScopes(loop),
        Notifier(),
    )  # fmt: skip
    launcher.handle_signals()
    launcher.start()
    gc.collect()
    gc.freeze()
    try:
        loop.run()
    finally:
        launcher.close()
    return 0


def cleanup(paths: Paths, gpu: int) -> int:
    """ExecStopPost: whatever way the launcher ended, no scope of its slot stays and its state file is gone."""
    lock_slot(paths, gpu)
    StateFile(paths.launcher_state(gpu)).remove()
    loop = Loop()
    answers: list[dict[str, object]] = []
    SystemdScopes(loop).clean(gpu, kill=False, seconds=_CLEANUP_SECONDS, done=answers.append)
    loop.run(until=lambda: bool(answers))
    if not answers[0]["ok"]:
        raise ApplianceError(f"scopes of GPU slot {gpu} were not stopped: {answers[0]['error']}")
    return 0


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    paths = Paths.default()
    try:
        return cleanup(paths, args.gpu) if args.cleanup else run(paths, args)
    except (GpuError, StateError) as error:  # nothing that a restart mends
        report_error(error.message, hint=error.hint)
        return int(ExitCode.REFUSED)
    except ApplianceError as error:
        report_error(error.message, hint=error.hint)
        return int(error.exit_code)


if __name__ == "__main__":
    sys.exit(main())
