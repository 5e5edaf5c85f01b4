"""Unpacking and activating on a host (plugins/module_utils/installation.py), in a directory instead of /."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ansible.bundles import UNIT, make_bundle
from tests.ansible.modules import load

installation = load("module_utils/installation")
Installation, InstallError = installation.Installation, installation.InstallError
TARGET = "usr/lib/systemd/system/appliance.target"


def install(host: Any, bundle: Path, **options: Any) -> Any:
    """All that the module does but programs: build, files, switch, record. Returns the plan."""
    data = installation.read_bundle_manifest(bundle)
    manifest, state = installation.parse_manifest(data), host.read()
    plan = host.plan(state, data, activate=True, missing_packages=[], prune=options.get("prune", []))
    if plan.build:
        host.lib.mkdir(parents=True, exist_ok=True)
        host.clear_leftovers()
        new = host.lib / f".new-{manifest['version']}"
        (new / "bundle").mkdir(parents=True)
        installation.unpack(bundle, new / "bundle", data)
        new.rename(host.directory(manifest["version"]))
    activate(host, state, plan, manifest)
    return plan


def activate(host: Any, state: Any, plan: Any, manifest: Any) -> None:
    host.remember(state, manifest, [], before=True)
    host.apply_files(plan, manifest)
    if plan.switch:
        host.switch(manifest["version"])
    host.remember(state, manifest, [])
    host.prune(plan.prune)


@pytest.fixture
def host(tmp_path: Path) -> Any:
    return Installation(tmp_path / "root")


def tree(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): os.readlink(path) if path.is_symlink() else path.read_text()
        for path in root.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def test_a_first_install_and_a_second_that_has_nothing_to_do(host: Any, tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path)
    plan = install(host, bundle)
    assert plan.build and plan.switch and plan.write == [TARGET]
    assert (host.root / TARGET).read_text() == "[Unit]\nDescription=1.0\n"
    assert os.readlink(host.lib / "current") == "1.0"
    assert os.readlink(host.root / "usr/bin/appliance") == "/usr/lib/appliance/current/venv/bin/appliance"
    before = tree(host.root)
    assert not install(host, bundle)
    assert tree(host.root) == before


def test_files_that_were_changed_by_hand_are_put_right(host: Any, tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path)
    install(host, bundle)
    (host.root / TARGET).write_text("[Unit]\nDescription=mine\n")
    (host.root / "usr/bin/appliance").unlink()
    plan = install(host, bundle)
    assert plan.write == [TARGET] and list(plan.link) == ["usr/bin/appliance"] and not plan.build and not plan.switch
    (host.root / TARGET).chmod(0o600)
    assert install(host, bundle).write == [TARGET]
    assert (host.root / TARGET).stat().st_mode & 0o777 == 0o644


def test_an_upgrade_takes_away_what_is_no_longer_shipped_and_back(host: Any, tmp_path: Path) -> None:
    extra = "host/usr/share/doc/appliance/OLD"
    install(host, make_bundle(tmp_path, version="1.0", files={extra: "old"}))
    assert (host.root / "usr/share/doc/appliance/OLD").exists()
    plan = install(host, make_bundle(tmp_path, version="1.1"))
    assert plan.remove == ["usr/share/doc/appliance/OLD"] and plan.switch
    assert not (host.root / "usr/share/doc/appliance").exists(), "our own directory goes when it is empty"
    assert host.read().previous == "1.0" and host.read().current == "1.1"

    data = host.manifest_of("1.0")  # a rollback needs no bundle
    state = host.read()
    plan = host.plan(state, data, activate=True, missing_packages=[], prune=[])
    assert plan.switch and not plan.build
    activate(host, state, plan, installation.parse_manifest(data))
    assert (host.root / "usr/share/doc/appliance/OLD").read_text() == "old"
    assert (host.root / TARGET).read_text() == "[Unit]\nDescription=1.0\n"
    assert host.read().current == "1.0"


def test_a_version_never_changes(host: Any, tmp_path: Path) -> None:
    install(host, make_bundle(tmp_path, version="1.0"))
    other = make_bundle(tmp_path / "other", version="1.0", files={UNIT: "[Unit]\n"})
    with pytest.raises(InstallError, match=r"never changes.*make bundle VERSION=1\.0\+1"):
        install(host, other)


def test_only_versions_that_nobody_needs_are_pruned(host: Any, tmp_path: Path) -> None:
    for version in ("1.0", "1.1", "1.2"):
        install(host, make_bundle(tmp_path, version=version))
    plan = install(host, make_bundle(tmp_path, version="1.2"), prune=["1.0", "1.2", "9.9"])
    assert plan.prune == ["1.0"], "never the current one, never one that is not there"
    assert sorted(host.read().versions) == ["1.1", "1.2"]


def test_what_is_removed_is_all_of_ours_and_nothing_else(host: Any, tmp_path: Path) -> None:
    drop_in = host.root / "etc/systemd/system/appliance.target.d/mine.conf"
    neighbour = host.root / "usr/lib/systemd/system/other.service"
    for path in (drop_in, neighbour):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    before = tree(host.root)
    install(host, make_bundle(tmp_path, version="1.0", files={"host/usr/share/doc/appliance/A": "a"}))
    install(host, make_bundle(tmp_path, version="1.1"))
    host.remove_all(host.read())
    assert tree(host.root) == before
    assert not (host.root / "usr/lib/appliance").exists()


STEPS = ("replace", "rename", "symlink_to", "unlink", "mkdir")


def test_a_crash_at_any_step_leaves_a_host_that_the_next_run_puts_right(
    host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (
        make_bundle(tmp_path, version="1.0"),
        make_bundle(tmp_path, version="1.1", files={"host/usr/share/b": "b"}),
    )
    install(host, old)
    snapshot = tmp_path / "snapshot"
    shutil.copytree(host.root, snapshot, symlinks=True)
    install(host, new)
    wanted = tree(host.root)

    for number in range(100):
        shutil.rmtree(host.root)
        shutil.copytree(snapshot, host.root, symlinks=True)
        with monkeypatch.context() as patch:
            crashed = crash_at(patch, number)
            try:
                install(host, new)
            except KeyboardInterrupt:
                pass
        state = host.read()
        assert state.current in ("1.0", "1.1") and state.current in state.versions
        assert json.loads(host.manifest_of(state.current))["version"] == state.current
        install(host, new)
        assert tree(host.root) == wanted, f"after a crash at step {number}"
        if not crashed():
            assert number > 10
            return
    raise AssertionError("the install has more steps than this test tries")


def crash_at(patch: pytest.MonkeyPatch, number: int) -> Callable[[], bool]:
    """The number-th change of a directory does not happen: the process is gone instead. Returns: was it reached?"""
    count = 0

    def dying(method: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == number + 1:
                raise KeyboardInterrupt
            return method(*args, **options)

        return call

    for name in STEPS:
        patch.setattr(Path, name, dying(getattr(Path, name)))
    return lambda: count > number


# -- damaged and hostile bundles


def unpacked(bundle: Path, target: Path) -> dict[str, str]:
    target.mkdir()
    installation.unpack(bundle, target, installation.read_bundle_manifest(bundle))
    return tree(target)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, dict[str, str]]:
    directory = tmp_path_factory.mktemp("small")
    bundle = make_bundle(directory)
    return directory, bundle.read_bytes(), unpacked(bundle, directory / "right")


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_changed_byte_goes_unnoticed(small: tuple[Path, bytes, dict[str, str]], data: st.DataObject) -> None:
    """Either the bundle is refused, or the byte was of no meaning (padding, owner, time) and the content is right."""
    directory, good, wanted = small
    position = data.draw(st.integers(0, len(good) - 1))
    flipped = bytearray(good)
    flipped[position] ^= data.draw(st.integers(1, 255))
    bundle, target = directory / "flipped.tar", directory / "flipped"
    bundle.write_bytes(flipped)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    try:
        installation.unpack(bundle, target, wanted["manifest.json"].encode())
    except InstallError:
        return
    assert tree(target) == wanted


def test_a_bundle_that_differs_from_the_digest_beside_it_is_refused(tmp_path: Path) -> None:
    """The manifest guards the files, the digest guards the manifest."""
    bundle = make_bundle(tmp_path)
    assert installation.parse_manifest(installation.read_checked_manifest(bundle))["version"] == "1.0"
    data = bundle.read_bytes()
    bundle.write_bytes(data.replace(b'"gpu": false', b'"gpu":  true'))
    with pytest.raises(InstallError, match=r"is not what .*\.tar\.sha256 says"):
        installation.read_checked_manifest(bundle)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9])
def test_a_bundle_that_was_cut_off_is_refused(
    small: tuple[Path, bytes, dict[str, str]], share: float, tmp_path: Path
) -> None:
    bundle = tmp_path / "cut.tar"
    bundle.write_bytes(small[1][: int(len(small[1].rstrip(b"\0")) * share)])
    with pytest.raises(InstallError):
        unpacked(bundle, tmp_path / "target")


def repack(bundle: Path, change: Callable[[list[tuple[tarfile.TarInfo, bytes]]], None]) -> None:
    with tarfile.open(bundle) as tar:
        members = [(member, tar.extractfile(member).read()) for member in tar]  # type: ignore[union-attr]
    change(members)
    with tarfile.open(bundle, "w") as tar:
        for member, data in members:
            member.size = len(data) if member.isreg() else 0
            tar.addfile(member, io.BytesIO(data))


def extra(name: str, **fields: Any) -> Callable[[list[tuple[tarfile.TarInfo, bytes]]], None]:
    def change(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        member = tarfile.TarInfo(name)
        for key, value in fields.items():
            setattr(member, key, value)
        members.append((member, b"evil" if member.isreg() else b""))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (extra("../../etc/passwd"), "not in its manifest"),
        (extra("/etc/passwd"), "not in its manifest"),
        (extra("wheels/b.whl"), "not in its manifest"),
        (extra("wheels/a.whl"), "not in its manifest"),  # a second one of that name
        (lambda members: members.pop(), "lacks"),
        (lambda members: members.reverse(), "does not begin with a manifest"),
        (lambda members: members.__setitem__(1, (members[1][0], b"x" * len(members[1][1]))), "SHA-256"),
        (lambda members: members.__setitem__(1, (members[1][0], b"x")), "bytes"),
    ],
)
def test_a_bundle_that_is_not_its_manifest_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    bundle = make_bundle(tmp_path)
    repack(bundle, change)
    with pytest.raises(InstallError, match=message):
        unpacked(bundle, tmp_path / "target")
    assert not (tmp_path / "etc").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE])
def test_only_regular_files_are_unpacked(tmp_path: Path, kind: bytes) -> None:
    bundle = make_bundle(tmp_path)

    def change(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        members[1][0].type, members[1][0].linkname = kind, "/etc/passwd"

    repack(bundle, change)
    with pytest.raises(InstallError, match="not in its manifest"):
        unpacked(bundle, tmp_path / "target")


def change_manifest(data: bytes, key: str, value: Any) -> bytes:
    manifest = json.loads(data)
    *path, last = key.split(".") if "files" not in key else key.split("|")
    place = manifest
    for part in path:
        place = place[part]
    place[last] = value
    return json.dumps(manifest).encode()


ENTRY = {"size": 1, "sha256": "0" * 64, "mode": "0644"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("schema", 2), ("name", "other"), ("version", "../1"), ("version", "current"), ("version", ".new-1"),
        ("version", None), ("requirements", "nothing.txt"), ("files|../x", ENTRY), ("files|/x", ENTRY),
        ("files|a/../b", ENTRY), ("files|a//../../b", ENTRY), ("files|a\nb", ENTRY), ("files|x", None),
        ("files|x", ENTRY | {"mode": "4755"}), ("files|x", ENTRY | {"size": -1}), ("files|x", ENTRY | {"size": True}),
        ("files|x", ENTRY | {"sha256": "0"}), ("files", []), ("packages", None),
        ("host_links", {"usr/bin/appliance": "/etc/passwd"}), ("host_links", {"../x": "/usr/lib/appliance/x"}),
        ("packages", [{"name": "a1", "file": "debs/none.deb"}]),
        ("packages", [{"name": "--force-all", "file": "wheels/a.whl"}]),
    ],
)  # fmt: skip
def test_a_manifest_that_could_do_harm_is_refused(
    small: tuple[Path, bytes, dict[str, str]], key: str, value: Any
) -> None:
    data = installation.read_bundle_manifest(small[0] / "appliance-1.0-debian12-x86_64.tar")
    installation.parse_manifest(data)
    with pytest.raises(InstallError):
        installation.parse_manifest(change_manifest(data, key, value))


@given(st.binary(max_size=200))
def test_no_bytes_break_the_reader_of_manifests(data: bytes) -> None:
    with pytest.raises(InstallError):
        installation.parse_manifest(data)


def test_a_record_that_is_damaged_is_not_overwritten(host: Any, tmp_path: Path) -> None:
    install(host, make_bundle(tmp_path))
    host.record.write_text("{")
    with pytest.raises(InstallError, match=r"installed\.json is not JSON"):
        host.read()
    assert host.record.read_text() == "{"
