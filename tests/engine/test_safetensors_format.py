"""Our reader against the safetensors library (files it writes, headers it refuses) and against hostile files."""

from __future__ import annotations

import json
import os
import threading

import numpy as np
import pytest
import safetensors
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from engine.errors import CheckpointError
from engine.safetensors import MAX_HEADER_BYTES, SafetensorsFile, is_plain_file_name, parse_header

FULL = os.environ.get("APPLIANCE_FULL") == "1"


def raw_file(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8), **extra):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **extra}


def read_all(path) -> dict[str, tuple[str, list[int], bytes]]:
    with SafetensorsFile(path) as file:
        result = {}
        for name, info in file.tensors.items():
            data = bytearray(info.nbytes)
            file.read_into(info.offset, memoryview(data))
            result[name] = (info.dtype, list(info.shape), bytes(data))
        return result


def test_reads_what_the_library_writes(tmp_path):
    rng = np.random.default_rng(1)
    types = [np.float64, np.float32, np.float16, np.int64, np.int32, np.int16, np.int8, np.uint64, np.uint32, np.uint16,
             np.uint8, np.bool_]  # fmt: skip
    arrays = {f"t{i}": rng.integers(0, 2, (3, i + 1)).astype(kind) for i, kind in enumerate(types)}
    arrays |= {"scalar": np.array(3.5, np.float32), "empty": np.zeros((0, 7), np.float32), "ü.\u4f60": np.ones(1)}
    save_file(arrays, tmp_path / "a.safetensors", metadata={"format": "pt"})
    got = read_all(tmp_path / "a.safetensors")
    assert got.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (got[name][1], got[name][2]) == (list(array.shape), array.tobytes())
    assert SafetensorsFile(tmp_path / "a.safetensors").metadata == {"format": "pt"}


