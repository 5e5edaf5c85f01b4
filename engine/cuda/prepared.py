"""Launches of a step, prepared once and kept: packing the arguments of 290 launches takes longer than a decode step.

What depends on the number of token rows, of decode rows and of prefill tiles is kept apart, so that a step is put
together from three lists; the least recently used sizes go.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, TypeVar

from engine.cuda.step_trace import (
    LAYER_OPS,
    TRACE_EMBED,
    TRACE_PREPARE,
    trace_layer,
    trace_length,
    trace_tail,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from engine.cuda.program import Program
    from engine.cuda.step_device import StepDevice
    from kernels.launch import Launch

T = TypeVar("T")

MAX_KEPT = 48
"""Sizes of each kind."""


class PreparedLaunches:
    """Of one program on one device. What is returned goes to StepDevice.run or capture."""

    def __init__(self, device: StepDevice, program: Program) -> None:
        self._device, self._program = device, program
        self._num_layers = program.model.num_layers
        self._untimed = trace_length(self._num_layers) - 1
        self._tail = trace_tail(self._num_layers)
        self._rows: OrderedDict[int, list[list[Any]]] = OrderedDict()
        self._decodes: OrderedDict[int, list[Any]] = OrderedDict()
        self._tiles: OrderedDict[int, list[Any]] = OrderedDict()

    def untimed(self, launches: Iterable[Launch]) -> list[Any]:
        """Launches that are not part of the profile of a step."""
        return [self._device.prepare(launch, self._untimed) for launch in launches]

    def first(self, num_rows: int, decode_rows: int, num_logits_rows: int) -> list[Any]:
        """step_prepare."""
        launch = self._program.prepare(num_rows, decode_rows, max(num_logits_rows, 1))
        return [self._device.prepare(launch, TRACE_PREPARE)]

    def body(self, num_rows: int, decode_rows: int, num_tiles: int) -> list[Any]:
        """embed and all layers."""
        of_rows = _kept(self._rows, num_rows, self._of_rows)
        decodes = _kept(self._decodes, decode_rows, self._of_decodes) if decode_rows else ()
        tiles = _kept(self._tiles, num_tiles, self._of_tiles) if num_tiles else ()
        body = list(of_rows[0])
        for layer in range(self._num_layers):
            body += of_rows[1 + 2 * layer]
            if decodes:
                body.append(decodes[layer])
            if tiles:
                body.append(tiles[layer])
            body += of_rows[2 + 2 * layer]
        return body

    def head(self, count: int, *, greedy_only: bool) -> list[Any]:
        """Logits and tokens of the first `count` logits rows."""
        launches = [*self._program.head(count), *self._program.sample(count, greedy_only=greedy_only)]
        return [self._device.prepare(launch, self._tail + i) for i, launch in enumerate(launches)]

    def decode_step(self, bucket: int, *, greedy_only: bool) -> list[Any]:
        """Everything of a decode-only step of `bucket` rows, padding included."""
        first = self.first(bucket, bucket, bucket)
        return [*first, *self.body(bucket, bucket, 0), *self.head(bucket, greedy_only=greedy_only)]

    def _of_rows(self, num_rows: int) -> list[list[Any]]:
        """[embed], then for each layer what comes before attention and what comes after."""
        prepare, program = self._device.prepare, self._program
        parts = [[prepare(program.embed(num_rows), TRACE_EMBED)]]
        after = LAYER_OPS.index("o")
        for layer in range(self._num_layers):
            at = trace_layer(layer)
            parts.append([prepare(one, at + i) for i, one in enumerate(program.before_attention(layer, num_rows))])
            at += after
            parts.append([prepare(one, at + i) for i, one in enumerate(program.after_attention(layer, num_rows))])
        return parts

    def _of_decodes(self, decode_rows: int) -> list[Any]:
        at = LAYER_OPS.index("attention")
        return [
            self._device.prepare(self._program.decode_attention(layer, decode_rows), trace_layer(layer) + at)
            for layer in range(self._num_layers)
        ]

    def _of_tiles(self, num_tiles: int) -> list[Any]:
        at = LAYER_OPS.index("prefill")
        return [
            self._device.prepare(self._program.prefill_attention(layer, num_tiles), trace_layer(layer) + at)
            for layer in range(self._num_layers)
        ]


def _kept(cache: OrderedDict[int, T], key: int, make: Callable[[int], T]) -> T:
    found = cache.get(key)
    if found is None:
        found = cache[key] = make(key)
        if len(cache) > MAX_KEPT:
            cache.popitem(last=False)
    cache.move_to_end(key)
    return found
