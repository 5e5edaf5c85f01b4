"""appliance/credentials.py: what changes, and how. That a running unit sees it is tested in the box (test_box.py)."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from unit_files import values

from appliance import credentials
from appliance.credentials import changed, check_keys, replace
from appliance.log import ApplianceError


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    source, target = tmp_path / "etc", tmp_path / "run"
    source.mkdir()
    target.mkdir()
    for name in credentials.NAMES:
        (target / name).write_bytes(b"\n")
        (target / name).chmod(0o400)
    return source, target


def test_names_are_those_of_the_unit() -> None:
    loaded = values("appliance-gateway@.service", "LoadCredential")
    assert loaded == [f"{name}:/etc/appliance/credentials/{name}" for name in credentials.NAMES]
    stand_ins = values("appliance-gateway@.service", "SetCredential")
    assert stand_ins == [f"{name}:\\n" for name in credentials.NAMES], "without, a missing file is 243/CREDENTIALS"
    assert credentials.ABSENT == b"\n"


def test_only_what_differs(folders: tuple[Path, Path]) -> None:
    source, target = folders
    assert changed(source, target) == {}
    (source / "api-keys").write_bytes(b"aa alice\n")
    (source / "unknown").write_bytes(b"x")
    assert changed(source, target) == {"api-keys": b"aa alice\n"}
    replace(target, changed(source, target))
    assert (target / "api-keys").read_bytes() == b"aa alice\n"
    assert changed(source, target) == {}
    (source / "api-keys").unlink()
    assert changed(source, target) == {"api-keys": b"\n"}, "a file that is gone: as at a start without it"


def test_a_unit_without_that_credential_gets_none(folders: tuple[Path, Path]) -> None:
    source, target = folders
    (target / "tls-key").unlink()
    (source / "tls-key").write_bytes(b"key")
    assert changed(source, target) == {}


def test_owner_and_mode_stay_and_the_change_is_whole(folders: tuple[Path, Path]) -> None:
    _, target = folders
    with (target / "api-keys").open("rb") as reader:  # who reads the old one goes on reading it
        replace(target, {"api-keys": b"new\n"})
        assert reader.read() == b"\n"
    status = (target / "api-keys").stat()
    assert stat.S_IMODE(status.st_mode) == 0o400 and status.st_uid == os.geteuid()
    assert sorted(path.name for path in target.iterdir()) == sorted(credentials.NAMES)


def test_a_left_over_of_a_kill_is_replaced(folders: tuple[Path, Path]) -> None:
    _, target = folders
    (target / ".api-keys.new").write_bytes(b"half")
    replace(target, {"api-keys": b"new\n"})
    assert (target / "api-keys").read_bytes() == b"new\n"


def test_a_source_that_cannot_be(folders: tuple[Path, Path]) -> None:
    source, target = folders
    (source / "api-keys").write_bytes(b"x" * ((1 << 20) + 1))
    with pytest.raises(ApplianceError, match="larger"):
        changed(source, target)
    (source / "api-keys").unlink()
    (source / "api-keys").mkdir()
    with pytest.raises(ApplianceError, match="a directory"):
        changed(source, target)
    (source / "api-keys").rmdir()
    (target / "api-keys").write_bytes(b"aa alice\n")
    (source / "api-keys").symlink_to(source / "not-mounted")
    with pytest.raises(ApplianceError, match="not-mounted"):  # a reload opens nothing either
        changed(source, target)


@pytest.mark.parametrize("handed", ["stand-in", "nothing", "unseen"])
@pytest.mark.parametrize("kind", ["directory", "dangling", "dangling parent", "file in the way", "not loaded"])
def test_keys_that_were_not_handed_over_keep_the_unit_from_starting(
    folders: tuple[Path, Path], tmp_path: Path, kind: str, handed: str
) -> None:
    source, target = folders
    if handed == "nothing":
        (target / "api-keys").unlink()
    seen = None if handed == "unseen" else target
    check_keys(source, seen)  # none given
    if kind == "directory":
        (source / "api-keys").mkdir()
    elif kind == "dangling":
        (source / "api-keys").symlink_to(tmp_path / "not-mounted")
    elif kind == "dangling parent":
        source = tmp_path / "link"
        source.symlink_to(tmp_path / "not-mounted")
    elif kind == "file in the way":
        source = source / "file"
        source.write_bytes(b"")
    else:
        if seen is None:
            return  # the file is fine, and nothing else can be known
        (source / "api-keys").write_bytes(b"aa alice\n")
    with pytest.raises(ApplianceError, match="api-keys") as caught:
        check_keys(source, seen)
    assert caught.value.exit_code == 4 and caught.value.hint


def test_keys_that_were_handed_over_are_enough(folders: tuple[Path, Path]) -> None:
    """Also from where a drop-in says (LoadCredentialEncrypted=), whatever lies in our directory."""
    source, target = folders
    (target / "api-keys").write_bytes(b"aa alice\n")
    check_keys(source, target)
    (source / "api-keys").mkdir()
    check_keys(source, target)
    (source / "api-keys").rmdir()
    (target / "api-keys").write_bytes(b"\n")
    (source / "api-keys").write_bytes(b"\n\n")  # an empty file is no key, as it always was
    check_keys(source, target)


def test_the_unit_looks_before_it_starts() -> None:
    (before,) = values("appliance-gateway@.service", "ExecStartPre")
    assert before.startswith("+/") and before.endswith(" -m appliance.credentials --check %n")


@pytest.mark.parametrize("unit", ["sshd.service", "../appliance-x.service", "appliance-a/b.service", ""])
def test_other_units_are_refused(unit: str) -> None:
    assert credentials.main([unit]) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mount namespaces")
def test_a_unit_that_does_not_run() -> None:
    command = [sys.executable, "-m", "appliance.credentials", "appliance-no-such.service"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)  # it leaves its mount namespace
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and "hint: " in done.stderr and "Traceback" not in done.stderr
