"""Comparing a stored model with its manifest, and remembering when that last succeeded."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from appliance.checkpoint import is_relevant
from appliance.fsutil import StoreError, read_json, sha256_file, write_durable
from appliance.manifest import MANIFEST_NAME, SCHEMA_VERSION, FileEntry, Manifest, files_of, utc_now

VERIFIED_NAME = ".verified.json"


@dataclass(frozen=True, slots=True)
class Verification:
    """`problems`: file name -> what is wrong with it ("missing", "extra", "size 3, expected 5", ...)."""

    name: str
    files_checked: int
    bytes_checked: int
    problems: Mapping[str, str]
    verified_at: str | None

    @property
    def ok(self) -> bool:
        return not self.problems


def verify_files(directory: Path, manifest: Manifest, advance: Callable[[int], None]) -> Verification:
    """Recomputes every digest; `advance` gets the bytes just read. A success is noted for `list`."""
    problems: dict[str, str] = {}
    checked, folder = 0, files_of(directory, manifest.source)
    if not folder.is_dir():
        gone = f"missing: the linked directory {manifest.source.get('path')} is gone"
        return Verification(manifest.name, 0, 0, dict.fromkeys(manifest.files, gone), None)
    for name, entry in manifest.files.items():
        problem, size = _verify_file(folder / name, entry, advance)
        checked += size
        if problem:
            problems[name] = problem
    for extra in sorted({item.name for item in folder.iterdir()} - manifest.files.keys()):
        if is_relevant(extra) if manifest.linked else not _is_own(extra):
            problems[extra] = "extra: not in the manifest"
    verified_at = None if problems else record_verified(directory, manifest)
    return Verification(manifest.name, len(manifest.files), checked, problems, verified_at)


def _is_own(name: str) -> bool:
    # The last: left by a verify that was killed while it noted its success.
    return name in (MANIFEST_NAME, VERIFIED_NAME) or name.startswith(f".{VERIFIED_NAME}.")


def quick_problem(directory: Path, manifest: Manifest) -> str | None:
    """What a look at names and sizes finds wrong; None if nothing."""
    return size_problem(files_of(directory, manifest.source), manifest.files)


def size_problem(folder: Path, files: Mapping[str, FileEntry]) -> str | None:
    """The first of `files` that is not in `folder` or has another size; None if all are as they should be."""
    for name, entry in files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            return f"{name}: {os.strerror(error.errno or 0)}"
        if size != entry.size:
            return f"{name}: {size} bytes, expected {entry.size}"
    return None


def _verify_file(path: Path, entry: FileEntry, advance: Callable[[int], None]) -> tuple[str | None, int]:
    if not os.path.lexists(path):
        return "missing", 0
    if not path.exists():
        return f"missing: the link points at {os.readlink(path)}, which is gone", 0
    try:
        size, digest = sha256_file(path, advance)
    except StoreError as error:
        return f"unreadable: {error.message}", 0
    if size != entry.size:
        return f"bad: {size} bytes, expected {entry.size}", size
    if digest != entry.sha256:
        return f"bad: SHA-256 {digest}, expected {entry.sha256}", size
    return None, size


def record_verified(directory: Path, manifest: Manifest) -> str | None:
    """Notes that every file matched just now; None where the store cannot be written (it may belong to root)."""
    verified_at = utc_now()
    value = {"schema": SCHEMA_VERSION, "verified_at": verified_at, "created_at": manifest.created_at}
    try:
        write_durable(directory / VERIFIED_NAME, json.dumps(value).encode())
    except OSError:
        return None
    return verified_at


def read_verified(directory: Path, manifest: Manifest) -> str | None:
    """When `record_verified` last noted this very model; None if never, or if the note is not readable."""
    try:
        value = read_json(directory / VERIFIED_NAME, limit=4096)
    except StoreError:
        return None
    verified_at = value.get("verified_at")
    return verified_at if value.get("created_at") == manifest.created_at and isinstance(verified_at, str) else None
