"""Our safetensors writer against the library's reader, and the header check against damaged files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from appliance.fsutil import StoreError
from appliance.safetensors_file import HeaderEntry, TensorSource, dominant_dtype, read_header, write_safetensors

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=5)


@settings(max_examples=25, deadline=None)
@given(shapes=SHAPES, chunk=st.integers(1, 40), metadata=st.dictionaries(st.text(max_size=5), st.text(max_size=9)))
def test_the_library_reads_what_we_write(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, ...]], chunk: int, metadata: dict[str, str]
) -> None:
    path = tmp_path_factory.mktemp("st") / "x.safetensors"
    arrays = {
        f"t{i}.é": np.random.default_rng(i).standard_normal(shape).astype("<f4") for i, shape in enumerate(shapes)
    }
    sources = []
    for name, array in arrays.items():
        raw = array.tobytes()
        chunks = [raw[at : at + chunk] for at in range(0, len(raw), chunk)]
        sources.append(TensorSource(name, "F32", array.shape, chunks))
    sizes = list(write_safetensors(path, sources, metadata=metadata))
    assert sizes == sorted(sizes) and sizes[-1] == path.stat().st_size
    with safe_open(path, "np") as file:
        assert file.metadata() == (metadata or None)
        assert set(file.keys()) == arrays.keys()
        for name, array in arrays.items():
            assert np.array_equal(file.get_tensor(name), array) and file.get_tensor(name).shape == array.shape
    length = struct.unpack("<Q", path.read_bytes()[:8])[0]
    assert (8 + length) % 64 == 0
    assert {name: entry.shape for name, entry in read_header(path).items()} == {
        name: array.shape for name, array in arrays.items()
    }


@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "int64", "uint8", "bool", "float64", "int32", "int8", "uint16"]
)
def test_reads_headers_of_the_library(tmp_path: Path, dtype: str) -> None:
    save_file({"a": np.ones((3, 5), dtype), "b": np.zeros((0, 4), dtype)}, tmp_path / "x.safetensors", {"k": "v"})
    header = read_header(tmp_path / "x.safetensors")
    assert header["a"].shape == (3, 5) and header["b"].shape == (0, 4)
    assert header["a"].end - header["a"].begin == 15 * np.dtype(dtype).itemsize


def test_wrong_amount_of_data_is_an_error(tmp_path: Path) -> None:
    for count in (0, 12, 20):
        source = TensorSource("a", "F32", (2, 2), [bytes(count)])
        with pytest.raises(ValueError, match="announced"):
            list(write_safetensors(tmp_path / f"{count}.safetensors", [source]))


def entry(dtype: Any = "F32", shape: Any = (4,), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def raw_file(header: Any, data: int = 16) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "too few"),
    "seven bytes": (bytes(7), "too few"),
    "header length": (struct.pack("<Q", 2**63) + bytes(99), "claims a header"),
    "header length past the end": (struct.pack("<Q", 100) + bytes(99), "claims a header"),
    "no JSON": (raw_file(b"{"), "not valid JSON"),
    "not UTF-8": (raw_file(b'{"\xff": 1}'), "not valid UTF-8"),
    "a list": (raw_file([1]), "expected an object"),
    "deep": (raw_file(b"[" * 200_000), "too deeply|not valid JSON"),
    "NaN": (raw_file(b'{"a": NaN}'), "not valid JSON"),
    "huge number": (raw_file(b'{"a": ' + b"9" * 5000 + b"}"), "not valid JSON"),
    "duplicate": (raw_file(b'{"a": 1, "a": 1}'), "'a' appears twice"),
    "entry": (raw_file({"a": 3}), "described by int"),
    "dtype": (raw_file({"a": entry(dtype="F33")}), "unknown dtype 'F33'"),
    "dtype list": (raw_file({"a": entry(dtype=["F32"])}), "unknown dtype"),
    "shape": (raw_file({"a": entry(shape=[-4])}), "invalid shape"),
    "shape bool": (raw_file({"a": entry(shape=[True, 4])}), "invalid shape"),
    "shape overflow": (raw_file({"a": entry(shape=[2**62, 2**62])}), "does not fill"),
    "offsets": (raw_file({"a": entry(offsets=[0])}), "invalid shape"),
    "offsets reversed": (raw_file({"a": entry(offsets=[16, 0])}), "does not fill"),
    "too small": (raw_file({"a": entry(shape=[5])}), "does not fill"),
    "gap": (raw_file({"a": entry(offsets=[4, 20])}, 20), "gap or overlap"),
    "overlap": (raw_file({"a": entry(), "b": entry(offsets=[8, 24])}, 24), "gap or overlap"),
    "truncated": (raw_file({"a": entry()}, 15), "the file has 15"),
    "trailing bytes": (raw_file({"a": entry()}, 17), "the file has 17"),
}


@pytest.mark.parametrize("raw, message", DAMAGED.values(), ids=DAMAGED.keys())
def test_damaged_files_are_refused_with_the_reason(tmp_path: Path, raw: bytes, message: str) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(raw)
    with pytest.raises(StoreError, match=message) as caught:
        read_header(path)
    assert "weights.safetensors" in caught.value.message


def test_dominant_dtype_counts_bytes() -> None:
    entries = [HeaderEntry("BF16", (100,), 0, 200), HeaderEntry("F32", (10,), 200, 240)]
    assert dominant_dtype(entries) == "bfloat16"
    assert dominant_dtype([HeaderEntry("F8_E4M3", (9,), 0, 9)]) == "f8_e4m3"
