"""`python -P -m healthcheck`: the watchdog (unit appliance-watchdog.service).

Exit status: 0 ended as asked, 1 failed, 2 usage, 4 refused (policy, configuration, ledger: a restart does not help), 5
another watchdog runs.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import os
import pwd
import signal
import sys
from functools import partial
from pathlib import Path

from appliance.arguments import seconds
from appliance.hostconfig import HostConfig, HostConfigError, load_config
from appliance.launcher.control_server import ControlServer
from appliance.launcher.loop import Loop
from appliance.launcher.state import say
from appliance.log import ApplianceError, BusyError, ExitCode, report_error
from appliance.notify import Notifier
from appliance.paths import Paths
from appliance.statefile import StateError
from healthcheck import requests
from healthcheck.http_server import HttpServer
from healthcheck.keeper import Keeper
from healthcheck.policy import load_policy
from healthcheck.policy_review import warnings
from healthcheck.probes import NoProbes, Probes
from healthcheck.service import Schedule, Service


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m healthcheck", description="Watch the GPUs of this host.")
    parser.add_argument("--user", default="appliance", help="who, besides root, may ask for the state (%(default)s)")
    often = parser.add_argument_group("instead of the policy's [limits]")
    often.add_argument("--interval", type=seconds(0.2, 3600), help="s between probes")
    often.add_argument("--heartbeat", type=seconds(0.1, 3600), help="s between two questions to an engine")
    often.add_argument("--golden-interval", type=seconds(1, 86400), help="s between two comparisons of golden answers")
    tests = parser.add_argument_group("tests only")
    tests.add_argument("--test", action="store_true", help="faults may be injected")
    tests.add_argument("--scripted-nvml", type=Path, metavar="FILE", help="a file tells what NVML says; implies --test")
    tests.add_argument("--kmsg", type=Path, default=Path("/dev/kmsg"), help="the kernel's log (%(default)s)")
    return parser.parse_args(argv)


def lock(paths: Paths) -> int:
    """Held as long as this process lives. BusyError: another watchdog runs."""
    fd = os.open(paths.run / "watchdog.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BusyError("another watchdog runs", hint="systemctl status appliance-watchdog") from None
    return fd


def find_user(name: str) -> tuple[int, int]:
    """(uid, gid)."""
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise HostConfigError(f"there is no user {name}", hint="systemd-sysusers makes it") from None
    return entry.pw_uid, entry.pw_gid


def make_probes(config: HostConfig, args: argparse.Namespace, service: Service) -> Probes:
    """Backend cpu has no NVML and no GPU in the kernel's log, unless a script plays them."""
    if config.gpus.backend == "cpu" and args.scripted_nvml is None:
        return NoProbes(service.loop)
    from healthcheck.gpu_probes import GpuProbes

    return GpuProbes(
        service.loop, service.limits, service.paths.watchdog_memory, service.signal, service.changed,
        service.counters, script=args.scripted_nvml, kmsg=args.kmsg,
    )  # fmt: skip


def run(paths: Paths, args: argparse.Namespace) -> int:
    lock(paths)
    config, policy = load_config(paths.config), load_policy(paths.healthcheck_config)
    for warning in warnings(policy, load_policy()):
        say(f"<4>{paths.healthcheck_config}: {warning}")
    (uid, group), loop = find_user(args.user), Loop()
    schedule = Schedule(args.interval, args.heartbeat, args.golden_interval)
    service = Service(
        paths, loop, policy, Keeper(paths.gpus), Notifier(), partial(make_probes, config, args),
        backend=config.gpus.backend, schedule=schedule, stall_timeout=config.engine.stall_timeout,
        test=args.test or args.scripted_nvml is not None,
    )  # fmt: skip
    control = ControlServer(
        loop, paths.watchdog_control, lambda request, client: requests.handle(service, request, client),
        admins=frozenset({0, os.geteuid()}), public_uid=uid, group=group,
    )  # fmt: skip
    routes = {"/state": service.publisher.state_route, "/metrics": service.publisher.metrics_route}
    http = HttpServer(loop, paths.watchdog_socket, routes, group=group)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.on_signal(number, service.terminate)
    service.start()
    gc.collect()
    gc.freeze()
    try:
        loop.run()
    finally:
        control.close()
        http.close()
        service.close()
    return 0


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        return run(Paths.default(), args)
    except StateError as error:  # the ledger: nothing that a restart mends
        report_error(error.message, hint=error.hint)
        return int(ExitCode.REFUSED)
    except ApplianceError as error:
        report_error(error.message, hint=error.hint)
        return int(error.exit_code)


if __name__ == "__main__":
    sys.exit(main())
