"""What the service asks of the probes of the GPUs themselves (NVML, the kernel's log), and the case without any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from appliance.launcher.loop import Loop
from healthcheck.resetter import Nvml
from healthcheck.types import Check, Signal, Status
from healthcheck.verification import Found

Reread = Callable[[int | None], None]
"""Gets the recovery action (NVML field 230), None where it is not known, after the signals of that reading went in."""


class Probes(Protocol):
    @property
    def kind(self) -> str:
        """ "on", "off", "scripted"."""

    @property
    def gate(self) -> Nvml | None:
        """What has to be closed for a reset."""

    def start(self, ready: Callable[[], None]) -> None:
        """`ready`: once, after the first round or after giving it up for now."""

    def look(self) -> None:
        """Begins a round; one that is under way goes on."""

    def reread(self, uuid: str, done: Reread) -> None:
        """Reads this GPU anew. `done` is called once, in a bounded time."""

    def levels(self, uuid: str) -> list[Signal]:
        """What the last reading says of this GPU as it is now (not what changed since the one before)."""

    def verdict(self, uuid: str, since: float) -> Found:
        """Whether there is a reading from `since` (UTC seconds) on: a GPU that was not read is verified by nothing."""

    def checks(self, uuid: str) -> list[Check]: ...

    def host_checks(self) -> list[Check]: ...

    def fields(self, uuid: str) -> dict[str, Any]:
        """Of the last reading, for metrics."""

    def probed_at(self, uuid: str) -> float | None:
        """UTC seconds of the last reading."""

    def bound(self, slots: dict[str, int]) -> None:
        """The GPUs that are ours: UUID -> slot."""

    def inject(self, uuid: str, key: str) -> bool:
        """Tests: from now on the GPU has this fault. False: nobody here plays one."""

    def close(self) -> None: ...


class NoProbes:
    """Backend cpu: there is no NVML, and nothing that it could say."""

    kind = "off"
    gate: Nvml | None = None

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def start(self, ready: Callable[[], None]) -> None:
        self._loop.later(0, ready)

    def look(self) -> None:
        pass

    def reread(self, uuid: str, done: Reread) -> None:
        self._loop.later(0, lambda: done(None))

    def levels(self, uuid: str) -> list[Signal]:
        return []

    def verdict(self, uuid: str, since: float) -> Found:
        return Found(True, "")

    def checks(self, uuid: str) -> list[Check]:
        return [Check("NVML", Status.OK, "not applicable: gpus.backend is cpu")]

    def host_checks(self) -> list[Check]:
        return []

    def fields(self, uuid: str) -> dict[str, Any]:
        return {}

    def probed_at(self, uuid: str) -> float | None:
        return None

    def bound(self, slots: dict[str, int]) -> None:
        pass

    def inject(self, uuid: str, key: str) -> bool:
        return False

    def close(self) -> None:
        pass
