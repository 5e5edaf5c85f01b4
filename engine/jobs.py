"""Operators' questions that take long (golden, checksum): answered a piece at a time between steps, so that no stream
waits for them and the engine never looks dead because it was asked whether it is well."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from engine.errors import AdmissionError, DeviceLost, EngineError
from engine.messages import ControlReply

Job = Generator[None, None, dict[str, Any]]
"""Yields after each piece (about as long as a step); returns the result; closing it gives back what it holds."""


class Jobs:
    """The running jobs, oldest first; one piece of the oldest at a time."""

    def __init__(self) -> None:
        self._running: dict[int, Job] = {}

    def __bool__(self) -> bool:
        return bool(self._running)

    def start(self, control_id: int, job: Job) -> None:
        self._running[control_id] = job

    def cancel(self, control_id: int) -> None:
        """Nobody waits for the answer any more. Unknown ids are fine: it may just have ended."""
        if (job := self._running.pop(control_id, None)) is not None:
            job.close()

    def advance(self) -> list[ControlReply]:
        """Do one piece; the answer, if that was the last one."""
        if not self._running:
            return []
        control_id, job = next(iter(self._running.items()))
        try:
            next(job)
            return []
        except StopIteration as end:
            reply = ControlReply(control_id=control_id, ok=True, result=end.value)
        except DeviceLost:  # not the job's failure: nothing works any more
            raise
        except (EngineError, ValueError, IndexError) as error:
            refused = isinstance(error, AdmissionError)
            reply = ControlReply(control_id=control_id, ok=False, error=str(error), refused=refused)
        del self._running[control_id]
        return [reply]

    def close(self) -> None:
        for control_id in list(self._running):
            self.cancel(control_id)
