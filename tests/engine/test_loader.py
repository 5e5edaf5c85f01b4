"""Whole loads: every family, dtype and sharding against plain concatenation; and every way they can go wrong."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import FAMILIES, random_tensors, tiny_config, with_header, write_file, write_model
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from engine import loader
from engine.checkpoint import Checkpoint
from engine.config import ModelConfig
from engine.errors import CheckpointError, ConfigError
from engine.host_memory import available_bytes
from engine.load_plan import CHUNK_BYTES
from engine.loader import checkpoint_summary, load_weights, plan_load
from engine.types import Weights

FULL = os.environ.get("APPLIANCE_FULL") == "1"


def load(folder, **kwargs) -> Weights:
    return load_weights(folder, ModelConfig.from_dir(folder), **kwargs)


def values(weights: Weights, name: str) -> np.ndarray:
    array = weights.tensors[name]
    return (array.astype(np.uint32) << 16).view(np.float32) if array.dtype == np.uint16 else array


def expected(config: dict, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The canonical tensors of engine.types.Weights, put together with numpy."""
    result = {"embed": tensors["model.embed_tokens.weight"], "final_norm": tensors["model.norm.weight"]}
    result["lm_head"] = tensors["model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"]
    for i in range(config["num_hidden_layers"]):
        hub = {
            n.removeprefix(f"model.layers.{i}."): t for n, t in tensors.items() if n.startswith(f"model.layers.{i}.")
        }
        layer = {
            "attn_norm": hub["input_layernorm.weight"],
            "mlp_norm": hub["post_attention_layernorm.weight"],
            "qkv": np.concatenate([hub[f"self_attn.{x}_proj.weight"] for x in "qkv"]),
            "o": hub["self_attn.o_proj.weight"],
            "gate_up": np.concatenate([hub["mlp.gate_proj.weight"], hub["mlp.up_proj.weight"]]),
            "down": hub["mlp.down_proj.weight"],
        }
        if "self_attn.q_proj.bias" in hub:
            layer["qkv_bias"] = np.concatenate([hub[f"self_attn.{x}_proj.bias"] for x in "qkv"])
        if "self_attn.q_norm.weight" in hub:
            layer |= {"q_norm": hub["self_attn.q_norm.weight"], "k_norm": hub["self_attn.k_norm.weight"]}
        result |= {f"layers.{i}.{name}": array for name, array in layer.items()}
    return result


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_and_dtype(tmp_path, family, dtype, shards):
    config = tiny_config(family)
    tensors = random_tensors(config)
    write_model(tmp_path, config, tensors, dtype=dtype, shards=shards)
    wanted = expected(config, tensors)
    for choice in ("auto", "float32", "bfloat16"):
        weights = load(tmp_path, dtype=choice)
        assert weights.dtype == ({"bfloat16": "bfloat16"}.get(dtype, "float32") if choice == "auto" else choice)
        assert weights.tensors.keys() == wanted.keys()
        for name, array in wanted.items():
            got = weights.tensors[name]
            matrix = array.ndim == 2
            assert got.dtype == (np.uint16 if matrix and weights.dtype == "bfloat16" else np.float32)
            assert got.ctypes.data % 64 == 0
            assert got.flags.c_contiguous
            assert not got.flags.writeable
            np.testing.assert_array_equal(values(weights, name), array, err_msg=name)
        if config.get("tie_word_embeddings"):
            assert weights.tensors["lm_head"] is weights.tensors["embed"]


def test_auto_keeps_a_mixed_checkpoint_exact(tmp_path):
    config = tiny_config()
    tensors = random_tensors(config)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = 1 + 2**-20  # not a bfloat16
    write_model(tmp_path, config, tensors, dtype={n: "float32" if "up_proj" in n else "bfloat16" for n in tensors})
    weights = load(tmp_path)
    assert weights.dtype == "float32"
    assert weights.tensors["layers.1.gate_up"][40, 0] == np.float32(1 + 2**-20)


def test_float32_norms_do_not_make_a_bfloat16_checkpoint_float32(tmp_path):
    config = tiny_config()
    tensors = random_tensors(config)
    dtypes = {name: "float32" if t.ndim == 1 else "bfloat16" for name, t in tensors.items()}
    write_model(tmp_path, config, tensors, dtype=dtypes)
    assert load(tmp_path).dtype == "bfloat16"


