"""What the commands share: who asks, the document of the run, waiting for its end."""

from __future__ import annotations

import getpass
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from appliance.log import ApplianceError, ExitCode
from appliance.paths import Paths
from canary.client import Client, NoController
from canary.run import ENDED, Run, to_state
from canary.store import Store

Document = dict[str, Any]
POLL_SECONDS = 0.5
_EXIT = {"settled": ExitCode.DONE, "failed": ExitCode.FAILED, "aborted": ExitCode.FAILED}


class NoRun(ApplianceError):
    """There was no run yet."""


class Interrupted(ApplianceError):
    """Ctrl-C while a command waited: the waiting ends, the run does not."""

    exit_code = 128 + signal.SIGINT  # type: ignore[assignment]  # as a shell says it

    def __init__(self, run: str) -> None:
        hint = f"`canary status {run} --wait` waits for it; `canary rollback {run}` ends it"
        super().__init__(f"interrupted: run {run} goes on", hint=hint)


def whoami() -> str:
    """For the audit: who typed it, also behind sudo."""
    try:
        user = os.environ.get("SUDO_USER") or getpass.getuser()
    except (KeyError, OSError):
        user = f"uid {os.getuid()}"
    return user[:64] if user.isprintable() and user else f"uid {os.getuid()}"


def ask(paths: Paths, op: str, *, timeout: float = 60.0, **args: Any) -> Document:
    """The controller's reply. NoController, ControllerError."""
    return Client(paths).call(op, timeout=timeout, by=whoami(), **{k: v for k, v in args.items() if v is not None})


def read_document(paths: Paths, run: str | None = None) -> Document:
    """What the controller says, or, where it is down or `run` is an earlier one, what is on disk. NoRun, Damaged."""
    try:
        document = Client(paths).call("status", timeout=5.0)
    except NoController as error:
        document = offline(Store(paths).load()) | {"controller_error": error.message}
    if run is not None and (document["run"] or {}).get("id") != run:
        skipped: list[str] = []
        found = next((one for one in Store(paths).history(skipped) if one.id == run), None)
        if found is None:
            name = str(paths.canary_runs / f"{run}.json")
            why = next((line for line in skipped if line.startswith(name)), None)
            raise NoRun(why or f"there is no run {run}", hint="`canary list`; `canary events` has what happened")
        document |= {"run": to_state(found), "live": {}}
    if document["run"] is None:
        text, hint = Store(paths).no_run()
        raise NoRun(text, hint=hint)
    return document


def offline(run: Run | None) -> Document:
    """As the controller's answer to "status", from what is on disk."""
    return {
        "ok": True, "schema": 1, "controller": False, "run": to_state(run) if run else None,
        "boot": time.clock_gettime(time.CLOCK_BOOTTIME), "live": {},
    }  # fmt: skip


def wait_over(
    paths: Paths, run: str, timeout: float, seen: Callable[[Document], None] = lambda _: None
) -> tuple[Document, ExitCode]:
    """Until the run `run` (that one, not a newer) is over, or waits for a person: (document, exit code). A controller
    that is down meanwhile is waited for."""
    try:
        return _wait_over(paths, run, time.monotonic() + timeout, seen)
    except KeyboardInterrupt:
        raise Interrupted(run) from None


def _wait_over(paths: Paths, run: str, deadline: float, seen: Callable[[Document], None]) -> tuple[Document, ExitCode]:
    while True:
        document = read_document(paths, run)
        seen(document)
        found = document["run"]
        if found["phase"] in ENDED:
            return document, _EXIT[found["phase"]]
        if found["held"] or found["paused"] or time.monotonic() >= deadline:
            return document, ExitCode.INCONCLUSIVE
        time.sleep(min(POLL_SECONDS, max(0.0, deadline - time.monotonic())))
