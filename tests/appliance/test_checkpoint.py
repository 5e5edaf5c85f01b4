"""`model add` takes what the engine serves, refuses what the engine refuses, and says which file is at fault."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from store_helpers import HIDDEN, VOCAB, hf_tensors, make_hf_dir

from appliance.fsutil import StoreError
from appliance.models import ModelStore
from appliance.safetensors_writer import TensorSource, write_safetensors
from engine.config import ModelConfig
from engine.core_config import CoreConfig
from engine.engine import Engine
from engine.errors import EngineError
from engine.serve import check_vocabulary
from engine.tokenizer import Tokenizer

WEIGHTS, INDEX, SHARD = "model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors"
OLD_BUFFER = "model.layers.0.self_attn.rotary_emb.inv_freq"  # in old checkpoints; the engine skips it

Change = Callable[[Path], None]


def engine_serves(directory: Path) -> bool:
    """What `appliance serve` does with a directory up to a loaded model, weights included."""
    try:
        check_vocabulary(ModelConfig.from_dir(directory), Tokenizer.from_dir(directory))
        Engine.load(CoreConfig(model_dir=str(directory), kv_tokens=512, num_threads=1)).close()
    except EngineError:
        return False
    return True


def edit(name: str, **values: Any) -> Change:
    """Sets keys of a JSON file; None deletes."""

    def change(directory: Path) -> None:
        value = json.loads((directory / name).read_text()) | values
        (directory / name).write_text(json.dumps({key: item for key, item in value.items() if item is not None}))

    return change


def text(name: str, content: str | bytes) -> Change:
    raw = content.encode() if isinstance(content, str) else content
    return lambda directory: (directory / name).write_bytes(raw) and None


def twice(name: str, key: str) -> Change:
    """The same key once more, at the start of the file."""

    def change(directory: Path) -> None:
        (directory / name).write_text(f'{{"{key}": 1, ' + (directory / name).read_text().lstrip()[1:])

    return change


def tensors(**changed: Any) -> Change:
    """Replaces tensors ('__' in a name stands for '.'), None deletes."""

    def change(directory: Path) -> None:
        new = load_file(directory / WEIGHTS) | {name.replace("__", "."): value for name, value in changed.items()}
        save_file({name: value for name, value in new.items() if value is not None}, directory / WEIGHTS)

    return change


def save_as(directory: Path, matrices: str, norms: str) -> None:
    """The weights in these dtypes. numpy has no bfloat16: the upper halves of float32 are taken."""
    (directory / WEIGHTS).unlink()
    sources = []
    for name, value in hf_tensors().items():
        kind = matrices if value.ndim == 2 else norms
        numpy_dtype = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}.get(kind)
        stored = value.astype(numpy_dtype) if numpy_dtype else (value.view("<u4") >> 16).astype("<u2")
        sources.append(TensorSource(name, kind, value.shape, [stored.tobytes()]))
    list(write_safetensors(directory / WEIGHTS, sources))


def all_as(dtype: str) -> Change:
    return lambda directory: save_as(directory, dtype, dtype)


def header(edit_header: Callable[[dict[str, Any], int], object], more_data: int = 0) -> Change:
    """Changes the header of the weights in place; the function gets the entries and the bytes of data there were."""

    def change(directory: Path) -> None:
        raw = (directory / WEIGHTS).read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        entries, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
        edit_header(entries, len(data))
        head = json.dumps(entries).encode()
        (directory / WEIGHTS).write_bytes(struct.pack("<Q", len(head)) + head + data + bytes(more_data))

    return change


def buffer(dtype: str, shape: list[int], size: int) -> Change:
    """One more tensor, of a name that the engine skips."""
    return header(
        lambda entries, end: entries.update(
            {OLD_BUFFER: {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}}
        ),
        size,
    )


def added_token(token_id: int, *, special: bool) -> Change:
    token = {"id": token_id, "content": "<|x|>", "special": special, "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False}  # fmt: skip
    return edit("tokenizer.json", added_tokens=[token])


def rename_shard(new: str) -> Change:
    def change(directory: Path) -> None:
        (directory / SHARD).rename(directory / new)
        index = (directory / INDEX).read_text().replace(SHARD, new)
        (directory / INDEX).write_text(index)

    return change


def forget(directory: Path) -> None:
    """The index no longer lists a tensor that its shard holds."""
    index = json.loads((directory / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    (directory / INDEX).write_text(json.dumps(index))


CASES: dict[str, tuple[int, bool, Change]] = {  # shards, served?, change
    "as it is": (1, True, lambda directory: None),
    "shards": (2, True, lambda directory: None),
    "float16": (1, True, all_as("F16")),
    "bfloat16": (1, True, all_as("BF16")),
    "float64": (1, False, all_as("F64")),
    "int8": (1, False, tensors(model__norm__weight=np.ones(HIDDEN, np.int8))),
    "tensor missing": (1, False, tensors(model__norm__weight=None)),
    "tensor unknown": (1, False, tensors(model__surprise__weight=np.ones(3, np.float32))),
    "tensor shape": (1, False, tensors(model__norm__weight=np.ones(HIDDEN + 1, np.float32))),
    "head of a tied model": (1, True, tensors(lm_head__weight=hf_tensors()["model.embed_tokens.weight"])),
    "buffer": (1, True, tensors(**{OLD_BUFFER.replace(".", "__"): np.ones(8, np.float32)})),
    "buffer of complex numbers": (1, True, buffer("C64", [2], 16)),
    "buffer of FNUZ": (1, True, buffer("F8_E4M3FNUZ", [16], 16)),
    "buffer of rank 16": (1, True, buffer("F32", [1] * 15 + [4], 16)),
    "buffer of rank 17": (1, False, buffer("F32", [1] * 16 + [4], 16)),
    "buffer of F4": (1, False, buffer("F4", [32], 16)),
    "more in an entry": (1, False, header(lambda entries, end: entries["model.norm.weight"].update(extra=1))),
    "metadata": (1, False, header(lambda entries, end: entries.update(__metadata__={"a": 1}))),
    "bytes after the data": (1, False, header(lambda entries, end: None, 1)),
    "shard of an odd name": (2, True, rename_shard("model_a+b=1@x.safetensors")),
    "shard of a foreign name": (2, False, rename_shard("mod\u00e8le.safetensors")),
    "shard with a space": (2, False, rename_shard("model 1.safetensors")),
    "index forgets": (2, False, forget),
    "index with a twin": (2, False, twice(INDEX, "weight_map")),
    "config without model_type": (1, True, edit("config.json", model_type=None)),
    "config without both": (1, False, edit("config.json", model_type=None, architectures=None)),
    "config unknown": (1, False, edit("config.json", model_type="mamba", architectures=["MambaForCausalLM"])),
    "config with a twin": (1, False, twice("config.json", "hidden_act")),
    "config other size": (1, False, edit("config.json", hidden_size=2 * HIDDEN)),
    "generation config": (1, True, text("generation_config.json", '{"eos_token_id": [0, 1]}')),
    "generation config cut": (1, False, text("generation_config.json", '{"eos_token_id"')),
    "tokenizer config with a twin": (1, True, twice("tokenizer_config.json", "x")),
    "tokenizer config a list": (1, False, text("tokenizer_config.json", "[]")),
    "special tokens cut": (1, False, text("special_tokens_map.json", "{")),
    "tokenizer of another kind": (1, False, edit("tokenizer.json", model={"type": "WordPiece", "vocab": {}})),
    "template not UTF-8": (1, False, text("chat_template.jinja", b"\xff")),
    "template long": (1, True, text("chat_template.jinja", "x" * (2 << 20))),  # served, chat is refused
    "template wrong": (1, True, text("chat_template.jinja", "{% if %}")),  # the same
    "token beyond the embedding": (1, True, added_token(VOCAB, special=False)),  # served with a warning
    "special token beyond the embedding": (1, False, added_token(VOCAB, special=True)),
    "license in Latin-1": (1, True, text("LICENSE", b"\xa9")),
}  # fmt: skip


@pytest.mark.parametrize("shards, served, change", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("how", ["copy", "link", "copy of links"])
def test_takes_exactly_what_the_engine_serves(
    tmp_path: Path, how: str, shards: int, served: bool, change: Change
) -> None:
    directory = make_hf_dir(tmp_path / "real", shards=shards)
    change(directory)
    store = ModelStore(tmp_path / "store")
    assert engine_serves(directory) is served
    source = directory
    if how == "copy of links":  # the layout of Hugging Face's cache
        source = tmp_path / "links"
        source.mkdir()
        for file in directory.iterdir():
            (source / file.name).symlink_to(file)
    if served:
        store.add(source, "m", link=how == "link")
        assert store.verify("m").ok and engine_serves(store.path("m"))
        return
    with pytest.raises(StoreError, match=r"the engine cannot serve this model: |index\.json"):
        store.add(source, "m", link=how == "link")
    assert store.list() == []


def test_links_out_of_the_directory_are_copied_not_linked(tmp_path: Path) -> None:
    directory = make_hf_dir(tmp_path / "real")
    (directory / WEIGHTS).rename(tmp_path / "blob")
    (directory / WEIGHTS).symlink_to(tmp_path / "blob")
    store = ModelStore(tmp_path / "store")
    assert engine_serves(directory) is False
    with pytest.raises(StoreError, match="is a link out of the model's directory"):
        store.add(directory, "m", link=True)
    store.add(directory, "m")
    assert engine_serves(store.path("m"))


def test_damage_behind_links_is_found_before_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A download cut short in a cache of gigabytes: nothing may be copied first."""
    directory = make_hf_dir(tmp_path / "real", shards=2)
    os.truncate(directory / SHARD, (directory / SHARD).stat().st_size - 1)
    links = tmp_path / "links"
    links.mkdir()
    for file in directory.iterdir():
        (links / file.name).symlink_to(file)
    monkeypatch.setattr("appliance.models.build_from_directory", None)  # calling it would be a TypeError
    with pytest.raises(StoreError, match=rf"{SHARD}.*truncated"):
        ModelStore(tmp_path / "store").add(links, "m")


