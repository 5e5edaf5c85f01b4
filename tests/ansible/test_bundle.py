"""What `make bundle` makes: complete, checked, the same every time."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.ansible.modules import ROOT, load_builder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500), pytest.mark.xdist_group("box")]  # beside those that use it


@pytest.fixture(scope="module")
def content(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("content")
    with tarfile.open(bundle) as tar:
        tar.extractall(directory, filter="data")
    return directory


@pytest.fixture(scope="module")
def manifest(content: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((content / "manifest.json").read_text())
    return value


def test_the_manifest_names_every_file_with_its_digest(content: Path, manifest: dict[str, Any]) -> None:
    names = {str(path.relative_to(content)) for path in content.rglob("*") if path.is_file()} - {"manifest.json"}
    assert names == set(manifest["files"])
    listing = "".join(f"{entry['sha256']}  {name}\n" for name, entry in manifest["files"].items())
    done = subprocess.run(["sha256sum", "--check", "--quiet"], input=listing, cwd=content, text=True, timeout=60)
    assert done.returncode == 0  # coreutils agrees


def test_the_digest_beside_the_bundle(bundle: Path) -> None:
    done = subprocess.run(["sha256sum", "--check", f"{bundle.name}.sha256"], cwd=bundle.parent, timeout=60)
    assert done.returncode == 0


def wheels(content: Path) -> dict[str, str]:
    """Normalised name -> version, from the file names (binary distribution format of PyPA)."""
    split = [path.name.split("-") for path in (content / "wheels").glob("*.whl")]
    return {re.sub("[-_.]+", "-", words[0]).lower(): words[1] for words in split}


def test_wheels_are_the_locked_ones_for_the_host(content: Path) -> None:
    lock = (ROOT / ".ci/requirements/run.txt").read_text()
    locked = set(re.findall(r"^([a-z0-9-]+)==", lock, re.M)) - {"setuptools", "wheel"}
    found = wheels(content)
    assert set(found) == locked | {"llm-appliance", "pip"}
    for path in (content / "wheels").glob("*.whl"):
        if not path.name.startswith(("llm_appliance", "pip")):
            assert hashlib.sha256(path.read_bytes()).hexdigest() in lock
        tags = path.stem.split("-")[-3:]
        assert tags[0] in ("py3", "cp311") or "py3" in tags[0], path.name
        assert tags[2] == "any" or "x86_64" in tags[2], path.name


def test_requirements_pin_name_version_and_digest(content: Path) -> None:
    """What pip is told on the host; pip itself is only used."""
    lines = (content / "requirements.txt").read_text().splitlines()
    digests = {hashlib.sha256(path.read_bytes()).hexdigest() for path in (content / "wheels").glob("*.whl")}
    matched = [re.fullmatch(r"([A-Za-z0-9._-]+)==(\S+) --hash=sha256:([0-9a-f]{64})", line) for line in lines]
    assert all(matched) and len(lines) == len(wheels(content)) - 1
    assert {entry[3] for entry in matched if entry} <= digests
    assert not any(entry and entry[1] == "pip" for entry in matched)


def test_our_wheel_holds_every_module_and_the_compiled_cores(content: Path) -> None:
    (wheel,) = (content / "wheels").glob("llm_appliance-*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    modules = {
        str(path.relative_to(ROOT))
        for package in ("appliance", "engine", "kernels", "canary", "healthcheck")
        for path in (ROOT / package).rglob("*.py")
    }
    assert modules <= names
    assert {name.split(".")[0] for name in names if name.endswith(".so")} == {
        "engine/_ring", "engine/tokenizer/_bpe", "kernels/_cpu"
    }  # fmt: skip
    assert not any(name.startswith(("tests/", "ansible/", "systemd/")) for name in names)


def test_debian_packages_bring_gi_and_pydbus_and_no_server(content: Path, manifest: dict[str, Any]) -> None:
    names = {package["name"] for package in manifest["packages"]}
    assert {"python3-gi", "python3-pydbus", "gir1.2-glib-2.0", "libgirepository-1.0-1", "libglib2.0-0"} <= names
    assert {"iptables", "nftables", "conntrack"} <= names, "what the canary's rules need"
    assert not names & {"libc6", "python3", "python3.11", "systemd", "apt", "dpkg", "bash"}, "the host has these"
    for package in manifest["packages"]:
        fields = ["dpkg-deb", "--show", "--showformat=${Package} ${Version} ${Architecture}", content / package["file"]]
        shown = subprocess.run(fields, capture_output=True, text=True, check=True, timeout=60).stdout
        assert shown.split() == [package["name"], package["version"], package["architecture"]]


def test_vendor_files_go_below_usr_and_are_all_there(content: Path) -> None:
    host = content / "host"
    assert [path.name for path in host.iterdir()] == ["usr"], "/etc is the admin's"
    for source in (ROOT / "systemd").glob("*.*"):
        if source.suffix in (".service", ".target", ".slice"):
            assert (host / "usr/lib/systemd/system" / source.name).read_bytes() == source.read_bytes()
    for name in ("sysusers.d/appliance.conf", "tmpfiles.d/appliance.conf", "systemd/system-preset/90-appliance.preset"):
        assert (host / "usr/lib" / name).is_file()
    documents = host / "usr/share/doc/appliance"
    for source, target in (("systemd/examples", "examples"), ("appliance/alerts/runbooks", "runbooks")):
        assert sorted(os.listdir(documents / target)) == sorted(os.listdir(ROOT / source))
    assert (documents / "alerts/appliance.rules.yml").is_file()
    completion = host / "usr/share/bash-completion/completions/appliance"
    assert subprocess.run(["bash", "-n", completion], timeout=60).returncode == 0
    assert "complete" in completion.read_text()
    page = subprocess.run(
        ["zcat", host / "usr/share/man/man8/appliance.8.gz"], capture_output=True, text=True, timeout=60
    ).stdout
    assert page.startswith(".TH APPLIANCE 8") or "\n.TH APPLIANCE 8" in page
    notice = (host / "usr/share/doc/appliance/THIRD-PARTY").read_text()
    assert "numpy" in notice and "python3-gi" in notice and "BSD" in notice


def test_the_same_tree_gives_the_same_bytes(bundle: Path, tmp_path: Path) -> None:
    """Another directory, umask, time zone, locale and hash seed."""
    build = [sys.executable, str(ROOT / "ansible/bundle"), "--output", str(tmp_path)]
    command = ["sh", "-c", 'umask 077; exec "$@"', "sh", *build]
    environment = {"TZ": "Pacific/Apia", "PYTHONHASHSEED": "7", "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"}
    done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert Path(done.stdout.strip()).read_bytes() == bundle.read_bytes()


@pytest.mark.parametrize("version", ["1/../2", "", "v1", "1.0 ", "1.0\n", "../1", "1.0+A"])
def test_a_version_that_could_leave_its_directory_is_refused(version: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "ansible/bundle"), "--output", str(tmp_path), "--version", version]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "is no version" in done.stderr and not list(tmp_path.iterdir())


def test_code_linked_against_a_newer_glibc_is_refused(content: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = load_builder("wheels")
    (wheel,) = (content / "wheels").glob("llm_appliance-*.whl")
    with zipfile.ZipFile(wheel) as file:
        core = Path(
            file.extract(
                next(name for name in file.namelist() if "_bpe" in name and name.endswith(".so")),
                content.parent / "core",
            )
        )
    builder.check_glibc(core, "core")
    monkeypatch.setattr(builder, "GLIBC", (2, 2))
    with pytest.raises(builder.BundleError, match="was linked against glibc 2"):
        builder.check_glibc(core, "core")


def test_a_module_that_no_package_lists_is_refused(tmp_path: Path) -> None:
    """pyproject.toml lists packages by hand; a forgotten one would be missing on hosts only."""
    builder = load_builder("wheels")
    tree = builder.copy_tree(ROOT, tmp_path / "tree", version="1.0", gpu=False)
    (tree / "engine/forgotten").mkdir()
    (tree / "engine/forgotten/__init__.py").write_text("")
    with pytest.raises(builder.BundleError, match=r"lacks engine/forgotten/__init__\.py"):
        builder.own_wheel(tree, tmp_path / "wheels", version="1.0")


def test_a_gpu_bundle_needs_compiled_kernels(tmp_path: Path) -> None:
    builder = load_builder("wheels")
    root = tmp_path / "root"
    builder.copy_tree(ROOT, root, version="1.0", gpu=False)  # never has kernels/fatbin
    with pytest.raises(builder.BundleError, match="not compiled") as raised:
        builder.copy_tree(root, tmp_path / "tree", version="1.0", gpu=True)
    assert "make kernels" in raised.value.hint
