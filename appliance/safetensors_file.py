"""Writing safetensors files as a stream, and checking their headers.

Format: 8 bytes little-endian header length, a JSON object name -> {dtype, shape, data_offsets}, then the data without
gaps (safetensors README). The header is padded with spaces so that the data starts on a 64-byte border.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from appliance.fsutil import StoreError, open_regular, parse_json

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
DATA_ALIGNMENT = 64
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
}  # fmt: skip
DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor to write: its data comes as chunks of bytes, in order, so that memory stays bounded."""

    name: str
    dtype: str  # safetensors' spelling, "F32"
    shape: tuple[int, ...]
    chunks: Iterable[bytes | memoryview]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor of a checked header; offsets are bytes from the start of the data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def write_safetensors(
    path: Path, tensors: Sequence[TensorSource], *, metadata: Mapping[str, str] | None = None
) -> Iterator[int]:
    """Writes `tensors` in the given order to a new file and fsyncs it. Yields the bytes written so far after every
    chunk (for progress) and at last the size of the file. Drive it to the end, or the file is incomplete."""
    header = _header(tensors, metadata or {})
    with path.open("xb") as file:
        file.write(header)
        written = len(header)
        for tensor in tensors:
            begin = written
            for chunk in tensor.chunks:
                file.write(chunk)
                written += memoryview(chunk).nbytes
                yield written
            if written - begin != tensor.num_bytes:
                raise ValueError(f"{tensor.name}: {written - begin} bytes came, {tensor.num_bytes} were announced")
        file.flush()
        os.fsync(file.fileno())
    yield written


def _header(tensors: Sequence[TensorSource], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for tensor in tensors:
        if tensor.name in entries or tensor.name == "__metadata__":
            raise ValueError(f"tensor name {tensor.name!r} is used twice or reserved")
        end = offset + tensor.num_bytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % DATA_ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def read_header(path: Path) -> dict[str, HeaderEntry]:
    """The tensors of a safetensors file after every structural check: lengths, JSON, dtype x shape = bytes, and that
    the data is covered without gap or overlap to the last byte. Raises StoreError naming file and tensor."""
    with open_regular(path) as fd, os.fdopen(os.dup(fd), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if len(prefix) < 8:
            raise StoreError(f"{path.name} has {size} bytes, too few for a safetensors file", hint="get it again")
        length = struct.unpack("<Q", prefix)[0]
        if length > MAX_HEADER_BYTES or length > size - 8:
            raise StoreError(
                f"{path.name} claims a header of {length} bytes in a file of {size}",
                hint="the file is truncated or no safetensors file; get it again",
            )
        raw = file.read(length)
    header = parse_json(raw, f"the header of {path.name}")
    entries = {name: _entry(path.name, name, value) for name, value in header.items() if name != "__metadata__"}
    _check_coverage(path.name, entries, size - 8 - length)
    return entries


def _entry(file_name: str, name: str, value: Any) -> HeaderEntry:
    where = f"{file_name}: tensor {name!r}"
    if not isinstance(value, dict):
        raise StoreError(f"{where} is described by {type(value).__name__}, not by an object")
    dtype = value.get("dtype")
    shape: Any = value.get("shape")
    offsets: Any = value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise StoreError(f"{where} has the unknown dtype {dtype!r}")
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2 or len(shape) > 32:
        raise StoreError(f"{where} has the invalid shape {shape!r} or offsets {offsets!r}")
    begin, end = offsets
    if end - begin != prod(shape) * DTYPE_BITS[dtype] // 8:
        raise StoreError(f"{where}: {dtype} {shape} does not fill bytes {begin} to {end}")
    return HeaderEntry(dtype, tuple(shape), begin, end)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _check_coverage(file_name: str, entries: Mapping[str, HeaderEntry], data_bytes: int) -> None:
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            raise StoreError(
                f"{file_name}: tensor {name!r} starts at {entry.begin}, expected {position} (gap or overlap)"
            )
        position = entry.end
    if position != data_bytes:
        raise StoreError(
            f"{file_name}: the tensors need {position} bytes of data, the file has {data_bytes}",
            hint="the file is truncated or damaged; get it again",
        )


def dominant_dtype(entries: Iterable[HeaderEntry]) -> str:
    """The dtype that most bytes are stored in, in torch's spelling ('float32', 'bfloat16', ...)."""
    total: dict[str, int] = {}
    for entry in entries:
        total[entry.dtype] = total.get(entry.dtype, 0) + entry.end - entry.begin
    best = max(total, key=lambda dtype: total[dtype], default="")
    return DTYPE_NAMES.get(best, best.lower())
