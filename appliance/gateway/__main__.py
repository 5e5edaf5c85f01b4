"""`python -m appliance.gateway --slot stable|canary`: the endpoint of a slot, until SIGTERM.

Phases in call order: options -> configuration and credentials -> bind -> serve (one process, or with gateway.workers
> 1 this one watches over as many, see workers.py) -> drain -> exit status: 0 stopped as asked, 1 failed, 2 usage,
4 refused (configuration, no keys; a restart does not help), 5 the port is taken.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import resource
import sys
from pathlib import Path

import uvloop

from appliance.gateway.server import Worker, admin_listeners, public_socket, report, shown
from appliance.gateway.settings import Settings, make_settings
from appliance.gateway.workers import run_supervisor, run_worker, watch
from appliance.hostconfig import load_config
from appliance.log import ApplianceError
from appliance.notify import Notifier
from appliance.paths import SLOT_NAMES, Paths
from engine.errors import EngineError
from engine.log import log_event, setup_logging

logger = logging.getLogger(__name__)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m appliance.gateway", description="The LLM endpoint of one slot.")
    parser.add_argument("--slot", required=True, choices=SLOT_NAMES)
    parser.add_argument("--config", type=Path, help="default /etc/appliance/appliance.toml")
    parser.add_argument("--keys", type=Path, help="file of API keys (default: the credential api-keys)")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # set by our own supervisor
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    setup_logging(args.log_level, identifier=f"appliance-gateway-{args.slot}")
    try:
        paths = Paths.default()
        config = load_config(args.config or paths.config)
        settings = make_settings(config, args.slot, paths, keys=args.keys)
        raise_file_limit(settings)
        gc.collect()
        gc.freeze()  # what start-up made lives for ever: no collection has to look at it again
        if args.worker is not None:
            return uvloop.run(run_worker(settings, args.worker))
        if settings.gateway.workers > 1:
            return uvloop.run(run_supervisor(settings, sys.argv[1:] if argv is None else argv))
        return uvloop.run(serve(settings))
    except (ApplianceError, EngineError) as error:
        return report(error)


def raise_file_limit(settings: Settings) -> None:
    """A request in work has two sockets, and an idle connection one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * settings.api.limits.max_connections + 256
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard < 0 else min(wanted, hard), hard))
    except (OSError, ValueError) as error:
        log_event(logger, logging.WARNING, "file_limit", f"RLIMIT_NOFILE stays at {soft}, {wanted} are wanted: {error}")


async def serve(settings: Settings) -> int:
    """All in this process."""
    notifier = Notifier()
    worker = Worker(settings)
    with public_socket(settings) as listener:
        async with admin_listeners(worker):
            watching: list[asyncio.Task[None]] = []

            def ready() -> None:
                log_event(logger, logging.INFO, "listening", f"listening on {shown(listener)}", slot=settings.slot)
                notifier.send(READY=1, STATUS=f"serving {settings.host}:{settings.port}")
                watching.append(asyncio.create_task(watch(notifier)))

            def draining() -> None:
                micros = int((settings.gateway.drain_timeout + 10) * 1e6)
                notifier.send(STOPPING=1, STATUS="draining", EXTEND_TIMEOUT_USEC=micros)

            try:
                return await worker.run(listener, ready=ready, draining=draining)
            finally:
                for task in watching:
                    task.cancel()


if __name__ == "__main__":
    sys.exit(main())
