"""The pinned host memory and the events that one step in flight needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.cuda.program import UPDATE_WORDS, Program, result_bytes
from engine.cuda.step_trace import trace_length

if TYPE_CHECKING:
    from engine.cuda.step_device import StepDevice, StepEvent
    from engine.types import Int32Array


@dataclass(slots=True)
class Transfer:
    """Of one step; there are more of them than steps in flight."""

    upload: Int32Array
    updates: Int32Array
    results: Any  # uint8: slot_errors, then ROW_RESULT of every logits row
    scores: Any  # uint8
    trace: Any  # uint64
    begin: StepEvent
    end: StepEvent


def make_transfer(device: StepDevice, program: Program, num_layers: int) -> Transfer:
    results, scores = result_bytes(program.sampler, program.limits)
    return Transfer(
        upload=device.pinned(4 * program.limits.upload_words()).view(np.int32),
        updates=device.pinned(4 * UPDATE_WORDS).view(np.int32),
        results=device.pinned(results),
        scores=device.pinned(scores),
        trace=device.pinned(8 * trace_length(num_layers)).view(np.uint64),
        begin=device.event(),
        end=device.event(),
    )
