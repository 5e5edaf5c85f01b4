# Copyright: the LLM appliance maintainers
# SPDX-License-Identifier: Apache-2.0
"""What the bundle leaves on a host: read() -> plan() -> apply(). Runs on the managed host, below `root`.

    ROOT/usr/lib/appliance/VERSION/venv            our code and its Python packages
    ROOT/usr/lib/appliance/VERSION/bundle          manifest and vendor files of that version, for a rollback
    ROOT/usr/lib/appliance/current -> VERSION      what the units run
    ROOT/usr/lib/appliance/installed.json          what we put elsewhere, and which Debian packages we brought

A version is built in .new-VERSION and appears by one rename; `current` is swapped by one rename. A version that is
there is complete, and it never changes: other content under the same version is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

SCHEMA = 1
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 16 << 20
MAX_BUNDLE_BYTES = 64 << 30
VERSION = re.compile(r"[0-9][0-9A-Za-z.+]{0,63}")
_FILE = re.compile(r"(?!.*(^|/)\.\.?(/|$))[A-Za-z0-9_@.+~=-][A-Za-z0-9_@.+~=/-]{0,250}")
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]{1,100}")  # deb-control(5)
_MODE = re.compile(r"0(644|755)")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class InstallError(Exception):
    """The text says what is wrong and what to do."""


def parse_manifest(data: bytes) -> dict[str, Any]:
    """The manifest of a bundle; InstallError where it is none, or names a path that could leave its place."""
    try:
        manifest = json.loads(data)
        files, packages, links = manifest["files"], manifest["packages"], manifest["host_links"]
        good = (
            manifest["schema"] == SCHEMA
            and manifest["name"] == "appliance"
            and VERSION.fullmatch(manifest["version"])
            and files[manifest["requirements"]]
            and all(_FILE.fullmatch(name) and _valid_file(entry) for name, entry in files.items())
            and all(package["file"] in files and _PACKAGE.fullmatch(package["name"]) for package in packages)
            and all(
                _FILE.fullmatch(name) and target.startswith("/usr/lib/appliance/") for name, target in links.items()
            )
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InstallError(
            f"this is no manifest of an appliance bundle ({error!r}); build it with `make bundle`"
        ) from None
    if not good:
        raise InstallError("this manifest is of another schema or damaged; build the bundle with `make bundle`")
    return manifest  # type: ignore[no-any-return]


def _valid_file(entry: Any) -> bool:
    size = entry["size"]
    return bool(
        type(size) is int
        and 0 <= size <= MAX_BUNDLE_BYTES
        and _DIGEST.fullmatch(entry["sha256"])
        and _MODE.fullmatch(entry["mode"])
    )


def read_bundle_manifest(bundle: Path) -> bytes:
    """The manifest at the head of a bundle."""
    try:
        with tarfile.open(bundle, "r:") as tar:
            member = tar.next()
            if member is None or member.name != MANIFEST or not member.isreg() or member.size > MAX_MANIFEST_BYTES:
                raise InstallError(f"{bundle} does not begin with a manifest: it is no appliance bundle")
            file = tar.extractfile(member)
            assert file is not None
            return file.read()
    except (tarfile.TarError, EOFError) as error:
        raise InstallError(f"{bundle} is no tar file: {error}") from None


def read_checked_manifest(bundle: Path) -> bytes:
    """The same, checked, after the whole file was compared with NAME.sha256 where that lies beside it."""
    beside = bundle.with_name(bundle.name + ".sha256")
    if beside.is_file():
        digest = sha256(bundle)
        if beside.read_text().split()[:1] != [digest]:
            raise InstallError(f"{bundle} is not what {beside.name} says (SHA-256 {digest}); copy it again")
    data = read_bundle_manifest(bundle)
    parse_manifest(data)
    return data


def unpack(bundle: Path, target: Path, manifest_data: bytes) -> None:
    """Unpacks `bundle` into the empty directory `target`: exactly the files of the manifest, each with its size, mode
    and SHA-256. InstallError names the first that differs."""
    missing = dict(parse_manifest(manifest_data)["files"])
    try:
        with tarfile.open(bundle, "r:") as tar:
            for member in tar:
                if member.name == MANIFEST:
                    _take_manifest(tar, member, target, manifest_data)
                elif member.name in missing and member.isreg():
                    _take(tar, member, target, missing.pop(member.name))
                else:
                    raise InstallError(f"{member.name!r} is not in its manifest; do not use this bundle")
    except (tarfile.TarError, EOFError) as error:
        raise InstallError(f"{bundle} is damaged ({error}); copy it again") from None
    except InstallError as error:
        raise InstallError(f"{bundle}: {error}") from None
    if missing:
        raise InstallError(f"{bundle} lacks {sorted(missing)[0]} and {len(missing) - 1} more: it was cut off")


def _take_manifest(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path, expected: bytes) -> None:
    source = tar.extractfile(member) if member.isreg() and member.size == len(expected) else None
    if source is None or source.read() != expected:
        raise InstallError("its manifest is not the one that was announced; copy it again")
    (target / MANIFEST).write_bytes(expected)


def _take(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path, entry: dict[str, Any]) -> None:
    if member.size != entry["size"]:
        raise InstallError(f"{member.name} has {member.size} bytes, not {entry['size']}; copy it again")
    path = target / member.name
    path.parent.mkdir(parents=True, exist_ok=True)
    source = tar.extractfile(member)
    assert source is not None
    with path.open("xb") as output:
        digest = _copy(source, output)
        os.fchmod(output.fileno(), int(entry["mode"], 8))
    if digest != entry["sha256"]:
        raise InstallError(f"{member.name} is not what its manifest says (SHA-256); copy it again")


def _copy(source: IO[bytes], output: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := source.read(1 << 20):
        digest.update(chunk)
        output.write(chunk)
    return digest.hexdigest()


def sha256(path: Path) -> str | None:
    """None where there is no such regular file."""
    if path.is_symlink() or not path.is_file():
        return None
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


@dataclass
class State:
    """What is on the host. `files`: what we own outside of /usr/lib/appliance -> SHA-256 now (None: gone)."""

    versions: dict[str, str] = field(default_factory=dict)  # version -> SHA-256 of its manifest
    current: str | None = None
    previous: str | None = None
    files: dict[str, str | None] = field(default_factory=dict)
    links: dict[str, str | None] = field(default_factory=dict)
    packages: list[str] = field(default_factory=list)  # Debian packages that we brought


@dataclass
class Plan:
    """What has to be done, in this order. Empty: nothing."""

    install_packages: list[dict[str, str]] = field(default_factory=list)
    build: bool = False
    write: list[str] = field(default_factory=list)  # vendor files, as paths below /
    remove: list[str] = field(default_factory=list)
    link: dict[str, str] = field(default_factory=dict)
    switch: bool = False
    prune: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        work = (self.install_packages, self.build, self.write, self.remove, self.link, self.switch, self.prune)
        return any(work)

    def lines(self, version: str) -> list[str]:
        """For people, one action a line."""
        return [
            *(f"install Debian package {package['name']} {package['version']}" for package in self.install_packages),
            *([f"unpack version {version} and make its venv"] if self.build else []),
            *(f"write /{name}" for name in self.write),
            *(f"remove /{name}" for name in self.remove),
            *(f"link /{name} -> {target}" for name, target in self.link.items()),
            *([f"switch to version {version}"] if self.switch else []),
            *(f"remove version {name}" for name in self.prune),
        ]


@dataclass
class Installation:
    """The files of the appliance below `root`. Nothing here runs a program: see host_commands.py."""

    root: Path = Path("/")

    @property
    def lib(self) -> Path:
        return self.root / "usr/lib/appliance"

    @property
    def record(self) -> Path:
        return self.lib / "installed.json"

    def directory(self, version: str) -> Path:
        return self.lib / version

    def read(self) -> State:
        state = State()
        if not self.lib.is_dir():
            return state
        for path in sorted(self.lib.iterdir()):
            manifest = path / "bundle" / MANIFEST
            if VERSION.fullmatch(path.name) and not path.is_symlink() and manifest.is_file():
                state.versions[path.name] = hashlib.sha256(manifest.read_bytes()).hexdigest()
        if (self.lib / "current").is_symlink():
            name = os.readlink(self.lib / "current")
            state.current = name if name in state.versions else None
        record = self._read_record()
        state.previous = record.get("previous")
        state.packages = list(record.get("packages", ()))
        state.files = {name: sha256(self.root / name) for name in record.get("files", ())}
        state.links = {name: _target(self.root / name) for name in record.get("links", ())}
        return state

    def _read_record(self) -> dict[str, Any]:
        try:
            record = json.loads(self.record.read_bytes())
        except FileNotFoundError:
            return {}
        except ValueError:
            raise InstallError(f"{self.record} is not JSON; move it away and run the install again") from None
        if not isinstance(record, dict) or record.get("schema") != SCHEMA:
            raise InstallError(f"{self.record} was written by another version of this collection")
        return record

    def manifest_of(self, version: str) -> bytes:
        """Of a version that is installed."""
        try:
            return (self.directory(version) / "bundle" / MANIFEST).read_bytes()
        except FileNotFoundError:
            there = ", ".join(self.read().versions) or "none"
            raise InstallError(f"version {version} is not installed here (installed: {there})") from None

    def plan(
        self, state: State, manifest_data: bytes, *, activate: bool, missing_packages: list[dict[str, str]],
        prune: list[str],
    ) -> Plan:  # fmt: skip
        """What is missing for `manifest`: the version, and with `activate` all that makes it the one that runs."""
        manifest = parse_manifest(manifest_data)
        version, digest = manifest["version"], hashlib.sha256(manifest_data).hexdigest()
        there = state.versions.get(version)
        if there not in (None, digest):
            raise InstallError(
                f"version {version} is installed already, with other content, and a version never changes: releases "
                f"rely on it. Build the bundle under a new version: make bundle VERSION={version}+1"
            )
        plan = Plan(install_packages=missing_packages, build=there is None)
        if activate:
            vendor = vendor_files(manifest)
            plan.write = [name for name, entry in vendor.items() if not self._same(name, entry)]
            plan.remove = sorted(name for name, now in state.files.items() if name not in vendor and now is not None)
            links = manifest["host_links"]
            plan.link = {name: target for name, target in links.items() if _target(self.root / name) != target}
            plan.remove += sorted(name for name, now in state.links.items() if name not in links and now is not None)
            plan.switch = state.current != version
            plan.prune = [name for name in prune if name in state.versions and name not in (version, state.current)]
        return plan

    def _same(self, name: str, entry: dict[str, Any]) -> bool:
        path = self.root / name
        if path.is_symlink() or not path.is_file():
            return False
        return path.stat().st_mode & 0o7777 == int(entry["mode"], 8) and sha256(path) == entry["sha256"]

    # -- changes, each harmless to repeat
    def apply_files(self, plan: Plan, manifest: dict[str, Any]) -> None:
        """Vendor files and links of an installed version."""
        source = self.directory(manifest["version"]) / "bundle" / "host"
        for name in plan.write:
            _replace(source / name, self.root / name, int(manifest["files"][f"host/{name}"]["mode"], 8))
        for name in plan.remove:
            (self.root / name).unlink(missing_ok=True)
            self._remove_empty(self.root / name)
        for name, target in plan.link.items():
            swap_link(self.root / name, target)

    def _remove_empty(self, path: Path) -> None:
        """Directories that are ours alone and now empty (usr/share/doc/appliance and what is in it)."""
        for parent in path.parents:
            ours = parent.is_relative_to(self.root) and "appliance" in parent.relative_to(self.root).parts
            if not ours or not parent.is_dir() or any(parent.iterdir()):
                return
            parent.rmdir()

    def switch(self, version: str) -> None:
        swap_link(self.lib / "current", version)

    def remember(self, state: State, manifest: dict[str, Any], packages: list[str], *, before: bool = False) -> None:
        """installed.json: what an uninstall has to take away, and where a rollback leads. Written `before` the first
        change with what is there and what will be, and afterwards with what is there then."""
        version = manifest["version"]
        files, links = set(vendor_files(manifest)), set(manifest["host_links"])
        if before:
            files, links = files | state.files.keys(), links | state.links.keys()
        record = {
            "schema": SCHEMA,
            "previous": state.current if state.current not in (None, version) else state.previous,
            "files": sorted(files), "links": sorted(links), "packages": sorted({*state.packages, *packages}),
        }  # fmt: skip
        data = (json.dumps(record, indent=1) + "\n").encode()
        if not self.record.is_file() or self.record.read_bytes() != data:
            self.lib.mkdir(mode=0o755, parents=True, exist_ok=True)
            write_file(self.record, data, 0o644)

    def prune(self, versions: list[str]) -> None:
        for version in versions:
            hidden = self.lib / f".old-{version}"
            self.directory(version).rename(hidden)  # never half a version under its name
            shutil.rmtree(hidden)

    @contextmanager
    def unpacked(self, bundle: Path, manifest_data: bytes) -> Iterator[Path]:
        """The checked content of a bundle, for the time of the `with` block."""
        self.clear_leftovers()
        target = self.lib / ".new-unpacked"
        target.mkdir(parents=True)
        try:
            unpack(bundle, target, manifest_data)
            yield target
        finally:
            shutil.rmtree(target)

    def clear_leftovers(self) -> None:
        """What an interrupted run left behind."""
        for pattern in (".new-*", ".old-*"):
            for path in self.lib.glob(pattern):
                shutil.rmtree(path)

    def remove_all(self, state: State) -> list[str]:
        """Everything of ours below /usr; returns what was removed. The record goes last."""
        gone = []
        for name in (*state.files, *state.links):
            path = self.root / name
            if path.is_symlink() or path.exists():
                path.unlink()
                gone.append(f"/{name}")
                self._remove_empty(path)
        if self.lib.is_dir():
            shutil.rmtree(self.lib)
            gone.append(f"/{self.lib.relative_to(self.root)}")
        return gone


def vendor_files(manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Path below / -> its entry, of what goes to fixed places."""
    files = manifest["files"].items()
    return {name.removeprefix("host/"): entry for name, entry in files if name.startswith("host/")}


def write_file(path: Path, data: bytes, mode: int) -> None:
    """tmp + fsync + rename."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        os.fchmod(file.fileno(), mode)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _replace(source: Path, target: Path, mode: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    write_file(target, source.read_bytes(), mode)


def swap_link(path: Path, target: str) -> None:
    """`path` -> `target` in one step, durable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(path)
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _target(path: Path) -> str | None:
    return os.readlink(path) if path.is_symlink() else None