def test_threads_and_chunks_do_not_change_a_bit(tmp_path, monkeypatch):
    config = tiny_config("qwen2")
    write_model(tmp_path, config, random_tensors(config), dtype="float16", shards=2)
    first = load(tmp_path, num_threads=1)
    monkeypatch.setattr("engine.load_plan.CHUNK_BYTES", 60)  # 15 elements: rows are cut anywhere
    for threads in (1, 2, 5):
        again = load(tmp_path, num_threads=threads)
        assert again.checksum == first.checksum
        for name, array in first.tensors.items():
            np.testing.assert_array_equal(again.tensors[name], array)


def test_checksum_is_the_documented_one(monkeypatch):
    data = bytes(range(256)) * 3
    monkeypatch.setattr(loader, "HASH_BLOCK_BYTES", 500)
    digests = hashlib.sha256(data[:500]).digest() + hashlib.sha256(data[500:]).digest()
    assert loader.arena_checksum(memoryview(data), num_threads=2) == hashlib.sha256(digests).hexdigest()


def test_checksum_sees_one_bit(tmp_path):
    config = tiny_config()
    tensors = random_tensors(config)
    write_model(tmp_path / "a", config, tensors)
    tensors["model.layers.0.self_attn.k_proj.weight"][3, 7] += 2**-6
    write_model(tmp_path / "b", config, tensors)
    assert load(tmp_path / "a").checksum != load(tmp_path / "b").checksum


def test_progress_goes_up_to_the_total_in_the_callers_thread(tmp_path):
    config = tiny_config()
    write_model(tmp_path, config, random_tensors(config))
    calls: list[tuple[int, int]] = []
    caller = threading.get_ident()

    def progress(done, total):
        assert threading.get_ident() == caller
        calls.append((done, total))

    load(tmp_path, progress=progress)
    size = sum(t.nbytes for t in random_tensors(config).values())
    assert calls[-1] == (size, size)
    assert calls == sorted(calls)


def test_progress_of_the_checksum_follows_and_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "HASH_BLOCK_BYTES", 1 << 14)
    config = tiny_config()
    write_model(tmp_path, config, random_tensors(config))
    calls: list[tuple[str, int, int]] = []
    weights = load(
        tmp_path,
        progress=lambda done, total: calls.append(("read", done, total)),
        checksum_progress=lambda done, total: calls.append(("hashed", done, total)),
    )
    hashed = [call for call in calls if call[0] == "hashed"]
    assert calls[-len(hashed) :] == hashed and len(hashed) == 3
    assert hashed == sorted(hashed) and hashed[-1][1:] == (weights.arena_bytes, weights.arena_bytes)
    assert weights.checksum == load(tmp_path).checksum


def test_an_exception_of_progress_stops_the_load(tmp_path):
    config = tiny_config()
    write_model(tmp_path, config, random_tensors(config))

    def progress(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(tmp_path, progress=progress)
    assert not [t for t in threading.enumerate() if t.name.startswith("load")]


# ---- what must be refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_any_missing_tensor_is_named(tmp_path, family):
    config = tiny_config(family)
    tensors = random_tensors(config)
    for name in tensors:
        write_model(tmp_path, config, {n: t for n, t in tensors.items() if n != name})
        with pytest.raises(CheckpointError, match=rf"lacks tensor '{name}'"):
            load(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_any_wrong_shape_is_named(tmp_path, family):
    config = tiny_config(family)
    for name, tensor in random_tensors(config).items():
        tensors = random_tensors(config)
        tensors[name] = tensor[:-1] if tensor.ndim == 1 else np.ascontiguousarray(tensor.T)
        if tensors[name].shape == tensor.shape:
            tensors[name] = tensor[:-1]
        write_model(tmp_path, config, tensors)
        with pytest.raises(CheckpointError, match=f"{re.escape(str(tmp_path))}.*: tensor {name} has shape"):
            load(tmp_path)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "model.layers.0.self_attn.q_proj.bias"),  # Qwen2 weights under a Llama config, and so on
        ("llama", "model.layers.0.self_attn.o_proj.bias"),
        ("qwen2", "model.layers.1.self_attn.o_proj.bias"),
        ("mistral", "model.layers.0.self_attn.q_norm.weight"),
        ("llama", "model.layers.2.input_layernorm.weight"),  # one layer more than the config says
        ("llama", "model.layers.0.mlp.experts.0.up_proj.weight"),
        ("llama", "model.layers.0.self_attn.q_proj.weight_scale"),
        ("llama", "model.rotary_emb.inv_freq.x"),
        ("llama", "lm_head.bias"),
        ("qwen3", "evil\x1b[31m\u202ename\n"),  # what would steer a terminal is escaped
    ],
)
def test_any_extra_tensor_is_named(tmp_path, family, name):
    config = tiny_config(family)
    write_model(tmp_path, config, random_tensors(config))
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    header[name] = {"dtype": "F32", "shape": [1], "data_offsets": [len(body), len(body) + 4]}
    path.write_bytes(with_header(header, body + b"\0" * 4))
    with pytest.raises(CheckpointError, match="holds unknown tensor") as caught:
        load(tmp_path)
    assert ascii(name) in str(caught.value)
    str(caught.value).encode()  # printable


