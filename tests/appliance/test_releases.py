"""Releases on disk: complete or absent, never changing, everything in them covered by a digest."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from release_helpers import add, paths_fixture, store_fixture  # noqa: F401  # fixtures
from store_helpers import run_and_die

from appliance import __version__, release_build
from appliance.fsutil import locked
from appliance.log import ApplianceError, BusyError, UsageError
from appliance.models import ModelStore
from appliance.paths import Paths
from appliance.releases import ReleaseError, ReleaseOptions, ReleaseRefused, ReleaseStore, parse_options
from appliance.slots import set_slot
from appliance.statefile import StateError
from tests.tiny import make_tiny_model


def replace_model(paths: Paths, seed: int) -> None:
    shutil.rmtree(paths.etc.parents[1] / "source")
    source = make_tiny_model(paths.etc.parents[1] / "source", seed=seed)
    ModelStore(paths.models).add(source, "tiny", replace=True)


def test_what_a_release_says(store: ReleaseStore, paths: Paths) -> None:
    options = ReleaseOptions(max_model_len=512, arguments=["--no-prefix-cache"])
    add(store, model_name="chat", options=options, note="first")
    release = store.get("v1")
    assert (release.name, release.model_name, release.model, release.note) == ("v1", "chat", "tiny", "first")
    assert (release.engine_version, release.python) == (__version__, sys.executable)
    assert release.options == options and release.options.max_batch_seqs is None
    files = list(release.model_dir(paths).iterdir())
    assert release.model_bytes == sum(file.stat().st_size for file in files)
    assert {file.name for file in files} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert release.family == "llama" and release.dtype == "float32" and not release.linked


def test_the_manifest_covers_everything(store: ReleaseStore, paths: Paths) -> None:
    """Every regular file but the manifest itself, with the digest that hashlib computes."""
    add(store)
    directory = paths.release("v1")
    manifest = json.loads((directory / "manifest.json").read_text())
    files = {str(path.relative_to(directory)): path for path in directory.rglob("*") if path.is_file()}
    del files["manifest.json"]
    assert manifest["files"].keys() == files.keys()
    for name, path in files.items():
        assert manifest["files"][name]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    result = store.verify("v1")
    assert result.ok and result.files_checked == len(files)


def test_other_users_can_read_it_whatever_the_umask(store: ReleaseStore, paths: Paths) -> None:
    old = os.umask(0o077)
    try:
        add(store)
    finally:
        os.umask(old)
    for path in [paths.releases, paths.release("v1"), *paths.release("v1").rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o755 if path.is_dir() else 0o444), path


def test_it_shares_nothing_that_an_edit_of_the_model_would_change(store: ReleaseStore, paths: Paths) -> None:
    add(store)
    config = paths.models / "tiny" / "config.json"
    config.chmod(0o644)
    with config.open("r+") as file:
        file.write(" ")
    assert store.verify("v1").ok


def _append(path: Path) -> None:
    path.chmod(0o644)
    with path.open("ab") as file:
        file.write(b" ")


def _flip(path: Path) -> None:
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [_append, _flip, Path.unlink])
@pytest.mark.parametrize("file", ["model/model.safetensors", "model/config.json", "release.json"])
def test_every_harm_is_found(store: ReleaseStore, paths: Paths, harm: Callable[[Path], None], file: str) -> None:
    add(store)
    harm(paths.release("v1") / file)
    try:
        result = store.verify("v1")
    except (ReleaseError, StateError):
        assert file == "release.json"  # it could not even be read
    else:
        assert list(result.problems) == [file]


@pytest.mark.parametrize("name", ["model/model-2.safetensors", "notes.txt", "golden/x.txt", "golden/cpu.json"])
def test_what_does_not_belong_is_found(store: ReleaseStore, paths: Paths, name: str) -> None:
    add(store)
    (paths.release("v1") / name).write_text("{}")
    assert list(store.verify("v1").problems) == [name]


def test_a_manifest_cannot_point_outside(store: ReleaseStore, paths: Paths) -> None:
    add(store)
    manifest = paths.release("v1") / "manifest.json"
    value = json.loads(manifest.read_text())
    for name in ("../v2/release.json", "/etc/passwd", "model/../x", "golden/cpu.json", "model/.hidden"):
        manifest.chmod(0o644)
        manifest.write_text(json.dumps({"schema": 1, "files": value["files"] | {name: value["files"]["release.json"]}}))
        with pytest.raises(ReleaseError, match="is invalid"):
            store.verify("v1")


def test_the_same_again_changes_nothing_and_another_is_refused(store: ReleaseStore, paths: Paths) -> None:
    models = ModelStore(paths.models)
    first = add(store)
    before = paths.release("v1").stat().st_mtime_ns
    from release_helpers import CPU_CONFIG

    assert store.add("v1", models, "tiny", CPU_CONFIG) == (first, False)
    assert paths.release("v1").stat().st_mtime_ns == before
    for changes, what in (
        ({"options": ReleaseOptions(max_model_len=64)}, "options"),
        ({"model_name": "other"}, "model name"),
        ({"link": True}, "link"),
    ):
        with pytest.raises(ReleaseRefused, match=what):
            store.add("v1", models, "tiny", CPU_CONFIG, **changes)  # type: ignore[arg-type]
    replace_model(paths, seed=1)
    with pytest.raises(ReleaseRefused, match="model files"):
        store.add("v1", models, "tiny", CPU_CONFIG)
    models.remove("tiny")
    assert store.add("v1", models, "tiny", CPU_CONFIG) == (first, False)  # its model is no longer needed


def test_a_damaged_model_makes_no_release(store: ReleaseStore, paths: Paths) -> None:
    _flip(paths.models / "tiny" / "model.safetensors")
    with pytest.raises(ReleaseRefused, match=r"damaged: model\.safetensors has SHA-256"):
        add(store)
    assert store.list() == [] and list((paths.releases / ".tmp").iterdir()) == []


def test_link(store: ReleaseStore, paths: Paths) -> None:
    """No copy; any change of the model is found by verify; remove leaves the model alone."""
    release = add(store, link=True)
    folder = release.model_dir(paths)
    assert release.linked and folder.is_symlink() and folder.resolve() == (paths.models / "tiny").resolve()
    assert store.verify("v1").ok
    (paths.models / "tiny" / "unrelated.txt").write_text("x")  # the engine would not read it
    assert store.verify("v1").ok
    replace_model(paths, seed=1)
    assert "model/model.safetensors" in store.verify("v1").problems
    store.remove("v1")
    assert ModelStore(paths.models).verify("tiny").ok


def test_link_to_a_linked_model(store: ReleaseStore, paths: Paths) -> None:
    source = paths.etc.parents[1] / "source"
    ModelStore(paths.models).add(source, "far", link=True)
    release = add(store, model="far", link=True)
    assert release.model_dir(paths).resolve() == source.resolve()
    ModelStore(paths.models).remove("far")
    assert not store.verify("v1").ok


def test_no_space_is_said_before_the_copy(store: ReleaseStore, paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(paths.models)
    monkeypatch.setattr(release_build.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    monkeypatch.setattr(release_build, "can_share", lambda *_: False)
    with pytest.raises(ReleaseRefused, match=r"needs 387 kB, but only 1\.0 kB"):
        add(store)
    monkeypatch.setattr(release_build, "can_share", lambda *_: True)  # a file system with shared extents
    add(store)


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pairs, message",
    [
        (["max_model_len"], "KEY=VALUE"),
        (["max_model_len=0"], "max_model_len: Expected `int` >= 2"),
        (["max_model_len=many"], "max_model_len: Expected `int"),
        (["max_batch_seqs=257"], "max_batch_seqs"),
        (["max_model_len=9", "max_model_len=9"], "twice"),
        (["gpu_memory_fraction=0.5"], "no option of a release"),
        (["arguments=[]"], "no option of a release"),
    ],
)
def test_options_are_checked(pairs: list[str], message: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_options(pairs, [])
    assert message in error.value.message + (error.value.hint or "")


def test_options_that_are_fine() -> None:
    options = parse_options(["max-model-len=4096", "max_batch_seqs=32"], ["--threads", "2"])
    assert options == ReleaseOptions(max_model_len=4096, max_batch_seqs=32, arguments=["--threads", "2"])


@given(st.lists(st.text(max_size=40), max_size=3), st.lists(st.text(max_size=10), max_size=2))
def test_no_text_breaks_the_options(pairs: list[str], arguments: list[str]) -> None:
    try:
        options = parse_options(pairs, arguments)
    except UsageError as error:
        assert "--option" in error.message
    else:
        assert options.arguments == arguments


@pytest.mark.parametrize(
    "arguments", [["--host", "0.0.0.0"], ["--uds=/tmp/x"], ["--auth", "none"], ["--log-prompts"], ["--drain-t=1"],
                  ["--backend", "cuda"], ["--key-file", "x"], ["--model-dir", "/"]],
)  # fmt: skip
def test_the_hosts_options_are_not_a_releases(store: ReleaseStore, arguments: list[str]) -> None:
    with pytest.raises(ReleaseRefused, match="decided by the host"):
        add(store, options=ReleaseOptions(arguments=arguments))
    assert store.list() == []


@pytest.mark.parametrize(
    "options, message",
    [
        (ReleaseOptions(arguments=["--nonsense"]), "unrecognized arguments: --nonsense"),
        (ReleaseOptions(arguments=["--help"]), "prints a text and ends"),
        (ReleaseOptions(arguments=["--kv-tokens", "none"]), "'none' is not a number"),
        (ReleaseOptions(arguments=["--gpu-memory-fraction=0.5"]), "decided by the host"),
        (ReleaseOptions(arguments=["--no-cuda-graphs"]), "option of the cuda backend"),
        (ReleaseOptions(max_model_len=4096), "the model's context is 2048"),
    ],
)
def test_the_engine_is_asked(
    store: ReleaseStore, options: ReleaseOptions, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ApplianceError) as error:
        add(store, options=options)
    assert message in error.value.message
    assert store.list() == [] and capsys.readouterr() == ("", "")


# -- the life of the directory -----------------------------------------------------------------------------------------


def test_names(store: ReleaseStore) -> None:
    for name in ("", "V1", "../x", "a/b", ".tmp", "x" * 65, "a b", "-x"):
        for call in (lambda: add(store, name), lambda: store.get(name), lambda: store.remove(name)):  # noqa: B023
            with pytest.raises(UsageError, match="cannot name a release"):
                call()


def test_list_shows_what_is_broken(store: ReleaseStore, paths: Paths) -> None:
    assert store.list() == []
    add(store)
    set_slot(paths, "stable", "v1")
    (paths.releases / "empty").mkdir()
    shutil.copytree(paths.release("v1"), paths.release("copied"))
    (paths.releases / "newer").mkdir()
    (paths.releases / "newer" / "release.json").write_text('{"schema": 2}')
    (paths.releases / "torn").mkdir()
    (paths.releases / "torn" / "release.json").write_text('{"schema": 1, "name": "torn"}')
    found = {info.name: info for info in store.list()}
    assert found["v1"].problem is None and found["v1"].slots == ("stable",)
    assert "the release 'empty' is unusable" in str(found["empty"].problem)
    with pytest.raises(ReleaseError, match="the release 'empty' is unusable"):  # `show` says the same as `list`
        store.get("empty")
    assert "belongs to the release 'v1'" in str(found["copied"].problem)
    assert "schema 2" in str(found["newer"].problem)
    assert "missing required field" in str(found["torn"].problem)
    store.remove("torn")
    assert "torn" not in {info.name for info in store.list()}


def test_remove_is_refused_while_in_use(store: ReleaseStore, paths: Paths) -> None:
    add(store)
    for slot in ("stable", "canary"):
        set_slot(paths, slot, "v1")
        with pytest.raises(ReleaseRefused, match=f"slot {slot} points at") as error:
            store.remove("v1")
        assert error.value.exit_code == 4
        set_slot(paths, slot, None)
    state = paths.launcher_state(3)
    state.parent.mkdir(parents=True)
    engine = {"release": "v1", "state": "draining"}
    state.write_text(json.dumps({"schema": 1, "gpu": 3, "engines": [engine]}))
    with pytest.raises(ReleaseRefused, match="runs on GPU 3") as error:
        store.remove("v1")
    assert error.value.exit_code == 4 and store.verify("v1").ok
    state.write_text(json.dumps({"schema": 1, "gpu": 3, "engines": []}))
    store.remove("v1")
    with pytest.raises(ReleaseError, match="no release 'v1'"):
        store.get("v1")


def test_one_change_at_a_time(store: ReleaseStore, paths: Paths) -> None:
    add(store)
    with locked(paths.releases / ".lock", "x"):
        for call in (lambda: add(store, "v2"), lambda: store.remove("v1")):
            with pytest.raises(BusyError) as error:
                call()
            assert error.value.exit_code == 5
        assert store.get("v1").name == "v1" and store.verify("v1").ok  # reading needs no lock


def test_strangers_neither_lock_nor_see_a_change(
    store: ReleaseStore, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may open a file may flock it; and what is copied as root is not yet known to be a model."""
    seen = []
    check = release_build.check_engine_options

    def look(*args: Any) -> None:
        seen.append([path.stat().st_mode & 0o077 for path in (paths.releases / ".tmp", paths.releases / ".lock")])
        check(*args)

    monkeypatch.setattr(release_build, "check_engine_options", look)
    add(store)
    assert seen == [[0, 0]]
    assert paths.release("v1").stat().st_mode & 0o777 == 0o755


