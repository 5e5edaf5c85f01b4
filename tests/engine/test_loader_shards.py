"""The index as an allow-list: one file for each tensor, and no file outside the directory."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from checkpoint_files import random_tensors, tiny_config, write_file, write_index, write_model

from engine.checkpoint import Checkpoint
from engine.config import ModelConfig
from engine.errors import CheckpointError
from engine.loader import checkpoint_summary, load_weights

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    config = tiny_config()
    write_model(folder, config, random_tensors(config), shards=2)
    return folder


def weight_map(folder) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]


def load(folder):
    return load_weights(folder, ModelConfig.from_dir(folder))


def refused(folder, says: str) -> CheckpointError:
    with pytest.raises(CheckpointError, match=says) as caught:
        load(folder)
    with pytest.raises(CheckpointError, match=says):
        checkpoint_summary(folder, ModelConfig.from_dir(folder))
    return caught.value


def rewrite(folder, shard: str, **changes) -> None:
    """Write a shard again with some tensors changed (None: left out)."""
    tensors = random_tensors(tiny_config())
    names = [name for name, file in weight_map(folder).items() if file == shard]
    parts = {name: tensors[name] for name in names} | changes
    write_file(folder / shard, {name: array for name, array in parts.items() if array is not None})


def test_stale_duplicates_in_another_shard_are_not_used(model):
    """vllm-project/vllm#54230: a reused shard holds old tensors that the index places elsewhere."""
    tensors = random_tensors(tiny_config())
    stale = [name for name, file in weight_map(model).items() if file == FIRST][:3]
    rewrite(model, SECOND, **{name: tensors[name] + 99 for name in stale})
    weights = load(model)
    assert f"{SECOND}: 3 tensors ignored" in weights.notes[0]
    assert weights.checksum == load_weights(model, ModelConfig.from_dir(model), num_threads=1).checksum
    assert float(np.abs(weights.tensors["embed"]).max()) <= 2
    np.testing.assert_array_equal(weights.tensors["embed"], tensors["model.embed_tokens.weight"])


def test_tensor_that_the_index_does_not_list(model):
    rewrite(model, SECOND, **{"model.layers.7.new": np.ones(3, np.float32)})
    refused(model, rf"{SECOND} holds tensor 'model\.layers\.7\.new', which .* does not list")


def test_tensor_that_its_shard_does_not_hold(model):
    name = next(name for name, file in weight_map(model).items() if file == SECOND)
    rewrite(model, SECOND, **{name: None})
    refused(model, rf"places tensor '{name}' in {SECOND}, which does not hold it")


def test_missing_shard(model):
    (model / SECOND).unlink()
    refused(model, f"{SECOND} is missing")


def test_damaged_shard(model):
    os.truncate(model / SECOND, 100)
    refused(model, f"{SECOND}.*header length")


@pytest.mark.parametrize(
    "name",
    ["../other/model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", "", ".", FIRST + "\0", "config.json",
     "../model/" + FIRST, 7, None, [FIRST], "\ud800.safetensors"],
)  # fmt: skip
def test_shard_names_that_are_not_plain_file_names(model, name):
    places = weight_map(model)
    places["model.norm.weight"] = name
    write_index(model, places)
    assert "model.norm.weight" in str(refused(model, "a shard must be a plain file name"))


@pytest.mark.parametrize("sharded", [True, False])
def test_link_out_of_the_directory(tmp_path, sharded):
    outside, folder = tmp_path / "outside", tmp_path / "model"
    config = tiny_config()
    write_model(outside, config, random_tensors(config), shards=2 if sharded else 1)
    write_model(folder, config, random_tensors(config), shards=2 if sharded else 1)
    name = SECOND if sharded else "model.safetensors"
    (folder / name).unlink()
    (folder / name).symlink_to(outside / name)
    assert "appliance model add" in (refused(folder, "link out of the model's directory").hint or "")
    (folder / name).unlink()
    (folder / name).symlink_to(name)
    with pytest.raises(CheckpointError):  # a link to itself
        load(folder)


def test_links_inside_the_directory_and_to_it_are_fine(model, tmp_path):
    (model / SECOND).rename(model / "blob.safetensors")
    (model / SECOND).symlink_to("blob.safetensors")
    (tmp_path / "alias").symlink_to(model)
    assert load(tmp_path / "alias").checksum == load(model).checksum


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"weight_map": {"a": "b.safetensors"', "not valid JSON"),
        ("", "not valid JSON"),
        ("[]", "JSON object"),
        ("{}", "weight_map must map"),
        ('{"weight_map": {}}', "weight_map must map"),
        ('{"weight_map": ["a"]}', "weight_map must map"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "'a' appears twice"),
        ('{"weight_map": {"a": "x.safetensors"}}', "x.safetensors is missing"),
    ],
)
def test_damaged_index(model, text, says):
    (model / INDEX).write_text(text)
    refused(model, rf"index\.json.*{says}")


def test_every_truncation_of_the_index_is_an_error(model):
    """vllm-ascend#19: an index cut short by a full disk."""
    whole = (model / INDEX).read_bytes()
    for length in range(0, len(whole), 7):
        (model / INDEX).write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"index\.json is not valid JSON"):
            Checkpoint.open(model)


def test_too_many_shards(model):
    write_index(model, {f"t{i}": f"s{i}.safetensors" for i in range(1000)})
    refused(model, "more than 512 shards")


def test_two_checkpoints_in_one_directory(model):
    write_file(model / "model.safetensors", random_tensors(tiny_config(), seed=5))
    assert "Remove" in (refused(model, "holds both").hint or "")


def test_only_files_of_the_index_are_opened(model):
    before = load(model).checksum
    for name in ("consolidated.safetensors", "model-00003-of-00003.safetensors", "adapter_model.safetensors"):
        (model / name).write_bytes(b"not a checkpoint at all")
    assert load(model).checksum == before


def test_no_checkpoint(model):
    for file in model.glob("model*"):
        file.unlink()
    (model / "pytorch_model.bin").write_bytes(b"")
    (model / "consolidated.safetensors").write_bytes(b"")
    refused(model, r"neither model\.safetensors nor model\.safetensors\.index\.json")


def test_descriptors_are_closed(model):
    before = len(os.listdir("/proc/self/fd"))
    load(model)
    (model / SECOND).write_bytes(b"")
    for _ in range(5):
        with pytest.raises(CheckpointError):
            load(model)
    assert len(os.listdir("/proc/self/fd")) == before