def test_a_name_that_is_no_text_is_refused_as_the_library_does(tmp_path):
    config = tiny_config()
    write_model(tmp_path, config, random_tensors(config))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"model.norm.weight"', b'"\\ud800l.norm.weight"'))  # the same length
    with pytest.raises(SafetensorError):
        safe_open(path, "numpy")
    with pytest.raises(CheckpointError, match="half a surrogate pair") as caught:
        load(tmp_path)
    str(caught.value).encode()  # printable


def test_old_rotary_buffers_are_ignored(tmp_path):
    config = tiny_config()
    tensors = random_tensors(config)
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32) for i in range(2)}
    write_model(tmp_path, config, tensors | buffers)
    np.testing.assert_array_equal(load(tmp_path).tensors["embed"], tensors["model.embed_tokens.weight"])


def test_head_of_a_tied_model(tmp_path):
    config = tiny_config("llama-tied")
    tensors = random_tensors(config)
    embed = tensors["model.embed_tokens.weight"]
    write_model(tmp_path, config, tensors | {"lm_head.weight": embed})
    assert load(tmp_path).notes == ()
    write_model(tmp_path, config, tensors | {"lm_head.weight": embed + 1}, shards=2)
    (tmp_path / "model.safetensors").unlink()
    weights = load(tmp_path)
    assert "lm_head.weight differs" in weights.notes[0]
    np.testing.assert_array_equal(weights.tensors["lm_head"], embed)


def test_missing_head_of_an_untied_model_tells_what_to_do(tmp_path):
    config = tiny_config()
    write_model(tmp_path, config, {n: t for n, t in random_tensors(config).items() if n != "lm_head.weight"})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight") as caught:
        load(tmp_path)
    assert "tie_word_embeddings" in (caught.value.hint or "")


@pytest.mark.parametrize("dtype", ["float64", "int8", "uint8", "float8_e4m3fn"])
def test_other_dtypes_are_refused_by_name(tmp_path, dtype):
    config = tiny_config()
    tensors = random_tensors(config)
    name = "model.layers.0.mlp.down_proj.weight"
    write_model(tmp_path, config, tensors, dtype=dict.fromkeys(tensors, "float32") | {name: dtype})
    with pytest.raises(CheckpointError, match=rf"{name} has dtype (F64|I8|U8|F8_E4M3)"):
        load(tmp_path)


def test_value_too_large_for_bfloat16_is_named(tmp_path):
    config = tiny_config()
    tensors = random_tensors(config)
    tensors["model.layers.1.mlp.down_proj.weight"][5, 5] = np.finfo(np.float32).max
    write_model(tmp_path, config, tensors)
    assert load(tmp_path).dtype == "float32"
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.down_proj\.weight .* too large for bfloat16"):
        load(tmp_path, dtype="bfloat16")


def test_nothing_is_allocated_for_a_config_the_checkpoint_does_not_fit(tmp_path, monkeypatch):
    config = tiny_config(vocab_size=4_000_000, hidden_size=3 * 40_000, head_dim=8)  # an embedding of 1.9 TB
    write_model(tmp_path, config, random_tensors(tiny_config()))
    monkeypatch.setattr(loader, "HostArena", None)  # calling it would be a TypeError
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight has shape \[50, 24\]"):
        load(tmp_path)


def test_file_changed_while_it_is_loaded(tmp_path):
    config = tiny_config()
    write_model(tmp_path, config, random_tensors(config))

    def progress(done, total):
        with (tmp_path / "model.safetensors").open("ab") as file:
            file.write(b"x")

    with pytest.raises(CheckpointError, match="changed while it was read"):
        load(tmp_path, progress=progress)


def test_a_model_that_does_not_fit_memory_is_refused_with_both_numbers(tmp_path, monkeypatch):
    config = tiny_config()
    write_model(tmp_path, config, random_tensors(config))
    monkeypatch.setattr(loader, "available_bytes", lambda: 1000)
    need = checkpoint_summary(tmp_path).arena_bytes
    with pytest.raises(ConfigError, match=rf"need {need} bytes of memory, 1000 are available"):
        load(tmp_path)


