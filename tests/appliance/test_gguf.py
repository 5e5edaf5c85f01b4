"""The GGUF reader: agreement with the gguf library, and no file that makes it do anything but refuse."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from store_helpers import hf_tensors, make_gguf

from appliance.gguf import GgufError, GgufFile


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def head(tensors: int, pairs: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs)


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def tensor(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


U32 = 4
ONE = pair("a", U32, struct.pack("<I", 1))
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "too few"),
    "short": (b"GGUF" + bytes(8), "too few"),
    "magic": (b"PK\x03\x04" + bytes(40), "not a GGUF file"),
    "version 1": (head(0, 0, 1), "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "tensor count": (head(2**63, 0), "claims 9223372036854775808 tensors"),
    "pair count": (head(0, 2**40), "metadata pairs"),
    "key length": (head(0, 1) + struct.pack("<Q", 2**62) + bytes(64), "at most 65535"),
    "key past the end": (head(0, 1) + struct.pack("<Q", 60000) + bytes(64), "needs 60000 bytes"),
    "key not UTF-8": (head(0, 1) + pair(b"\xff\xfe", U32, bytes(4)), "not valid UTF-8"),
    "duplicate key": (head(0, 2) + ONE + ONE, "'a' appears twice"),
    "value type": (head(0, 1) + pair("a", 13, bytes(8)), "unknown type 13"),
    "bool": (head(0, 1) + pair("a", 7, b"\x02"), "neither 0 nor 1"),
    "value cut": (head(0, 1) + pair("a", 10, bytes(4)), "needs 8 bytes"),
    "string value": (head(0, 1) + pair("a", 8, struct.pack("<Q", 2**64 - 1)), "claims 18446744073709551615 bytes"),
    "array count": (head(0, 1) + pair("a", 9, struct.pack("<IQ", 4, 2**62)), "elements of 'a'"),
    "array of strings": (head(0, 1) + pair("a", 9, struct.pack("<IQ", 8, 2**61)), "elements of 'a'"),
    "nested array": (head(0, 1) + pair("a", 9, struct.pack("<IQ", 9, 1) + bytes(64)), "nested arrays"),
    "alignment 0": (head(0, 1) + pair("general.alignment", U32, struct.pack("<I", 0)), "alignment"),
    "alignment 2**31": (head(0, 1) + pair("general.alignment", U32, struct.pack("<I", 2**31)), "alignment"),
    "alignment string": (head(0, 1) + pair("general.alignment", 8, string("32")), "alignment"),
    "dimensions 0": (head(1, 0) + string("w") + struct.pack("<I", 0) + bytes(64), "0 dimensions"),
    "dimensions 5": (head(1, 0) + tensor("w", (1,) * 5, 0, 0) + bytes(64), "5 dimensions"),
    "dimensions many": (head(1, 0) + string("w") + struct.pack("<I", 2**32 - 1) + bytes(64), "dimensions"),
    "shape 0": (head(1, 0) + tensor("w", (0,), 0, 0) + bytes(64), "impossible shape"),
    "shape overflow": (head(1, 0) + tensor("w", (2**63, 4), 0, 0) + bytes(64), "impossible shape"),
    "product overflow": (head(1, 0) + tensor("w", (2**40, 2**40), 0, 0) + bytes(64), "the file has only"),
    "type": (head(1, 0) + tensor("w", (32,), 16, 0) + bytes(64), "unsupported GGML type 16"),
    "half a block": (head(1, 0) + tensor("w", (33,), 2, 0) + bytes(640), "whole Q4_0 blocks"),
    "offset unaligned": (head(1, 0) + tensor("w", (1,), 0, 4) + bytes(640), "not a multiple"),
    "offset past the end": (head(1, 0) + tensor("w", (1,), 0, 2**40) + bytes(64), "truncated|the file has only"),
    "offset overflow": (head(1, 0) + tensor("w", (1,), 0, 2**64 - 32) + bytes(64), "the file has only"),
    "data cut": (head(1, 0) + tensor("w", (64,), 0, 0) + bytes(64), "the file has only"),
    "overlap": (head(2, 0) + tensor("v", (16,), 0, 0) + tensor("w", (16,), 0, 32) + bytes(640), "overlap"),
    "duplicate tensor": (head(2, 0) + tensor("w", (8,), 0, 0) + tensor("w", (8,), 0, 32) + bytes(640), "twice"),
    "long tensor name": (head(1, 0) + tensor("w" * 65, (8,), 0, 0) + bytes(640), "at most 64"),
}


@pytest.mark.parametrize("raw, message", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_files_are_refused_with_the_reason(tmp_path: Path, raw: bytes, message: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(raw)
    with pytest.raises(GgufError, match=message):
        GgufFile(path)


def test_reads_what_the_library_wrote(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "m.gguf", hf_tensors(3), quantization=gguf.GGMLQuantizationType.Q8_0)
    reader = gguf.GGUFReader(path)
    with GgufFile(path) as ours:
        for key, field in reader.fields.items():
            if key.startswith("GGUF."):
                continue
            value, expected = ours.metadata[key], field.contents()
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == expected, key
        assert {name: item.shape for name, item in ours.tensors.items()} == {
            item.name: tuple(int(size) for size in item.shape[::-1]) for item in reader.tensors
        }
        for item in reader.tensors:
            info = ours.tensors[item.name]
            rows = np.arange(info.shape[0] if len(info.shape) > 1 else 1)
            assert ours.rows(info, rows).tobytes() == item.data.tobytes()


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "m.gguf", {"model.norm.weight": np.ones(8, np.float32)})
    for size in reversed(range(path.stat().st_size)):
        os.truncate(path, size)
        with pytest.raises(GgufError):
            GgufFile(path)


def test_the_head_is_bounded_whatever_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A huge file must not make the reader build a huge vocabulary in memory."""
    monkeypatch.setattr("appliance.gguf.MAX_HEAD_BYTES", 4096)
    path = tmp_path / "big.gguf"
    for count, limit in ((1000, "elements of 'a', more than"), (400, "the head ends at 4096")):
        strings = string("x" * 20) * count
        path.write_bytes(head(0, 1) + pair("a", 9, struct.pack("<IQ", 8, count)) + strings)
        with pytest.raises(GgufError, match=limit):
            GgufFile(path)


def _flip(raw: bytearray, rng: random.Random) -> None:
    raw[rng.randrange(len(raw))] = rng.randrange(256)


def _huge(raw: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(raw) - 8)
    raw[at : at + 8] = struct.pack("<Q", rng.choice((2**64 - 1, 2**63, 2**32, 2**31 - 1, 0)))


@pytest.mark.parametrize("damage", [_flip, _huge], ids=["byte", "count"])
def test_random_damage_never_crashes(tmp_path: Path, damage: Callable[[bytearray, random.Random], None]) -> None:
    """Opened or refused, nothing else: no other exception, no endless loop, no huge allocation."""
    whole = make_gguf(tmp_path / "m.gguf", {"model.norm.weight": np.ones(8, np.float32)}).read_bytes()
    rng, path, refused = random.Random(1), tmp_path / "bad.gguf", 0
    for _ in range(400):
        raw = bytearray(whole)
        damage(raw, rng)
        path.write_bytes(raw)
        try:
            with GgufFile(path) as ours:
                for info in ours.tensors.values():
                    ours.rows(info, np.arange(1))
        except GgufError as error:
            assert error.message
            refused += 1
    assert refused > 40
