"""Device times of steps and, in the profiling variant, of their kernels: from events and stamps into the step ring."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from engine.cuda.step_ring import GAP_UNKNOWN, Kind, now_ns
from kernels.launch import Op

if TYPE_CHECKING:
    import numpy.typing as npt

    from engine.cuda.step_device import StepEvent
    from engine.cuda.step_ring import StepRingWriter
    from engine.plan import StepPlan

# Places in Common.trace: fixed for each op, whether a step has it or not. The last place is for untimed launches.
LAYER_OPS = ("norm", "qkv", "rope", "attention", "prefill", "o", "mlp_norm", "gate_up", "down")
TRACE_PREPARE, TRACE_EMBED = 0, 1
_TRACE_LAYERS = 2
_OP_OF_LAYER = (Op.RMSNORM, Op.QKV, Op.ROPE, Op.ATTENTION, Op.ATTENTION, Op.O, Op.RMSNORM, Op.GATE_UP, Op.DOWN)
_OP_OF_TAIL = (Op.RMSNORM, Op.LM_HEAD, Op.SAMPLER, Op.SAMPLER, Op.SAMPLER)


def trace_layer(layer: int) -> int:
    """Place of a layer's first op."""
    return _TRACE_LAYERS + layer * len(LAYER_OPS)


def trace_tail(num_layers: int) -> int:
    """Place of what comes after the layers: final norm, lm_head, the sampler's kernels."""
    return trace_layer(num_layers)


def trace_length(num_layers: int) -> int:
    return trace_tail(num_layers) + len(_OP_OF_TAIL) + 1


def op_of_trace(place: int, num_layers: int) -> tuple[Op, int]:
    """(op, layer or -1) of a place."""
    if place < trace_layer(0):
        return (Op.PREPARE, -1) if place == TRACE_PREPARE else (Op.EMBED, -1)
    if place >= trace_tail(num_layers):
        return _OP_OF_TAIL[place - trace_tail(num_layers)], -1
    layer, op = divmod(place - trace_layer(0), len(LAYER_OPS))
    return _OP_OF_LAYER[op], layer


class StepTimes:
    """Writes what steps took, in the order in which they ran."""

    def __init__(self, ring: StepRingWriter, num_layers: int) -> None:
        self._ring, self._num_layers = ring, num_layers
        self._last_end: StepEvent | None = None
        self._clock_ns = 0  # sum of everything so far: a float32 of milliseconds would not hold days

    def write(
        self, kind: Kind, plan: StepPlan, begin: StepEvent, end: StepEvent, *, num_rows: int, queued_behind: bool
    ) -> None:
        """`queued_behind`: launched while the step before was in flight, so a gap between them is the host's."""
        gap = 0 if self._last_end is None else max(0, self._last_end.nanoseconds_until(begin))
        begin_ns = self._clock_ns + gap
        self._clock_ns = begin_ns + begin.nanoseconds_until(end)
        self._last_end = end
        self._ring.write(
            kind, rows=num_rows, step=plan.step, begin_ns=begin_ns, end_ns=self._clock_ns,
            gap_ns=gap if queued_behind else GAP_UNKNOWN, tokens=plan.num_tokens, decodes=plan.num_decodes,
            host_ns=now_ns(),
        )  # fmt: skip

    def write_kernels(self, plan: StepPlan, trace: npt.NDArray[Any]) -> None:
        """`trace` (trace_length,) uint64: %globaltimer at the start of each kernel. An entry ends where the next kernel
        began. Stamps that earlier steps left are older than this step's first."""
        first = int(trace[TRACE_PREPARE])
        places = [int(place) for place in np.argsort(trace[:-1], kind="stable") if int(trace[place]) >= first]
        for place, after in zip(places, [*places[1:], places[-1]]):
            op, layer = op_of_trace(place, self._num_layers)
            self._ring.write(
                Kind.KERNEL, rows=layer, step=plan.step, begin_ns=int(trace[place]), end_ns=int(trace[after]),
                gap_ns=0, tokens=op, decodes=place, host_ns=now_ns(),
            )  # fmt: skip