def fake_host(root: Path, available_kb: int, groups: dict[str, tuple[str, int, int]]) -> tuple[Path, Path]:
    """/proc and /sys/fs/cgroup with groups of (memory.max, memory.current, page cache)."""
    proc, cgroups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable:   {available_kb} kB\n")
    (proc / "self/cgroup").write_text(f"1:name=systemd:/x\n0::/{list(groups)[-1] if groups else ''}\n")
    for name, (limit, current, cache) in groups.items():
        (cgroups / name).mkdir(parents=True)
        (cgroups / name / "memory.max").write_text(limit + "\n")
        (cgroups / name / "memory.current").write_text(f"{current}\n")
        (cgroups / name / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\nactive_file 0\n")
    return proc, cgroups


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ({}, 8192 * 1024),
        ({"a.slice": ("max", 5, 0), "a.slice/b.scope": ("max", 5, 0)}, 8192 * 1024),
        ({"a.slice": ("max", 5, 0), "a.slice/b.scope": ("5000000", 1_000_000, 250_000)}, 4_250_000),
        ({"a.slice": ("3000000", 2_000_000, 0), "a.slice/b.scope": ("5000000", 0, 0)}, 1_000_000),
        ({"a.slice": ("1000", 2_000, 0)}, 0),
        ({"a.slice": ("9999999999999", 0, 0)}, 8192 * 1024),
    ],
)
def test_available_memory_is_the_least_of_machine_and_cgroups(tmp_path, groups, expected):
    assert available_bytes(*fake_host(tmp_path, 8192, groups)) == expected


def test_available_memory_of_this_machine_and_of_none(tmp_path):
    here = available_bytes()
    assert here is not None
    assert 0 < here <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert available_bytes(tmp_path, tmp_path) is None


class ShrinkingDestination:
    """Cuts the file short after the first chunk, as a second download into the same place does."""

    def __init__(self, arena, path):
        self.arena, self.path = arena, path

    def reserve(self, offset, nbytes):
        return self.arena.reserve(offset, nbytes)

    def commit(self, offset, buffer):
        os.truncate(self.path, 4096)


@pytest.mark.parametrize("threads", [1, 2])
def test_file_cut_short_while_it_is_loaded(tmp_path, threads):
    config = tiny_config()
    write_model(tmp_path, config, random_tensors(config), dtype="bfloat16")
    with Checkpoint.open(tmp_path) as checkpoint:
        plan = plan_load(checkpoint, ModelConfig.from_dir(tmp_path))
        destination = ShrinkingDestination(loader.HostArena(plan.arena_bytes), tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match="ended at byte"):
            loader.execute_plan(checkpoint, plan, destination, num_threads=threads)


class RingDestination:
    """A device as the loader will see one: few staging buffers, an asynchronous copy out of them."""

    def __init__(self, nbytes, buffers):
        self.device = bytearray(nbytes)
        self.free = [memoryview(bytearray(CHUNK_BYTES)) for _ in range(buffers)]
        self.owner = {}
        self.ready = threading.Condition()

    def reserve(self, offset, nbytes):
        with self.ready:
            assert self.ready.wait_for(lambda: self.free, timeout=20)
            buffer = self.free.pop()
            self.owner[offset] = buffer
        return buffer[:nbytes]

    def commit(self, offset, buffer):
        self.device[offset : offset + len(buffer)] = buffer
        with self.ready:
            whole = self.owner.pop(offset)
            whole[:] = b"\xee" * CHUNK_BYTES  # the buffer may not be used after commit
            self.free.append(whole)
            self.ready.notify()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_same_plan_fills_a_device_through_a_ring(tmp_path, dtype, monkeypatch):
    monkeypatch.setattr("engine.load_plan.CHUNK_BYTES", 256)
    config = tiny_config("qwen3")
    write_model(tmp_path, config, random_tensors(config), dtype=dtype, shards=2)
    with Checkpoint.open(tmp_path) as checkpoint:
        plan = plan_load(checkpoint, ModelConfig.from_dir(tmp_path))
        arena, ring = loader.HostArena(plan.arena_bytes), RingDestination(plan.arena_bytes, 2)
        loader.execute_plan(checkpoint, plan, arena, num_threads=3)
        loader.execute_plan(checkpoint, plan, ring, num_threads=3)
    assert bytes(arena.buffer) == bytes(ring.device)


def test_failing_destination_ends_the_load(tmp_path):
    class Failing(loader.HostArena):
        def commit(self, offset, buffer):
            raise RuntimeError("device lost")

    config = tiny_config()
    write_model(tmp_path, config, random_tensors(config))
    with Checkpoint.open(tmp_path) as checkpoint:
        plan = plan_load(checkpoint, ModelConfig.from_dir(tmp_path))
        with pytest.raises(RuntimeError, match="device lost"):
            loader.execute_plan(checkpoint, plan, Failing(plan.arena_bytes), num_threads=2)


