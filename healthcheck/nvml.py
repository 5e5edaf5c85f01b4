"""The watchdog's side of NVML: what is read of all GPUs, and what becomes of one that hangs.

NvmlProbe.read -> nvml_reader.py:Reader -> on_reading for each GPU -> on_round.
A GPU that hangs is named (the child says what it calls next) and is read by a child of its own from then on
(`Suspect`), so that the others are read as before: tried again at the next probe, at once where something asks for it,
and back among the others after GOOD_READINGS. Only hangs in a row make the tries rarer, and never rarer than every
MAX_SIT_OUT + 1 probes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from appliance.launcher.loop import Loop, Timer
from healthcheck.nvml_protocol import Begin, Done, Event, Gpu
from healthcheck.nvml_reader import _RESTART_SECONDS, MAX_UNKILLABLE, Behind, Reader, Round
from healthcheck.types import GpuReading

__all__ = ["MAX_UNKILLABLE", "Hang", "NvmlProbe", "Round", "Suspect", "child_command"]

EVENT_SECONDS = 1.0  # between two readings that events bring about
GOOD_READINGS = 3  # in a row, until a GPU that hung is read together with the others again
PATIENCE = 3  # hangs in a row without any back-off: as many as [limits] probe_misses has by default
MAX_SIT_OUT = 3  # probes that are left out between two tries at most


def child_command(script: str | None = None) -> list[str]:
    """argv of the child; with `script` of the one that stands in for NVML."""
    module = "healthcheck.nvml_child" if script is None else "healthcheck.scripted_nvml"
    return [sys.executable, "-P", "-m", module, *([] if script is None else [script])]


@dataclass(frozen=True, slots=True)
class Hang:
    """A call that did not return within the deadline."""

    uuid: str | None  # None: no GPU in particular (nvmlInit, the enumeration)
    stage: str  # "nvml", "index N", "events", a UUID; "request": it did not even begin
    seconds: float
    in_row: int  # of this GPU (or of none in particular), without a reading in between


class NvmlProbe(Reader):
    """Reads all GPUs but suspects, which have a child of their own each."""

    def __init__(
        self, loop: Loop, command: Sequence[str], deadline: float, on_reading: Callable[[GpuReading], None],
        on_event: Callable[[Event], None], on_hang: Callable[[Hang], None], *,
        on_round: Callable[[Round], None] = lambda _: None, known: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """`deadline`: seconds for one step, that is one GPU. A call that waits for a dead GSP returns after 45 s, and a
        GPU full of corrected errors has been seen to take as long: 60 is a good one. `known`: PCI -> UUID of the GPUs
        of this host, as the driver's /proc shows them; what NVML says is added."""
        super().__init__(loop, command, deadline, Behind())
        self._on_reading, self._on_event, self._on_hang, self._on_round = on_reading, on_event, on_hang, on_round
        self.readings: dict[str, GpuReading] = {}
        self.known = dict(known or {})
        self.hangs = 0  # since the start
        self.suspects: dict[str, Suspect] = {}
        self._read_at: dict[str, float] = {}  # loop time
        self._nameless = 0  # hangs in a row of no GPU in particular
        self._event_read: Timer | None = None
        self._event_read_at = -EVENT_SECONDS

    @property
    def unkillable(self) -> int:
        """Children that hang in the driver now."""
        return self.behind.total()

    def age(self, uuid: str) -> float | None:
        """Seconds since this GPU was last read; None: never."""
        at = self._read_at.get(uuid)
        return None if at is None else self._loop.time() - at

    def read(self, *, patient: bool = False) -> bool:
        """Reads all GPUs as soon as that is possible. False: not now (closed, or stuck). `patient`: just another probe,
        where a GPU that hangs again and again may be left out."""
        if not self._closed:
            for suspect in list(self.suspects.values()):
                suspect.turn(patient=patient)
        return self.ask()

    def _request(self) -> tuple[dict[str, str], list[str]]:
        return self.known, list(self.suspects)

    # -- what the children say
    def _event(self, event: Event) -> None:
        self.event(event)

    def event(self, event: Event) -> None:
        """Of any child. Read at once, but no more often than EVENT_SECONDS: the levels say what an event means."""
        if self._event_read is None:
            wait = max(0.0, self._event_read_at + EVENT_SECONDS - self._loop.time())
            self._event_read = self._loop.later(wait, self._event_reading)
        self._on_event(event)

    def _event_reading(self) -> None:
        self._event_read, self._event_read_at = None, self._loop.time()
        self.read()

    def _gpu(self, gpu: Gpu) -> None:
        if gpu.uuid not in self.suspects:
            self.keep(gpu)

    def keep(self, gpu: Gpu) -> None:
        """A reading, by any child."""
        reading = GpuReading(gpu.uuid, gpu.at, dict(gpu.fields), dict(gpu.unknown), gpu.error)
        self.readings[gpu.uuid] = reading
        self._read_at[gpu.uuid] = self._loop.time()
        pci = gpu.fields.get("pci")
        if isinstance(pci, str) and gpu.error != "not_found":
            self.known[pci] = gpu.uuid
        self._on_reading(reading)

    def _round(self, ok: bool, error: str | None, detail: str, done: Done | None) -> None:
        seen, skipped = tuple(self._seen), tuple(self.suspects)
        if done is None:
            return self._on_round(Round(ok, error, detail, None, seen, skipped))
        self._nameless = 0
        self._on_round(Round(ok, error, detail, done.driver, seen, skipped, done.unread, done.deaf))

    # -- what goes wrong
    def _hung(self, begun: Begin) -> None:
        if begun.uuid is None:
            self._nameless += 1
            self._wait_for_restart(self._restarts.next())
            self.tell(Hang(None, begun.stage, self._deadline, self._nameless))
        else:
            self._wait_for_restart(_RESTART_SECONDS[0])  # the others
            suspect = self.suspects.setdefault(begun.uuid, Suspect(self, begun.uuid))
            suspect.count(begun.stage)

    def tell(self, hang: Hang) -> None:
        """By any child."""
        self.hangs += 1
        self._on_hang(hang)

    # -- for a reset
    def close(self, done: Callable[[], None]) -> None:
        """All children: Reader.close."""
        left = 1 + len(self.suspects)

        def one() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                done()

        suspects, self.suspects = list(self.suspects.values()), {}
        super().close(one)
        for suspect in suspects:
            suspect.close(one)

    def open(self) -> None:
        """Reads again, all GPUs: after a reset what hung before may not."""
        self._closed = False
        self._restarts.count = 0
        self.read()