def raw_file(header_text: bytes, data: int = 16) -> bytes:
    return struct.pack("<Q", len(header_text)) + header_text + bytes(data)


DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "too few"),
    "seven bytes": (bytes(7), "too few"),
    "header length": (struct.pack("<Q", 2**63) + bytes(99), "not a safetensors file"),
    "header length past the end": (struct.pack("<Q", 100) + bytes(99), "only 99 bytes follow"),
    "no JSON": (raw_file(b"{"), "not valid JSON"),
    "not UTF-8": (raw_file(b'{"\xff": 1}'), "not UTF-8"),
    "a list": (raw_file(b"[1]"), "does not start with"),
    "deep": (raw_file(b'{"a":' + b"[" * 200_000), "too deeply|not valid JSON"),
    "huge number": (raw_file(b'{"a": ' + b"9" * 5000 + b"}"), "not acceptable JSON"),
    "duplicate": (raw_file(b'{"a": 1, "a": 1}'), "'a' appears twice"),
    "entry": (raw_file(b'{"a": 3}'), "tensor 'a'"),
    "overlap": (
        raw_file(
            b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},'
            b'"b":{"dtype":"F32","shape":[4],"data_offsets":[8,24]}}', 24
        ),
        "tensor 'b' overlaps",
    ),
}  # fmt: skip