def test_data_may_start_at_an_odd_offset(tmp_path):
    values = np.arange(5, dtype=np.float32)
    text = json.dumps({"x": entry(shape=(5,), offsets=(0, 20))}).encode()
    text += b" " * (1 - len(text) % 2)  # 8 + len is odd
    (tmp_path / "f").write_bytes(raw_file(text, values.tobytes()))
    assert read_all(tmp_path / "f")["x"][2] == values.tobytes()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "0 bytes, too few"),
        (b"\x01\x00\x00", "3 bytes, too few"),
        (b"\x00" * 8, "does not start"),
        (raw_file({}, b"x", length=3), "not valid JSON"),
        (raw_file({}, length=1000), "header length 1000, but only 2"),
        (raw_file({}, length=MAX_HEADER_BYTES + 1), "over the format's"),
        (raw_file({}, length=2**64 - 1), "over the format's"),
        (b"<!DOCTYPE html><html>", "over the format's"),
        (b"version https://git-lfs.github.com/spec/v1\n", "over the format's"),
        (raw_file(b"[]"), "does not start"),
        (raw_file(b" {}"), "does not start"),
        (raw_file(b'{"a": NaN}'), "NaN"),
        (raw_file(b'{"\xff": 1}'), "UTF-8"),
        (raw_file(b'{"a":' * 100_000), "nested too deeply|not valid"),
        (raw_file(b'{"a":[' + b"[]," * 3_000_000 + b"0]}"), "JSON values"),
        (raw_file({"__metadata__": {"a": 1}}), "__metadata__"),
        (raw_file({"__metadata__": []}), "__metadata__"),
        (raw_file(b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2), b"\0" * 8), "'a' appears twice"),
        (raw_file(b'{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', b"\0" * 8),
         "'dtype' appears"),
        (raw_file({"a": entry()}), "'a'.*outside the 0 bytes"),
        (raw_file({"a": entry()}, b"\0" * 7), "'a'.*outside the 7 bytes"),
        (raw_file({"a": entry()}, b"\0" * 9), "1 bytes after the last tensor"),
        (raw_file({"a": entry(), "b": entry(offsets=(4, 12))}, b"\0" * 12), "'b' overlaps"),
        (raw_file({"a": entry(), "b": entry(offsets=(0, 8))}, b"\0" * 8), "overlaps"),
        (raw_file({"a": entry(), "b": entry(offsets=(12, 20))}, b"\0" * 20), "'b' leaves a hole"),
        (raw_file({"b": entry(offsets=(4, 12))}, b"\0" * 12), "'b' leaves a hole"),
        (raw_file({}, b"\0"), "1 bytes after"),
        (raw_file({"a": entry(offsets=(8, 0))}, b"\0" * 8), "'a'.*end before they begin"),
        (raw_file(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,%s]}}' % (b"8" * 6000)), "thousands of digits"),
        (raw_file({"a": entry(offsets=(-8, 0))}, b"\0" * 8), "'a'.*data_offsets"),
        (raw_file({"a": entry(offsets=(0, 8.0))}, b"\0" * 8), "'a'.*data_offsets"),
        (raw_file({"a": entry(offsets=(0, 8, 8))}, b"\0" * 8), "'a'.*data_offsets"),
        (raw_file({"a": entry(offsets=(False, 8))}, b"\0" * 8), "'a'.*data_offsets"),
        (raw_file({"a": entry(offsets=(0, 2**63))}, b"\0" * 8), "'a'.*data_offsets"),
        (raw_file({"a": entry(shape=(3,))}, b"\0" * 8), "'a'.*needs 12 bytes, but data_offsets give 8"),
        # 2**32 * 2**32 elements of 4 bytes are 0 in 64-bit arithmetic, and 2 in the second case after wrapping
        (raw_file({"a": entry(shape=(2**32, 2**32), offsets=(0, 0))}), "'a'.*needs"),
        (raw_file({"a": entry(shape=(2**62 + 2,))}, b"\0" * 8), "'a'.*needs"),
        (raw_file({"a": entry(shape=(-2,))}, b"\0" * 8), "'a'.*shape"),
        (raw_file({"a": entry(shape=(True, 2))}, b"\0" * 8), "'a'.*shape"),
        (raw_file({"a": entry(shape=("2",))}, b"\0" * 8), "'a'.*shape"),
        (raw_file({"a": entry(shape=(1,) * 17)}, b"\0" * 8), "'a'.*shape"),
        (raw_file({"a": {**entry(), "shape": 2}}, b"\0" * 8), "'a'.*shape"),
        (raw_file({"a": entry(dtype="F4")}, b"\0" * 8), "'a'.*dtype 'F4'"),
        (raw_file({"a": entry(dtype=7)}, b"\0" * 8), "'a'.*dtype 7"),
        (raw_file({"a": entry(dtype=["F32"])}, b"\0" * 8), "'a'.*dtype"),
        (raw_file({"a": entry(more=1)}, b"\0" * 8), "'a'.*exactly"),
        (raw_file({"a": [1]}, b"\0" * 8), "'a'.*exactly"),
        (raw_file({"": entry()}, b"\0" * 8), "name"),
        (raw_file({"n" * 5000: entry()}, b"\0" * 8), "name"),
    ],
)  # fmt: skip
def test_hostile_files_are_refused_by_name(tmp_path, content, says):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"(?s)bad\.safetensors.*({says})") as caught:
        SafetensorsFile(path)
    assert len(str(caught.value)) < 500 + len(str(path))  # a hostile name cannot flood the log


def test_every_truncation_is_an_error(tmp_path):
    save_file({"a": np.ones(9, np.float32), "b": np.ones((2, 3), np.float16)}, tmp_path / "f", metadata={"k": "v"})
    whole = (tmp_path / "f").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "f").write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            SafetensorsFile(tmp_path / "f")


def test_not_a_regular_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "absent", "/dev/zero", "a\0b"):
        with pytest.raises(CheckpointError):
            SafetensorsFile(path)


def test_file_cut_short_while_open_is_an_error_not_a_signal(tmp_path):
    save_file({"a": np.ones(1 << 20, np.float32)}, tmp_path / "f")
    with SafetensorsFile(tmp_path / "f") as file:
        os.truncate(tmp_path / "f", 1 << 20)
        with pytest.raises(CheckpointError, match="ended at byte 1048576"):
            file.read_into(file.tensors["a"].offset, memoryview(bytearray(4 << 20)))
        with pytest.raises(CheckpointError, match="was changed"):
            file.check_unchanged()


