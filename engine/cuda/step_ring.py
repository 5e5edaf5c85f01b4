"""Times of the last million steps in shared memory: written by engine-core, read by anybody, without a lock.

The file is a header of 4096 bytes, then 2^20 entries of 64 bytes (64 MiB, taken at the start). Entry i is number `i`
modulo 2^20; its `number` field is i + 1 and is written last, 0 while the others change, so a reader that sees the
same right number before and after it copied an entry has a whole one. One writer. The order of its stores is that of
the program on x86; elsewhere a reader could in theory see a torn entry.

Times come from CUDA events outside the graph (resolution about half a microsecond). They are sums of differences, so
`begin_ns` 0 is the first step, not a wall clock; `host_ns` is CLOCK_MONOTONIC when the host took the step's results.

    python -m engine.cuda.step_ring /dev/shm/appliance-steps          p50 and p99, of every step in the ring
    python -m engine.cuda.step_ring /proc/PID/fd/N --last 1000 --json
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import stat
import struct
import sys
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import ConfigError, EngineError

MAGIC = b"APPLSTEP"
SCHEMA = 1
NUM_ENTRIES = 1 << 20
HEADER_BYTES = 4096
_HEADER = struct.Struct("<8sIIQQ")  # magic, schema, entry bytes, entries, how many were written so far
_WRITTEN_AT = 24
_FIELDS = struct.Struct("<IiQQQQIIQ")  # an entry without its number
_NUMBER = struct.Struct("<Q")

ENTRY = np.dtype(
    [
        ("number", "<u8"),  # i + 1 for the i-th entry ever written; 0 = being written
        ("kind", "<u4"),
        ("rows", "<i4"),  # token rows launched, padding included; KERNEL: the layer, -1 = none
        ("step", "<u8"),
        ("begin_ns", "<u8"),
        ("end_ns", "<u8"),
        ("gap_ns", "<u8"),  # the device was idle for so long before the step (GAP_UNKNOWN: no step was queued behind)
        ("tokens", "<u4"),  # computed, padding not counted; KERNEL: its op (kernels/launch.py:Op)
        ("decodes", "<u4"),  # decode rows among them; KERNEL: its place in the step
        ("host_ns", "<u8"),
    ]
)
GAP_UNKNOWN = (1 << 64) - 1


class Kind(IntEnum):
    DECODE_GRAPH = 1
    EAGER = 2  # a step with prefill, or without graphs
    KERNEL = 3  # one kernel of a profiled step; times by %globaltimer, on the device's own clock


def _temporary(path: str) -> str:
    return f"{path}.{os.getpid()}.tmp"


def _new_file(path: str, size: int) -> tuple[int, mmap.mmap]:
    """A file of its own beside `path`, renamed over it when its header is written: another engine or a reader that has
    the old one mapped keeps that one. Its memory is taken now: a tmpfs that is full later would be a SIGBUS."""
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise OSError(f"{path} is no regular file")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(_temporary(path), flags, 0o640)
    try:
        os.posix_fallocate(fd, 0, size)
        return fd, mmap.mmap(fd, size)
    except OSError:
        os.close(fd)
        os.unlink(_temporary(path))
        raise


class StepRingWriter:
    """`path` None: an anonymous file (memfd), to be read through /proc/PID/fd/N. ConfigError if it cannot be made."""

    def __init__(self, path: str | None = None, num_entries: int = NUM_ENTRIES) -> None:
        self.path = path
        self._num_entries = num_entries
        size = HEADER_BYTES + num_entries * ENTRY.itemsize
        try:
            if path is None:
                self._fd = os.memfd_create("appliance-steps", os.MFD_CLOEXEC)
                os.ftruncate(self._fd, size)
                self._map = mmap.mmap(self._fd, size)
            else:
                self._fd, self._map = _new_file(path, size)
        except OSError as error:
            raise ConfigError(f"cannot make the step ring: {error}", hint="choose another --step-ring") from error
        self._written = 0
        _HEADER.pack_into(self._map, 0, MAGIC, SCHEMA, ENTRY.itemsize, num_entries, 0)
        if path is not None:
            os.rename(_temporary(path), path)

    @property
    def readable_as(self) -> str:
        """What to give to a reader."""
        return self.path or f"/proc/{os.getpid()}/fd/{self._fd}"

    def write(
        self,
        kind: Kind,
        *,
        rows: int,
        step: int,
        begin_ns: int,
        end_ns: int,
        gap_ns: int,
        tokens: int,
        decodes: int,
        host_ns: int,
    ) -> None:
        at = HEADER_BYTES + self._written % self._num_entries * ENTRY.itemsize
        _NUMBER.pack_into(self._map, at, 0)
        _FIELDS.pack_into(self._map, at + 8, kind, rows, step, begin_ns, end_ns, gap_ns, tokens, decodes, host_ns)
        self._written += 1
        _NUMBER.pack_into(self._map, at, self._written)
        _NUMBER.pack_into(self._map, _WRITTEN_AT, self._written)

    def close(self) -> None:
        self._map.close()
        os.close(self._fd)


class StepRingReader:
    """Maps a ring read-only. ConfigError if the file is none, or of another schema."""

    def __init__(self, path: str | Path) -> None:
        try:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the step ring {path}: {error}") from error
        if len(self._map) < HEADER_BYTES:
            raise ConfigError(f"{path} is too short for a step ring")
        magic, schema, entry_bytes, self._num_entries, _ = _HEADER.unpack_from(self._map, 0)
        size = HEADER_BYTES + self._num_entries * ENTRY.itemsize
        if magic != MAGIC or entry_bytes != ENTRY.itemsize or not 0 < size <= len(self._map):
            raise ConfigError(f"{path} is no step ring")
        if schema != SCHEMA:
            raise ConfigError(
                f"{path} has schema {schema}; this program reads {SCHEMA}", hint="use the engine's version"
            )
        self._entries: npt.NDArray[Any] = np.frombuffer(self._map, ENTRY, self._num_entries, HEADER_BYTES)

    @property
    def written(self) -> int:
        """Entries written since the start."""
        return int(_NUMBER.unpack_from(self._map, _WRITTEN_AT)[0])

    def read(self, since: int = 0, last: int | None = None) -> npt.NDArray[Any]:
        """The entries from number `since` on that are still there, oldest first, at most the `last` ones; a copy."""
        end = self.written
        start = max(since, end - self._num_entries, 0 if last is None else end - last)
        numbers = np.arange(start, end, dtype=np.uint64)
        places = (numbers % np.uint64(self._num_entries)).astype(np.int64)
        before = self._entries["number"][places]
        copied: npt.NDArray[Any] = self._entries[places]
        after = self._entries["number"][places]
        whole = (before == numbers + np.uint64(1)) & (after == before)  # the others were overwritten meanwhile
        entries: npt.NDArray[Any] = copied[whole]
        return entries


@dataclass(frozen=True, slots=True)
class Summary:
    """Milliseconds; None where there is nothing to say."""

    kind: str
    count: int
    tokens: int
    step_p50_ms: float
    step_p99_ms: float
    gap_p50_ms: float | None
    gap_p99_ms: float | None


def summarize(entries: npt.NDArray[Any]) -> list[Summary]:
    """One line for each kind of step. Gaps only of steps that were queued while another ran: others waited for work."""
    result = []
    for kind in (Kind.DECODE_GRAPH, Kind.EAGER):
        steps = entries[entries["kind"] == kind]
        if not len(steps):
            continue
        times = (steps["end_ns"] - steps["begin_ns"]).astype(np.float64) / 1e6
        gaps = steps["gap_ns"][steps["gap_ns"] != GAP_UNKNOWN].astype(np.float64) / 1e6
        step_p50, step_p99 = np.percentile(times, [50, 99])
        gap_p50, gap_p99 = np.percentile(gaps, [50, 99]) if len(gaps) else (None, None)
        result.append(
            Summary(
                kind=kind.name.lower(),
                count=len(steps),
                tokens=int(steps["tokens"].sum()),
                step_p50_ms=float(step_p50),
                step_p99_ms=float(step_p99),
                gap_p50_ms=None if gap_p50 is None else float(gap_p50),
                gap_p99_ms=None if gap_p99 is None else float(gap_p99),
            )
        )
    return result


def kernel_times(entries: npt.NDArray[Any]) -> dict[int, tuple[int, float]]:
    """op -> (kernels, mean ns from its start to the start of the next kernel of its step), from profiled steps. Not the
    median: the device's clock ticks coarsely."""
    kernels = entries[(entries["kind"] == Kind.KERNEL) & (entries["end_ns"] >= entries["begin_ns"])]
    times = (kernels["end_ns"] - kernels["begin_ns"]).astype(np.int64)
    ops = kernels["tokens"]
    return {int(op): (int((ops == op).sum()), float(times[ops == op].mean())) for op in np.unique(ops)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.cuda.step_ring", description="Step times of an engine.")
    parser.add_argument("path", help="the file of --step-ring, or /proc/PID/fd/N as in the engine's log")
    parser.add_argument("--last", type=int, help="only so many entries (default: all in the ring)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    try:
        reader = StepRingReader(args.path)
    except EngineError as error:
        print(f"{error.message}" + (f"\n{error.hint}" if error.hint else ""), file=sys.stderr)
        return 1
    entries = reader.read(last=args.last)
    steps, kernels = summarize(entries), kernel_times(entries)
    if args.json:
        fields = [{name: getattr(line, name) for name in Summary.__slots__} for line in steps]
        named = {_op_name(op): {"count": count, "mean_ns": ns} for op, (count, ns) in kernels.items()}
        print(json.dumps({"schema": SCHEMA, "written": reader.written, "steps": fields, "kernels": named}))
        return 0
    print(f"{'steps':<14}{'count':>9}{'tokens':>11}{'p50 ms':>9}{'p99 ms':>9}{'gap p50':>9}{'gap p99':>9}")
    for line in steps:
        gaps = [f"{gap:9.3f}" if gap is not None else f"{'-':>9}" for gap in (line.gap_p50_ms, line.gap_p99_ms)]
        print(
            f"{line.kind:<14}{line.count:>9}{line.tokens:>11}{line.step_p50_ms:>9.3f}{line.step_p99_ms:>9.3f}"
            + "".join(gaps)
        )
    for op, (count, nanoseconds) in sorted(kernels.items()):
        print(f"kernel {_op_name(op):<12}{count:>9}  mean {nanoseconds / 1e3:8.2f} us")
    return 0


def _op_name(op: int) -> str:
    from kernels.launch import Op

    return Op(op).name.lower() if op in set(Op) else str(op)


def now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


if __name__ == "__main__":
    sys.exit(main())
