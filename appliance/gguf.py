"""Reader of GGUF files, versions 2 and 3, little-endian (specification: ggml docs/gguf.md).

The file may be hostile: every count, length and offset is checked against the bytes that are there before anything is
allocated or read, and each refusal names the field. Tensor data stays in the mapping until it is asked for.
"""

from __future__ import annotations

import itertools
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from appliance.dequant import GGML_TYPES, GgmlType
from appliance.log import ApplianceError

MAGIC = b"GGUF"
MAX_KEY_BYTES = 65535  # specification
MAX_TENSOR_NAME_BYTES = 64  # specification
MAX_DIMENSIONS = 4  # GGML_MAX_DIMS
MAX_DIMENSION = 2**40
MAX_ALIGNMENT = 65536
MAX_HEAD_BYTES = 256 * 1024 * 1024  # vocabulary and merges of the largest tokenizers are about 10 MB

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9


class GgufError(ApplianceError):
    """The file is damaged, hostile, or uses something this reader does not know; names the field."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """`shape` is row-major (outermost first), the reverse of the order in the file."""

    name: str
    shape: tuple[int, ...]
    type: GgmlType
    offset: int  # bytes from the start of the file
    num_bytes: int


class _Cursor:
    """Reads the head of the file (all before the tensor data); never goes past `end`."""

    def __init__(self, buffer: mmap.mmap, end: int) -> None:
        self.buffer, self.position, self.end = buffer, 0, end

    def take(self, size: int, what: str) -> bytes:
        if size > self.end - self.position:
            raise GgufError(f"{what} needs {size} bytes at offset {self.position}, but the head ends at {self.end}")
        start, self.position = self.position, self.position + size
        return self.buffer[start : self.position]

    def scalar(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]

    def string(self, what: str, limit: int = MAX_HEAD_BYTES) -> str:
        size = self.scalar("Q", f"the length of {what}")
        if size > limit:
            raise GgufError(f"{what} claims {size} bytes; at most {limit} are accepted")
        try:
            return self.take(size, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise GgufError(f"{what} is not valid UTF-8 (byte {error.start})") from None


class GgufFile:
    """An open GGUF file: `metadata` (key -> int, float, bool, str, list[str] or numpy array) and `tensors` (by name).

    Use as a context manager. Arrays from `rows` are copies and stay valid after closing.
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            file.seek(0, 2)
            self._size = file.tell()
            if self._size < 24:
                raise GgufError(f"{path.name} has {self._size} bytes, too few for a GGUF header")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self._read_head()
        except BaseException:
            self._map.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._map.close()

    def rows(self, tensor: GgufTensor, selected: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """The raw bytes of the `selected` rows (all dimensions but the last flattened): (len(selected), row_bytes)."""
        num_rows = prod(tensor.shape[:-1])
        view = np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.offset)
        raw: npt.NDArray[np.uint8] = np.take(view.reshape(num_rows, -1), selected, axis=0)
        del view  # an exported buffer would keep the mapping from closing
        return raw

    def _read_head(self) -> None:
        cursor = _Cursor(self._map, min(self._size, MAX_HEAD_BYTES))
        magic = cursor.take(4, "the magic number")
        if magic != MAGIC:
            raise GgufError(f"{self.path.name} is not a GGUF file (it starts with {magic!r})")
        version = cursor.scalar("I", "the version")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            kind = "big-endian GGUF" if swapped in (2, 3) else f"GGUF version {version}"
            raise GgufError(f"{self.path.name} is {kind}; supported are versions 2 and 3, little-endian")
        num_tensors = _count(cursor, "tensors", 8 + 4 + 8 + 4 + 8)
        num_pairs = _count(cursor, "metadata pairs", 8 + 4 + 1)
        self.metadata = _read_metadata(cursor, num_pairs)
        infos = _read_tensor_infos(cursor, num_tensors)
        alignment = _alignment(self.metadata)
        data_start = -(-cursor.position // alignment) * alignment
        self.tensors = {name: _place(info, data_start, alignment, self._size) for name, info in infos.items()}
        _check_overlap(list(self.tensors.values()))


def _count(cursor: _Cursor, what: str, least_bytes: int) -> int:
    count = int(cursor.scalar("Q", f"the number of {what}"))
    if count * least_bytes > cursor.end - cursor.position:
        raise GgufError(f"the header claims {count} {what}, more than there is room for")
    return count


def _read_metadata(cursor: _Cursor, num_pairs: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(num_pairs):
        key = cursor.string(f"metadata key {index}", MAX_KEY_BYTES)
        if key in metadata:
            raise GgufError(f"metadata key {key!r} appears twice")
        metadata[key] = _read_value(cursor, cursor.scalar("I", f"the type of {key!r}"), key)
    return metadata


def _read_value(cursor: _Cursor, kind: int, key: str) -> Any:
    what = f"the value of {key!r}"
    if kind == _STRING:
        return cursor.string(what)
    if kind == _ARRAY:
        return _read_array(cursor, key)
    if kind == _BOOL:
        return _as_bools(cursor.take(1, what), key)[0]
    if kind not in _SCALARS:
        raise GgufError(f"metadata key {key!r} has the unknown type {kind}")
    return cursor.scalar(_SCALARS[kind], what)


def _read_array(cursor: _Cursor, key: str) -> Any:
    kind = cursor.scalar("I", f"the element type of {key!r}")
    if kind not in _SCALARS and kind != _STRING:
        raise GgufError(f"array {key!r} has elements of type {kind}; nested arrays and unknown types are refused")
    size = 8 if kind == _STRING else struct.calcsize("<" + _SCALARS[kind])
    count = _count(cursor, f"elements of {key!r}", size)
    if kind == _STRING:
        return [cursor.string(f"element {index} of {key!r}") for index in range(count)]
    raw = cursor.take(count * size, f"array {key!r}")
    if kind == _BOOL:
        return _as_bools(raw, key)
    return np.frombuffer(raw, np.dtype(_SCALARS[kind]).newbyteorder("<"))


def _as_bools(raw: bytes, key: str) -> list[bool]:
    if any(byte > 1 for byte in raw):
        raise GgufError(f"metadata key {key!r} has a bool that is neither 0 nor 1")
    return [byte == 1 for byte in raw]


def _alignment(metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    valid = isinstance(alignment, int) and 8 <= alignment <= MAX_ALIGNMENT and alignment % 8 == 0
    if not valid:
        raise GgufError(f"general.alignment is {alignment!r}; it must be a multiple of 8, at most {MAX_ALIGNMENT}")
    return int(alignment)


def _read_tensor_infos(cursor: _Cursor, num_tensors: int) -> dict[str, GgufTensor]:
    infos: dict[str, GgufTensor] = {}
    for index in range(num_tensors):
        name = cursor.string(f"the name of tensor {index}", MAX_TENSOR_NAME_BYTES)
        if name in infos:
            raise GgufError(f"tensor {name!r} appears twice")
        num_dims = cursor.scalar("I", f"the number of dimensions of {name!r}")
        if not 1 <= num_dims <= MAX_DIMENSIONS:
            raise GgufError(f"tensor {name!r} has {num_dims} dimensions; 1 to {MAX_DIMENSIONS} are possible")
        shape = tuple(cursor.scalar("Q", f"the shape of {name!r}") for _ in range(num_dims))[::-1]
        if not all(1 <= size <= MAX_DIMENSION for size in shape):
            raise GgufError(f"tensor {name!r} has the impossible shape {shape}")
        number = cursor.scalar("I", f"the type of {name!r}")
        if number not in GGML_TYPES:
            known = ", ".join(entry.name for entry in GGML_TYPES.values())
            raise GgufError(f"tensor {name!r} has the unsupported GGML type {number}; supported are {known}")
        kind = GGML_TYPES[number]
        if shape[-1] % kind.block_weights:
            raise GgufError(f"tensor {name!r}: rows of {shape[-1]} are not whole {kind.name} blocks")
        offset = cursor.scalar("Q", f"the offset of {name!r}")
        infos[name] = GgufTensor(name, shape, kind, offset, prod(shape) // kind.block_weights * kind.block_bytes)
    return infos


def _place(info: GgufTensor, data_start: int, alignment: int, file_size: int) -> GgufTensor:
    if info.offset % alignment:
        raise GgufError(f"tensor {info.name!r} starts at {info.offset}, not a multiple of {alignment}")
    start = data_start + info.offset
    if start + info.num_bytes > file_size:
        raise GgufError(
            f"tensor {info.name!r} ends at byte {start + info.num_bytes}, the file has only {file_size}",
            hint="the file is truncated; get it again",
        )
    return GgufTensor(info.name, info.shape, info.type, start, info.num_bytes)


def _check_overlap(tensors: list[GgufTensor]) -> None:
    tensors.sort(key=lambda tensor: tensor.offset)
    for before, after in itertools.pairwise(tensors):
        if before.offset + before.num_bytes > after.offset:
            raise GgufError(f"tensors {before.name!r} and {after.name!r} overlap")