def test_the_engine_of_the_release_runs_it(store: ReleaseStore, paths: Paths) -> None:
    """The installed version it was made with comes first; if that is gone it is an error, never another version."""
    release = add(store)
    assert release.engine_python(paths) == Path(sys.executable)
    packaged = paths.lib / __version__ / "venv" / "bin" / "python"
    packaged.parent.mkdir(parents=True)
    packaged.touch(0o755)
    assert release.engine_python(paths) == packaged
    file = paths.release("v1") / "release.json"
    file.chmod(0o644)
    file.write_text(
        file.read_text().replace(sys.executable, "/nonexistent/python").replace(f'"{__version__}"', '"0.0"')
    )
    with pytest.raises(ReleaseError, match=r"engine of appliance 0\.0, which is not installed"):
        store.get("v1").engine_python(paths)


# -- SIGKILL at every step ---------------------------------------------------------------------------------------------

STRIDE = 1 if os.environ.get("APPLIANCE_FULL") else 4


@pytest.mark.parametrize("link", [False, True])
def test_killed_add(store: ReleaseStore, paths: Paths, link: bool) -> None:
    """Absent or whole; the same command again succeeds and clears up."""
    import engine.serve  # noqa: F401  # imported once here, not in every child

    deaths = 0
    for at in range(1, 600, STRIDE):
        finished = run_and_die(lambda _: add(store, link=link), paths.state, at)
        for info in store.list():
            assert (info.name, info.problem) == ("v1", None) and store.verify("v1").ok
        if finished:
            break
        deaths += 1
        add(store, link=link)
        assert store.verify("v1").ok and list((paths.releases / ".tmp").iterdir()) == []
        store.remove("v1")
    assert finished and deaths * STRIDE > 20


def test_killed_remove(store: ReleaseStore, paths: Paths) -> None:
    """Whole or absent; the next change of any release clears up."""
    deaths = 0
    for at in range(1, 300, STRIDE):
        add(store)
        finished = run_and_die(lambda _: store.remove("v1"), paths.state, at)
        for info in store.list():
            assert info.problem is None and store.verify("v1").ok
        with store.changing():
            assert list((paths.releases / ".tmp").iterdir()) == []
        if finished:
            break
        deaths += 1
    assert finished and store.list() == [] and deaths * STRIDE > 5


def test_changes_by_nobody_are_refused(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(paths.releases))

    monkeypatch.setattr(os, "chmod", denied)
    with pytest.raises(ReleaseRefused) as caught:
        ReleaseStore(paths).remove("v1")
    assert caught.value.exit_code == 4 and caught.value.hint == "run as root"
