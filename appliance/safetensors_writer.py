"""Writing safetensors files as a stream; the reader is engine.safetensors.

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

from engine.safetensors import DTYPE_BYTES

DATA_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor to write: its data comes as chunks of bytes, in order, so that memory stays bounded."""

    name: str
    dtype: str  # safetensors' spelling, "F32"
    shape: tuple[int, ...]
    chunks: Iterable[bytes | memoryview]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


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