@settings(max_examples=2000 if FULL else 60, deadline=None)
@given(st.sampled_from(list(FAMILIES)), st.integers(1, 60), st.sampled_from(["float32", "bfloat16"]), st.data())
def test_a_plan_writes_every_byte_of_every_parameter_once(tmp_path_factory, family, chunk, dtype, data):
    shards = data.draw(st.integers(1, 3))
    folder = tmp_path_factory.getbasetemp() / f"plan-{family}-{shards}"
    config = tiny_config(family)
    if not folder.exists():
        write_model(folder, config, random_tensors(config), dtype="float16", shards=shards)
    with pytest.MonkeyPatch.context() as patch, Checkpoint.open(folder) as checkpoint:
        patch.setattr("engine.load_plan.CHUNK_BYTES", chunk * 4)
        plan = plan_load(checkpoint, ModelConfig.from_json(config), dtype)
    written = np.zeros(plan.arena_bytes, np.uint8)
    for op in plan.ops:
        assert op.nbytes <= chunk * 4
        written[op.offset : op.offset + op.nbytes] += 1
    expected_bytes = np.zeros_like(written)
    for slot in plan.slots.values():
        assert slot.offset % 64 == 0
        size = int(np.prod(slot.shape)) * (4 if slot.dtype == "F32" else 2)
        expected_bytes[slot.offset : slot.offset + size] += 1
    np.testing.assert_array_equal(written, expected_bytes)
    assert expected_bytes.max() == 1


# ---- summary and memory ---------------------------------------------------------------------------------------------


def test_summary_reads_headers_only(tmp_path):
    config = tiny_config("llama-tied")
    tensors = random_tensors(config)
    write_model(tmp_path, config, tensors, dtype="bfloat16", shards=2)
    summary = checkpoint_summary(tmp_path)
    assert summary == checkpoint_summary(tmp_path, ModelConfig.from_dir(tmp_path))
    assert summary.num_parameters == sum(t.size for t in tensors.values())
    assert summary.num_tensors == len(tensors)
    assert summary.source_dtypes == {"BF16": len(tensors)}
    assert summary.dtype == "bfloat16"
    assert summary.file_names == ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    assert summary.file_bytes == sum(f.stat().st_size for f in tmp_path.glob("*.safetensors"))
    assert summary.arena_bytes == load(tmp_path).arena_bytes


MEASURE = """
import sys
from pathlib import Path
from engine.config import ModelConfig
from engine.loader import load_weights

def status(key):
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) * 1024

config = ModelConfig.from_dir(sys.argv[1])
before = status("VmRSS")
weights = load_weights(sys.argv[1], config, dtype=sys.argv[2], num_threads=2)
print(status("VmHWM") - before, weights.arena_bytes)
"""


@pytest.mark.parametrize(("dtype", "loaded"), [("float16", "float32"), ("bfloat16", "auto"), ("float32", "bfloat16")])
def test_peak_of_host_memory(tmp_path, dtype, loaded):
    """Promised: less than 1 GB over the weights. Asked here: 64 MB, for 100 MB of parameters in 2 or 4 bytes."""
    config = tiny_config("llama-tied", vocab_size=200_000, hidden_size=192, head_dim=8)
    write_model(tmp_path, config, random_tensors(config), dtype=dtype)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path), loaded],
        capture_output=True, text=True, check=True, timeout=120, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    peak, arena = map(int, done.stdout.split())
    assert arena > 75_000_000
    assert peak < arena + (64 << 20)
    assert peak > arena // 2  # the measurement sees the arena at all


def test_arena_is_freed_with_its_last_view(tmp_path):
    config = tiny_config("llama-tied", vocab_size=60_000, hidden_size=192, head_dim=8)
    tensors = random_tensors(config)
    write_model(tmp_path, config, tensors)

    def rss() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    weights = load(tmp_path)
    embed, held = weights.tensors["embed"], rss()
    del weights
    assert float(embed[123, 45]) == float(tensors["model.embed_tokens.weight"][123, 45])
    del embed
    assert rss() < held - 40_000_000


def test_file_written_beside_the_checkpoint_is_not_read(tmp_path):
    config = tiny_config()
    tensors = random_tensors(config)
    write_model(tmp_path, config, tensors)
    write_file(tmp_path / "consolidated.safetensors", {"model.embed_tokens.weight": np.zeros((50, 24), np.float32)})
    np.testing.assert_array_equal(load(tmp_path).tensors["embed"], tensors["model.embed_tokens.weight"])
