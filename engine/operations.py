"""What operators ask of a running engine (Control messages): golden, checksum, flip, drop_prefix_cache. Long answers
are jobs, a piece between two steps (jobs.py)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from engine.errors import AdmissionError
from engine.faults import flip
from engine.jobs import Jobs
from engine.log import log_event
from engine.messages import ControlReply, FlipArgs, GoldenArgs, NoArgs

if TYPE_CHECKING:
    from engine.backend import Backend
    from engine.kv_cache import KVCache
    from engine.probe import Probe

log = logging.getLogger("appliance.engine")

T = TypeVar("T")


class Operations:
    """One engine's; true while a job waits for its next piece."""

    def __init__(
        self,
        backend: Backend,
        kv_cache: KVCache,
        probe: Probe,
        check_prompt: Callable[[list[int], int], None],
        *,
        allow_fault_injection: bool,
    ) -> None:
        """check_prompt(prompt_ids, max_tokens): AdmissionError for what the engine cannot run."""
        self._backend, self._kv_cache, self._probe = backend, kv_cache, probe
        self._check_prompt, self._allow_fault_injection = check_prompt, allow_fault_injection
        self._jobs = Jobs()

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def start(self, control_id: int, op: str, args: dict[str, Any]) -> list[ControlReply]:
        """The answer, or none yet: long ones come out of `advance`. Wrong arguments are refused."""
        try:
            match op:
                case "golden":
                    prompt_ids = _arguments(op, args, GoldenArgs).prompt_ids
                    self._check_prompt(prompt_ids, 1)
                    self._jobs.start(control_id, self._probe.golden(prompt_ids))
                    return []
                case "checksum":
                    _arguments(op, args, NoArgs)
                    self._jobs.start(control_id, self._backend.checksum())
                    return []
                case "flip":
                    return [ControlReply(control_id=control_id, ok=True, result=self._flip(op, args))]
                case "drop_prefix_cache":
                    _arguments(op, args, NoArgs)
                    pages = self._kv_cache.drop_prefix_cache()
                    return [ControlReply(control_id=control_id, ok=True, result={"pages": pages})]
            raise AdmissionError(f"unknown control operation {op!r}")
        except AdmissionError as error:
            return [ControlReply(control_id=control_id, ok=False, error=error.message, refused=True)]

    def _flip(self, op: str, args: dict[str, Any]) -> dict[str, Any]:
        if not self._allow_fault_injection:
            raise AdmissionError("fault injection is off; start the engine with --allow-fault-injection, for a test")
        result = flip(self._backend, _arguments(op, args, FlipArgs))
        log_event(log, logging.WARNING, "fault_injected", "one bit of the weights was turned over on request", **result)
        return result

    def advance(self) -> list[ControlReply]:
        """One piece of the oldest job; the answer, if that was the last one."""
        return self._jobs.advance()

    def cancel(self, control_id: int) -> None:
        self._jobs.cancel(control_id)

    def close(self) -> None:
        self._jobs.close()


def _arguments(op: str, args: dict[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(args, kind)
    except msgspec.ValidationError as error:
        raise AdmissionError(f"arguments of {op}: {error}") from error
