"""The launchers of this host as one: who is there, what they run, and waiting until they run something else.

Only launchers start and stop engines; this asks them over their control sockets (appliance/control.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

from appliance.control import ControlClient
from appliance.gpus import read_slots
from appliance.hostconfig import HostConfig
from appliance.launcher.lifecycle import NO_SCOPE, State
from appliance.log import ApplianceError, ExitCode, Progress
from appliance.paths import Paths

POLL_SECONDS = 0.1
_PATIENCE = 30.0  # beyond start_timeout, which the launcher keeps itself
_LATE_SCOPES = 5  # so often systemd may be late with a scope before a release is not put into service
_UNSEEN_SECONDS = 15.0  # a launcher that was asked for an engine lists it at once


class FleetError(ApplianceError):
    """A launcher or an engine did not do what was asked."""


class FleetTimeout(FleetError):
    exit_code = ExitCode.INCONCLUSIVE


class Control(Protocol):
    """appliance.control.ControlClient, as far as it is used here."""

    def call(self, op: str, **args: Any) -> dict[str, Any]: ...


Connect = Callable[[Paths, int], Control]


@dataclass(slots=True)
class Fleet:
    """`states` keys and all `gpu` arguments are slot numbers."""

    paths: Paths
    config: HostConfig
    progress: Progress = field(default_factory=lambda: Progress(quiet=True))
    connect: Connect = ControlClient
    _stage_bytes: int = field(default=0, init=False)

    def gpus(self) -> dict[int, str]:
        """GPU slots this host may use -> UUID."""
        bound = {number: str(entry.get("uuid")) for number, entry in read_slots(self.paths.gpus).items()}
        return {number: uuid for number, uuid in sorted(bound.items()) if self.config.gpus.includes(uuid)}

    def call(self, gpu: int, op: str, **args: Any) -> dict[str, Any]:
        return self.connect(self.paths, gpu).call(op, **args)

    def state(self, gpu: int) -> dict[str, Any]:
        """STATE of that launcher, now."""
        state: dict[str, Any] = self.call(gpu, "status", timeout=10.0)["state"]
        return state

    def survey(self) -> tuple[dict[int, dict[str, Any]], dict[int, str]]:
        """(STATE of the launchers that take engines now, GPU -> why not)."""
        states, away = {}, {}
        for gpu in self.gpus():
            try:
                state = self.state(gpu)
            except ApplianceError as error:
                away[gpu] = f"its launcher does not answer: {error.message}"
                continue
            stopped = {owner: hold for owner, hold in state.get("holds", {}).items() if hold.get("level") == "stop"}
            if stopped:
                owner, hold = next(iter(stopped.items()))
                away[gpu] = f"held by {owner}: {hold.get('reason')}"
            else:
                states[gpu] = state
        return states, away

    def wait_ready(self, gpus: Collection[int], release: str, seen: Callable[[int], None] = lambda _: None) -> None:
        """Until `release` is ready on all `gpus`; `seen(gpu)` as each becomes so. FleetError as soon as one of them
        ends or gives up: a release that does not start at the first try is not put into service. (Where systemd was
        late with the scope it is not the release's fault; the launcher tries again, and that is waited for a few
        times.) FleetTimeout without progress for as long as the launcher itself would wait, and a little more."""
        patience = self.config.engine.start_timeout + _PATIENCE
        restarts = {gpu: self._engine(gpu, release).get("restarts") or 0 for gpu in gpus}
        waiting, changed = sorted(gpus), time.monotonic()
        last: list[tuple[Any, ...]] | None = None
        while waiting:
            now: list[tuple[Any, ...]] = []
            for gpu in list(waiting):
                engine = self._engine(gpu, release)
                now.append((gpu, engine.get("state"), engine.get("progress")))
                if engine.get("state") == "ready":
                    waiting.remove(gpu)
                    seen(gpu)
                elif _does_not_start(engine, restarts[gpu]):
                    raise FleetError(
                        f"{release} does not start on GPU {gpu}: {engine.get('last_exit') or engine.get('state')}",
                        hint="see `appliance logs`",
                    )
            if now != last:
                last, changed = now, time.monotonic()
                self._show(now)
            elif time.monotonic() - changed > (patience if all(state for _, state, _ in now) else _UNSEEN_SECONDS):
                raise FleetTimeout(
                    f"{release} is not ready on GPU {', '.join(map(str, waiting))}: no progress for "
                    f"{time.monotonic() - changed:.0f} s",
                    hint="see `appliance status` and `appliance logs`",
                )
            if waiting:
                time.sleep(POLL_SECONDS)

    def _engine(self, gpu: int, release: str) -> dict[str, Any]:
        return engine_of(self.state(gpu), release)

    def wait_gone(self, gpus: Collection[int], release: str, seconds: float) -> None:
        """Until no launcher of `gpus` has an engine of `release`."""
        deadline = time.monotonic() + seconds
        while left := [gpu for gpu in gpus if engine_of(self.state(gpu), release)]:
            if time.monotonic() > deadline:
                raise FleetTimeout(
                    f"{release} still runs on GPU {', '.join(map(str, left))} after {seconds:g} s",
                    hint="its last requests may still be running; see `appliance status`",
                )
            time.sleep(POLL_SECONDS)

    def stage(self, text: str, size_bytes: int = 0) -> None:
        """Starts a stage of the progress; `size_bytes`: what each load of this stage reads."""
        self._stage_bytes = size_bytes
        self.progress.stage(text)

    def _show(self, engines: list[tuple[Any, ...]]) -> None:
        done = [1.0 if state == "ready" else float(progress or 0) for _, state, progress in engines]
        total = self._stage_bytes * len(done)
        if total:
            self.progress.update(int(sum(done) * self._stage_bytes), total)


def _does_not_start(engine: dict[str, Any], restarts: int) -> bool:
    """`restarts`: how many there had been before."""
    late = str(engine.get("last_exit") or "").startswith(NO_SCOPE)  # the launcher tries that without end
    allowed = _LATE_SCOPES if late else 0
    given_up = (State.FAILED,) if late else (State.BACKOFF, State.FAILED)
    return engine.get("state") in given_up or (engine.get("restarts") or 0) > restarts + allowed


def engine_of(state: dict[str, Any], release: str) -> dict[str, Any]:
    """The entry of `release` in a launcher's STATE; empty if it has none."""
    return next((engine for engine in state.get("engines", []) if engine.get("release") == release), {})


def releases_of(state: dict[str, Any]) -> list[str]:
    """Releases that the launcher has engines of, in any state."""
    return [str(engine["release"]) for engine in state.get("engines", [])]
