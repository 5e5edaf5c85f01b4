"""Fault injection, for tests and drills only: one bit of the weights turned over where they lie, in host or device
memory, as a memory fault that no ECC caught would do it. `--allow-fault-injection` turns it on; without it, refused.

What must find it afterwards: the weight checksum every time, the golden answer where the bit matters to its prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.errors import AdmissionError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.backend import Backend
    from engine.messages import FlipArgs


def flip(backend: Backend, args: FlipArgs) -> dict[str, Any]:
    """Turns the bit over; doing it again puts it back. {"tensor", "offset" in the arena,
    "bit", "before" and "after" of that byte}. AdmissionError for a place that is not in the weights."""
    starts = backend.tensor_offsets()
    place = locate(args, starts, backend.weights_bytes)
    before, after = backend.flip_bit(place, args.bit)
    name = tensor_at(place, starts)
    return {"tensor": name, "offset": place, "bit": args.bit, "before": before, "after": after}


def locate(args: FlipArgs, starts: Mapping[str, int], arena_bytes: int) -> int:
    """Byte of the arena. `starts`: where each tensor begins in it; the padding after a tensor counts as its own."""
    first, end = 0, arena_bytes
    if args.tensor is not None:
        if args.tensor not in starts:
            known = ", ".join(list(starts)[:4])
            raise AdmissionError(f"there is no tensor {args.tensor!r}; some that are there: {known}")
        first = starts[args.tensor]
        end = min((start for start in starts.values() if start > first), default=arena_bytes)
    if not first + args.offset < end:
        what = "the weights" if args.tensor is None else args.tensor
        raise AdmissionError(f"offset {args.offset} is beyond {what}, which have {end - first} bytes")
    return first + args.offset


def tensor_at(place: int, starts: Mapping[str, int]) -> str | None:
    """The tensor that begins at or last before that byte; of two names for one, the first."""
    found, found_start = None, -1
    for name, start in starts.items():
        if found_start < start <= place:
            found, found_start = name, start
    return found
