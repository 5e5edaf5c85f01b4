"""Our reader of the safetensors format (https://github.com/huggingface/safetensors, section "Format").

A file is: 8 bytes little-endian header length N, N bytes of JSON starting with "{" (padded with spaces), then the data.
The header is checked as a whole before anything is read: exactly one entry a name, known dtypes, shape x dtype equal to
the bytes, every byte of the data covered once. Data is read with preadv into memory of ours, never through a mapping:
a file cut short while it is read then gives an error where a mapping would give SIGBUS, and there are no page faults
on the source. Values are not looked at here.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.errors import CheckpointError
from engine.jsonfile import lone_surrogate, open_regular, parse_json_object, shown

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType

MAX_HEADER_BYTES = 100_000_000  # of the format
MAX_RANK = 16
_MAX_NAME = 1024

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes of one element of each dtype of the format. The packed ones (F4, F6_*) are refused."""

_HINT = "The file is damaged or still being copied: fetch it again and compare its digest."
_LFS_HINT = "It looks like a Git LFS pointer, not the file itself: fetch that with `git lfs pull`."


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies. `offset` counts from the start of the file and may be unaligned."""

    name: str
    dtype: str  # key of DTYPE_BYTES
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def numel(self) -> int:
        return self.nbytes // DTYPE_BYTES[self.dtype]


class SafetensorsFile:
    """One open file with a checked header. Holds a descriptor; close() or use as a context manager.

    Thread-safe: `read_into` may be called from several threads.
    """

    def __init__(self, path: Path) -> None:
        """Open and check the header. Raises CheckpointError naming the file (and tensor)."""
        self.path = path
        self._fd, self.size = open_regular(path, CheckpointError)
        try:
            self._stamp = _stamp(self._fd)
            self.tensors, self.metadata = self._read_header()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` (bytes, writable) from `offset` of the file. Releases the GIL."""
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._fd, [buffer[done:]], offset + done)
            except OSError as exc:
                raise CheckpointError(f"cannot read {self.path} at byte {offset + done}: {exc.strerror}") from exc
            if count == 0:
                raise CheckpointError(f"{self.path} ended at byte {offset + done} while it was read", hint=_HINT)
            done += count

    def read_ahead(self) -> None:
        """Ask the kernel to read the file from its start, for files not in the page cache. Never fails."""
        try:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_WILLNEED)
        except OSError:
            pass  # advice only; some file systems have none

    def check_unchanged(self) -> None:
        """Raise CheckpointError if the file was written to since it was opened, so that its bytes may be a mix."""
        if _stamp(self._fd) != self._stamp:
            raise CheckpointError(f"{self.path} was changed while it was read", hint=_HINT)

    def _read_header(self) -> tuple[dict[str, TensorInfo], dict[str, str]]:
        if self.size < 8:
            raise CheckpointError(f"{self.path} has {self.size} bytes, too few for a safetensors file", hint=_HINT)
        prefix = bytearray(8)
        self.read_into(0, memoryview(prefix))
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{self.path}: header length {length} is over the format's {MAX_HEADER_BYTES}; not a safetensors file?",
                hint=_LFS_HINT if prefix == b"version " else _HINT,
            )
        if length > self.size - 8:
            raise CheckpointError(
                f"{self.path}: header length {length}, but only {self.size - 8} bytes follow", hint=_HINT
            )
        header = bytearray(length)
        self.read_into(8, memoryview(header))
        return parse_header(bytes(header), data_bytes=self.size - 8 - length, where=str(self.path))


def parse_header(header: bytes, *, data_bytes: int, where: str) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """(tensors by name, metadata) of a header whose data section has `data_bytes`. Pure; raises CheckpointError."""
    if header[:1] != b"{":
        raise CheckpointError(f"{where}: the header does not start with '{{'; not a safetensors file?")
    entries = parse_json_object(header, what=f"{where}: header", error=CheckpointError)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{where}: __metadata__ must map strings to strings")
    position = lone_surrogate(header)
    if position is not None:
        raise CheckpointError(f"{where}: byte {position} of the header is half a surrogate pair, which is no text")
    start = 8 + len(header)
    tensors = {name: _tensor(name, entry, start, data_bytes, where) for name, entry in entries.items()}
    _check_cover(tensors, start, start + data_bytes, where)
    return tensors, metadata


def _tensor(name: str, entry: Any, start: int, data_bytes: int, where: str) -> TensorInfo:
    def fail(problem: str) -> CheckpointError:
        return CheckpointError(f"{where}: tensor {shown(name)}: {problem}")

    if not name or len(name) > _MAX_NAME:
        raise fail(f"the name must have 1 to {_MAX_NAME} characters")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise fail("the entry must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise fail(f"dtype {shown(dtype)} is not supported")
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(map(_is_size, shape)):
        raise fail(f"shape {shown(shape)} is not a list of at most {MAX_RANK} sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise fail(f"data_offsets {shown(offsets)} is not [begin, end]")
    begin, end = offsets
    if begin > end:
        raise fail(f"data_offsets {shown(offsets)} end before they begin")
    if end > data_bytes:
        raise fail(f"data_offsets {shown(offsets)} lie outside the {data_bytes} bytes of data (truncated file?)")
    need = DTYPE_BYTES[dtype]
    for size in shape:  # Python integers do not overflow; sizes are below 2**63 and there are at most 16
        need *= size
    if need != end - begin:
        raise fail(f"{dtype} {shown(shape)} needs {need} bytes, but data_offsets give {end - begin}")
    return TensorInfo(name, dtype, tuple(shape), start + begin, need)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _check_cover(tensors: Mapping[str, TensorInfo], position: int, end: int, where: str) -> None:
    """The format demands that the tensors cover the data without overlap or hole."""
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != position:
            problem = "overlaps the tensor before it" if tensor.offset < position else "leaves a hole before it"
            raise CheckpointError(f"{where}: tensor {shown(tensor.name)} {problem}")
        position += tensor.nbytes
    if position != end:
        raise CheckpointError(f"{where}: {end - position} bytes after the last tensor belong to none", hint=_HINT)


def _stamp(fd: int) -> tuple[int, int, int]:
    status = os.fstat(fd)
    return status.st_size, status.st_mtime_ns, status.st_ino


def is_plain_file_name(name: str) -> bool:
    """True for "model-00001-of-00004.safetensors" and the like: no folder, no hidden file, nothing odd."""
    return len(name) <= 255 and re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+=@-]*\.safetensors", name) is not None
