"""The controller as a process: `python -P -m canary` (appliance-canary.service), or inside `canary rollback` where no
controller runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from appliance.launcher.control_server import ControlServer
from appliance.launcher.loop import Loop
from appliance.notify import Notifier
from appliance.paths import Paths
from canary.commands import Commands
from canary.controller import Controller, Times
from canary.placement import Placement
from canary.run import Run
from canary.seams import Parts
from canary.store import AbortWish, Store

Make = Callable[[Paths], Parts]


def serve(paths: Paths, make: Make, times: Times | None = None) -> int:
    """Until SIGTERM. BusyError if there is one already."""
    store, notifier, loop = Store(paths), Notifier(), Loop()
    with store.controlling():
        controller = Controller(store, Placement(paths), make(paths), loop, times, notifier)
        commands = Commands(controller)
        # The socket opens first: whoever finds it asks a controller that holds the lock.
        admins = frozenset({0, os.geteuid()})
        server = ControlServer(
            loop, paths.canary_control, commands.handle, admins=admins, public_uid=-1, group=os.getegid()
        )

        def say_status() -> None:
            notifier.send(STATUS=status_line(controller.run))

        controller.on_change = say_status
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.on_signal(number, loop.stop)
        loop.on_signal(signal.SIGHUP, controller.poke)
        try:
            controller.start()
            notifier.send(READY=1, STATUS=status_line(controller.run))
            loop.run()
        finally:
            notifier.send(STOPPING=1)
            server.close()
            controller.close()
            commands.close()
    return 0


def status_line(run: Run | None) -> str:
    if run is None:
        return "no run yet"
    where = f"{run.phase} {run.target:g} %" if run.phase == "step" else str(run.phase)
    return f"run {run.id} of {run.release}: {where}" + (f" ({run.reason})" if run.reason else "")


def roll_back_here(
    paths: Paths, make: Make, seconds: float, times: Times | None = None, wish: AbortWish | None = None
) -> Controller:
    """The controller is down: does its work in this process, until the run is over, cannot be saved, or `seconds` have
    passed. `wish` counts also where it is not on disk. BusyError if a controller holds the lock after all."""
    store, loop, parts = Store(paths), Loop(), make(paths)
    with store.controlling():
        controller = Controller(store, Placement(paths), parts, loop, times)
        try:
            controller.start(wish)
            loop.run(until=lambda: controller.observer is None or controller.unsaved is not None, timeout=seconds)
            return controller
        finally:
            controller.close()