def test_descriptors_are_not_leaked(tmp_path):
    (tmp_path / "bad").write_bytes(b"\0" * 100)
    save_file({"a": np.ones(1)}, tmp_path / "good")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with pytest.raises(CheckpointError):
            SafetensorsFile(tmp_path / "bad")
        with SafetensorsFile(tmp_path / "good"):
            pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_threads_read_one_file_at_once(tmp_path):
    values = np.arange(1 << 18, dtype=np.uint32)
    save_file({"a": values}, tmp_path / "f")
    out = np.zeros_like(values)
    buffer = memoryview(out).cast("B")
    with SafetensorsFile(tmp_path / "f") as file:
        start, step = file.tensors["a"].offset, 4096

        def read(worker):
            for position in range(worker * step, len(buffer), 4 * step):
                file.read_into(start + position, buffer[position : position + step])

        threads = [threading.Thread(target=read, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert np.array_equal(out, values)


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("model.safetensors", True),
        ("model-00001-of-00004.safetensors", True),
        ("../model.safetensors", False),
        ("/etc/model.safetensors", False),
        ("a/b.safetensors", False),
        ("a\\b.safetensors", False),
        ("..", False),
        (".hidden.safetensors", False),
        ("-rf.safetensors", False),
        ("model.bin", False),
        ("model.safetensors\n", False),
        ("model\0.safetensors", False),
        ("", False),
        ("m" * 300 + ".safetensors", False),
    ],
)
def test_shard_names(name, plain):
    assert is_plain_file_name(name) is plain


# ---- differential fuzz ----------------------------------------------------------------------------------------------

LIBRARY_HEADER = json.dumps(
    {
        "__metadata__": {"format": "pt"},
        "a": entry("F32", (2, 2), (0, 16)),
        "b": entry("BF16", (3,), (16, 22)),
        "c": entry("F16", (0, 4), (22, 22)),
        "d": entry("I64", (), (22, 30)),
    }
).encode()
DATA = bytes(range(30))
NUMBERS = st.sampled_from([b"0", b"-1", b"16", b"22", b"18446744073709551615", b"9223372036854775808", b"1e3", b"4.0"])
PIECES = st.sampled_from([b"{", b"}", b"[", b"]", b",", b":", b'"', b"null", b"true", b'"a"', b'"dtype"', b'"F64"',
                          b'"shape"', b"\\ud800", b"\xff", b" ", b"\n", b"NaN"])  # fmt: skip
EDITS = PIECES | NUMBERS | st.binary(max_size=3)


@st.composite
def mutated_headers(draw):
    header = bytearray(LIBRARY_HEADER)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(header)))
        header[at : at + draw(st.integers(0, 6))] = draw(EDITS)
    return bytes(header)


def library_reads(content: bytes) -> dict | None:
    try:
        return {name: (t["dtype"], t["shape"], bytes(t["data"])) for name, t in safetensors.deserialize(content)}
    except safetensors.SafetensorError:
        return None


STRICTER = ("appears twice", "exactly dtype", "the name must", "is not supported", "does not start")
"""What we refuse and the library may not: double keys (the format forbids them), extra keys, no name, packed types."""


OVER_63_BITS = (b"18446744073709551615", b"9223372036854775808")
"""Sizes that the library takes in the shape of a tensor without elements; we refuse them: numpy has no such shape."""


@settings(max_examples=20_000 if FULL else 400, deadline=None)
@given(mutated_headers())
@example(LIBRARY_HEADER.replace(b"[0, 4]", b"[0, 18446744073709551615]", 1))
@example(LIBRARY_HEADER)
@example(LIBRARY_HEADER.replace(b'"a"', b'"\\ud800a"', 1))
@example(LIBRARY_HEADER.replace(b'"pt"', b'"\\ud800pt"', 1))
@example(LIBRARY_HEADER.replace(b'"format"', b'"\\udfff"', 1))
@example(LIBRARY_HEADER.replace(b'"pt"', b'"\\ud83d\\ude00"', 1))
def test_mutated_headers_are_read_as_the_library_reads_them_or_refused(header):
    peer = library_reads(raw_file(header, DATA))
    try:
        tensors, _ = parse_header(header, data_bytes=len(DATA), where="f")
    except CheckpointError as error:
        huge = "is not a list of at most" in str(error) and any(size in header for size in OVER_63_BITS)
        assert peer is None or huge or any(reason in str(error) for reason in STRICTER), error
        return
    assert peer is not None
    base = 8 + len(header)
    ours = {n: (t.dtype, list(t.shape), DATA[t.offset - base : t.offset - base + t.nbytes]) for n, t in tensors.items()}
    assert ours == peer


@settings(max_examples=20_000 if FULL else 200, deadline=None)
@given(st.binary(max_size=200) | st.text(alphabet='{}[]",:0123456789eE-. a', max_size=200).map(lambda s: s.encode()))
def test_random_bytes_are_refused_or_read_as_the_library_reads_them(content):
    for header in (content, b"{" + content + b"}"):
        try:
            tensors, _ = parse_header(header, data_bytes=0, where="f")
        except CheckpointError:
            continue
        assert library_reads(raw_file(header)) == {n: (t.dtype, list(t.shape), b"") for n, t in tensors.items()}
