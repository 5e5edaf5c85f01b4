"""Controllers as processes of their own, which can be told to kill themselves at their n-th effect on the host.

An effect is everything that outlives the process: a state file, an event, a slot pointer, the rule, a word to a
launcher, a marker. The process dies (SIGKILL, by itself, so at that very place) before effect n or right after it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from appliance import leases, rollout
from appliance.fleet import Fleet
from appliance.paths import Paths
from canary import machine, placement, reverting, service, store
from canary.client import Client, NoController
from canary.netfilter.apply import Netfilter
from canary.seams import Parts
from tests.canary.stand_ins import FAST, FileRules, make_parts

LIMIT_SECONDS = 60.0


class Effects:
    def __init__(self, trace: Path | None, kill_at: int | None, after: bool) -> None:
        self._trace = trace.open("a") if trace else None
        self._kill_at, self._after, self.count = kill_at, after, 0

    def wrap(self, name: str, do: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if name == "launcher" and args[2] == "status":
                return do(*args, **kwargs)
            self.count += 1
            number = self.count
            if self._trace is not None:
                print(number, name, *(str(arg)[:60] for arg in args[1:3]), file=self._trace, flush=True)
            if number == self._kill_at and not self._after:
                os.kill(os.getpid(), signal.SIGKILL)
            value = do(*args, **kwargs)
            if number == self._kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return value

        return wrapped

    def install(self) -> None:
        """In a process that does nothing else."""
        for module, name in (
            (store, "write_state"), (store, "append_event"), (store, "remove_state"), (placement, "set_slot"),
            (reverting, "set_slot"),
            (rollout, "set_slot"), (rollout, "append_event"), (leases, "write_state"),
        ):  # fmt: skip
            setattr(module, name, self.wrap(name, getattr(module, name)))
        FileRules.set_weight = self.wrap("set_weight", FileRules.set_weight)  # type: ignore[method-assign]
        Netfilter.set_weight = self.wrap("set_weight", Netfilter.set_weight)  # type: ignore[method-assign]
        Netfilter.repair = self.wrap("repair", Netfilter.repair)  # type: ignore[method-assign]
        Fleet.call = self.wrap("launcher", Fleet.call)  # type: ignore[method-assign]


class ControllerProcess:
    """`with ControllerProcess(paths, kill_at=7) as controller`: serves until it dies or the context ends."""

    def __init__(
        self,
        paths: Paths,
        *,
        kill_at: int | None = None,
        after: bool = False,
        trace: Path | None = None,
        parts: Callable[[Paths], Parts] = make_parts,
    ) -> None:
        self.paths = paths
        log = paths.run / "controller.log"
        self.pid = os.fork()
        if self.pid == 0:
            code = 99
            try:
                fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(fd, 1)
                os.dup2(fd, 2)
                machine.RETRY_SECONDS = 0.05
                Effects(trace, kill_at, after).install()
                code = service.serve(paths, parts, FAST)
            except BaseException as error:
                print(f"controller ended: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            finally:
                os._exit(code)
        self.status: int | None = None

    def __enter__(self) -> ControllerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.alive():
            os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def alive(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is None

    def wait(self) -> int:
        while self.alive():
            time.sleep(0.002)
        assert self.status is not None
        return self.status

    def call(self, op: str, **args: Any) -> dict[str, Any]:
        """Once it listens. NoController when it has died."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while True:
            try:
                return Client(self.paths).call(op, **args)
            except NoController:
                if not self.alive() or time.monotonic() > deadline:
                    raise
                time.sleep(0.005)

    def run_to_end(self) -> dict[str, Any] | None:
        """The state file's run once it is over and cleaned up; None if the process died first."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while self.alive():
            run = store.Store(self.paths).load()
            if run is not None and run.over and (self.paths.canary_runs / f"{run.id}.json").exists():
                wishes = (self.paths.canary_abort, self.paths.canary_abort_volatile)
                if not any(path.exists() for path in wishes):  # they are cleared after it was archived
                    return store.to_state(run)
            assert time.monotonic() < deadline, f"still {run and run.job_key}: {run and run.problem}"
            time.sleep(0.005)
        return None