class Suspect(Reader):
    """A GPU that hung, read by a child of its own."""

    def __init__(self, owner: NvmlProbe, uuid: str) -> None:
        super().__init__(owner._loop, owner._command, owner._deadline, owner.behind)
        self._owner, self._uuid = owner, uuid
        self.in_row = 0  # hangs
        self._good = 0  # readings in a row
        self._sit_out = 0  # probes that are still to be left out

    def turn(self, *, patient: bool) -> None:
        """Tries again, unless it hangs so often that this probe is left out. One whose child could not be killed hangs
        as long as that is there: nothing is learnt from a second one."""
        if patient and self._sit_out > 0:
            self._sit_out -= 1
        elif self.behind[self._uuid] > 0:
            if patient:
                self.count(f"{self._uuid}: its child cannot be killed")
        else:
            self.ask()

    def count(self, stage: str) -> None:
        """One more hang."""
        self.in_row += 1
        self._good = 0
        self._sit_out = min(max(0, self.in_row - PATIENCE + 1), MAX_SIT_OUT)
        self._owner.tell(Hang(self._uuid, stage, self._deadline, self.in_row))

    def _request(self) -> tuple[dict[str, str], list[str]]:
        known = self._owner.known
        return known, sorted({*known.values(), *self._owner.readings} - {self._uuid})

    def _gpu(self, gpu: Gpu) -> None:
        if gpu.uuid == self._uuid:
            self.in_row = self._sit_out = 0
            self._good += 1
            self._owner.keep(gpu)

    def _event(self, event: Event) -> None:
        self._owner.event(event)

    def _hung(self, begun: Begin) -> None:
        self._wanted = False
        self.count(begun.stage)

    def _round(self, ok: bool, error: str | None, detail: str, done: Done | None) -> None:
        """Back to the others; at once where NVML does not list it any more: who is missing is judged there."""
        reading = self._owner.readings.get(self._uuid)
        gone = bool(self._seen) and reading is not None and reading.error == "not_found"
        if (self._good >= GOOD_READINGS or gone) and self._owner.suspects.get(self._uuid) is self:
            del self._owner.suspects[self._uuid]
            self.close(lambda: None)