@pytest.mark.parametrize("raw, message", DAMAGED.values(), ids=DAMAGED.keys())
@pytest.mark.parametrize("linked", [False, True])
def test_damaged_weights_are_refused_by_file(tmp_path: Path, raw: bytes, message: str, linked: bool) -> None:
    directory = make_hf_dir(tmp_path / "real")
    (directory / WEIGHTS).write_bytes(raw)
    if linked:
        (tmp_path / "text").write_text("x")
        (directory / "LICENSE").symlink_to(tmp_path / "text")  # any link: inspect_links instead of inspect
    with pytest.raises(StoreError, match=message) as caught:
        ModelStore(tmp_path / "store").add(directory)
    assert f"{directory / WEIGHTS}" in caught.value.message


@pytest.mark.parametrize(
    "matrices, norms, shown",
    [("BF16", "F32", "bfloat16"), ("F16", "F32", "float16"), ("F32", "BF16", "float32")],
)
def test_list_shows_the_dtype_of_the_matrices(tmp_path: Path, matrices: str, norms: str, shown: str) -> None:
    directory = make_hf_dir(tmp_path / "real")
    save_as(directory, matrices, norms)
    manifest = ModelStore(tmp_path / "store").add(directory)
    assert manifest.dtype == shown
    assert manifest.parameters == sum(value.size for value in hf_tensors().values())
