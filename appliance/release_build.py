"""Filling the directory of a new release, and comparing one with its manifest.

`build` works on a directory that nobody else sees yet; `appliance.releases` gives it its name when it is complete.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from appliance import __version__
from appliance.build import meter
from appliance.checkpoint import is_relevant
from appliance.engine_options import parse_engine_options
from appliance.fsutil import (
    StoreError,
    can_share,
    copy_file,
    read_json,
    sha256_file,
    write_durable,
)
from appliance.log import Progress, UsageError, format_bytes
from appliance.manifest import MAX_MANIFEST_BYTES, FileEntry, is_plain_name, read_manifest, utc_now
from appliance.releases import (
    GOLDEN,
    MANIFEST_JSON,
    MODEL,
    RELEASE_JSON,
    SCHEMA,
    Release,
    ReleaseError,
    ReleaseOptions,
    ReleaseRefused,
)
from appliance.statefile import StateError, sync_directory, write_state
from appliance.verify import Verification, size_problem
from engine.errors import EngineError

if TYPE_CHECKING:
    from appliance.hostconfig import HostConfig
    from appliance.models import ModelStore
    from appliance.paths import Paths

_HOST_OPTIONS = (
    "model_dir", "model_name", "backend", "host", "port", "uds", "auth", "key_file", "admin_key_file", "tls_cert",
    "tls_key", "memory_fraction", "gpu_memory_fraction", "device", "step_ring", "request_timeout", "drain_timeout",
    "log_prompts", "allow_fault_injection",
)  # fmt: skip
"""Options of the engine that the host decides, not a release (names as in engine/options.py)."""


@dataclass(frozen=True, slots=True)
class Request:
    """What `release add` was asked for."""

    name: str
    model: str  # of the model store
    model_name: str
    options: ReleaseOptions
    link: bool
    note: str


def build(
    paths: Paths, wanted: Request, models: ModelStore, staged: Path, config: HostConfig, progress: Progress
) -> Release:
    """Fills the empty directory `staged`; on return everything in it is on disk. ReleaseRefused if the stored model is
    not what its own manifest says, or if the engine would refuse the model or the options."""
    from appliance.checkpoint import inspect

    source = models.path(wanted.model)
    expected = read_manifest(models.root / wanted.model).files
    folder = staged / MODEL
    total = sum(entry.size for entry in expected.values())
    try:
        if wanted.link:
            folder.symlink_to(source, target_is_directory=True)
            files = _digest(folder, expected, meter(progress, "computing digests", total))
        else:
            files = _copy(source, folder, expected, total, progress)
        _check_copied(files, expected, wanted.model)
        checkpoint = inspect(folder)
    except StoreError as error:
        raise ReleaseError(error.message, hint=error.hint or f"see `appliance model verify {wanted.model}`") from error
    check_engine_options(wanted.options, folder, config.gpus.backend)
    (staged / GOLDEN).mkdir(mode=0o755)
    release = Release(
        name=wanted.name,
        created=utc_now(),
        model_name=wanted.model_name,
        engine_version=__version__,
        python=sys.executable,
        options=wanted.options,
        model_bytes=total,
        model=wanted.model,
        linked=wanted.link,
        family=checkpoint.family,
        dtype=checkpoint.dtype,
        parameters=checkpoint.parameters,
        note=wanted.note,
    )
    _seal(staged, release, files)
    return release


def _copy(
    source: Path, folder: Path, expected: Mapping[str, FileEntry], total: int, progress: Progress
) -> dict[str, FileEntry]:
    folder.mkdir(mode=0o755)
    largest = max(expected, key=lambda name: expected[name].size)
    free = shutil.disk_usage(folder).free
    if free < total and not can_share(source / largest, folder):
        raise ReleaseRefused(
            f"the copy of the model needs {format_bytes(total)}, but only {format_bytes(free)} are free in "
            f"{folder.parents[2]}",
            hint="free some space (`appliance release list`, `appliance release remove NAME`), or use --link",
        )
    advance = meter(progress, "copying the model", total)
    files = {name: FileEntry(*copy_file(source / name, folder / name, advance)) for name in expected}
    for name in files:
        os.chmod(folder / name, 0o444)
    os.chmod(folder, 0o755)  # whatever the umask is: the engine's user reads it
    sync_directory(folder)
    return files


def _digest(folder: Path, expected: Mapping[str, FileEntry], advance: Any) -> dict[str, FileEntry]:
    return {name: FileEntry(*sha256_file(folder / name, advance)) for name in expected}


def _check_copied(files: Mapping[str, FileEntry], expected: Mapping[str, FileEntry], model: str) -> None:
    for name, entry in files.items():
        if entry != expected[name]:
            raise ReleaseRefused(
                f"the model {model!r} is damaged: {name} has SHA-256 {entry.sha256}, its manifest says "
                f"{expected[name].sha256}",
                hint=f"see `appliance model verify {model}`; get the model again",
            )


def _seal(staged: Path, release: Release, files: Mapping[str, FileEntry]) -> None:
    """release.json and the manifest, fsynced; modes that every service user can read and nobody should write."""
    write_state(staged / RELEASE_JSON, msgspec.to_builtins(release), schema=SCHEMA, mode=0o444)
    entries = {f"{MODEL}/{name}": entry for name, entry in files.items()}
    entries[RELEASE_JSON] = FileEntry(*sha256_file(staged / RELEASE_JSON))
    listed = {name: {"size": entry.size, "sha256": entry.sha256} for name, entry in sorted(entries.items())}
    write_durable(staged / MANIFEST_JSON, (json.dumps({"schema": SCHEMA, "files": listed}, indent=1) + "\n").encode())
    os.chmod(staged / MANIFEST_JSON, 0o444)
    for directory in (staged / GOLDEN, staged):
        os.chmod(directory, 0o755)
        sync_directory(directory)


def check_engine_options(options: ReleaseOptions, model_dir: Path, backend: str) -> None:
    """Asks the engine itself whether it would start with these options. UsageError in its words; ReleaseRefused for one
    that belongs to the host."""
    from engine.config import ModelConfig
    from engine.core_config import context_length, scheduler_config
    from engine.serve import core_config

    given = [
        text
        for name in ("max_model_len", "max_batch_seqs", "max_queued_requests")
        if (value := getattr(options, name)) is not None
        for text in (f"--{name.replace('_', '-')}", str(value))
    ]
    fixed = ["--model-dir", str(model_dir), "--model-name", "-", "--backend", backend, "--uds", "-"]
    without, args = vars(_parse(fixed)), _parse([*fixed, *given, *options.arguments])
    for name in _HOST_OPTIONS:
        if getattr(args, name) != without[name]:
            raise ReleaseRefused(
                f"--{name.replace('_', '-')} is decided by the host, not by a release",
                hint="set it in appliance.toml, [engine]",
            )
    try:
        core = core_config(args)
        length = context_length(core, ModelConfig.from_dir(model_dir).max_position)
        scheduler_config(core, length)
    except EngineError as error:
        raise ReleaseRefused(f"the engine refuses these options: {error.message}", hint=error.hint) from error


def _parse(arguments: list[str]) -> argparse.Namespace:
    try:
        return parse_engine_options(arguments)
    except UsageError as error:
        raise UsageError(f"the engine refuses these options: {error.message}", hint=error.hint) from None


def same_as(paths: Paths, release: Release, wanted: Request, models: ModelStore) -> str | None:
    """What of an existing release differs from what is asked for now; None if nothing."""
    for what, ours, theirs in (
        ("model name", release.model_name, wanted.model_name),
        ("options", release.options, wanted.options),
        ("link", release.linked, wanted.link),
        ("engine version", release.engine_version, __version__),
    ):
        if ours != theirs:
            return f"{what} is {_shown(ours)}, asked for is {_shown(theirs)}"
    if not os.path.isdir(models.root / wanted.model):
        return None if release.model == wanted.model else f"it was made of the model {release.model!r}"
    manifest = read_release_manifest(release.directory(paths))
    ours_files = {name.removeprefix(f"{MODEL}/"): entry for name, entry in manifest.items() if name != RELEASE_JSON}
    if ours_files != dict(read_manifest(models.root / wanted.model).files):
        return f"its model files are not those of the model {wanted.model!r} now"
    return None


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, str | bool) else msgspec.json.encode(value).decode()


# -- comparing ---------------------------------------------------------------------------------------------------------


def read_release_manifest(directory: Path) -> dict[str, FileEntry]:
    """Path inside the release -> size and SHA-256. ReleaseError if it is missing or damaged."""
    path, hint = directory / MANIFEST_JSON, "remove the release and add it again"
    try:
        value = read_json(path, limit=MAX_MANIFEST_BYTES)
        files = {name: FileEntry(entry["size"], entry["sha256"]) for name, entry in value["files"].items()}
    except StoreError as error:
        raise ReleaseError(f"the manifest of the release cannot be read: {error.message}", hint=hint) from None
    except (KeyError, TypeError, AttributeError):
        raise ReleaseError(f"{path} is damaged: a field is missing", hint=hint) from None
    if value.get("schema") != SCHEMA:
        raise ReleaseError(f"{path} has schema {value.get('schema')!r}, this version reads {SCHEMA}")
    for name, entry in files.items():
        folder, _, last = name.rpartition("/")
        plain = is_plain_name(last) and folder in ("", MODEL)
        if not plain or type(entry.size) is not int or not isinstance(entry.sha256, str):
            raise ReleaseError(f"{path} is damaged: the entry of {name!r} is invalid", hint=hint)
    if RELEASE_JSON not in files or len(files) < 2:
        raise ReleaseError(f"{path} is damaged: it names no model", hint=hint)
    return files


def quick_problem(directory: Path) -> str | None:
    """What a look at names and sizes finds wrong; None if nothing."""
    return size_problem(directory, read_release_manifest(directory))


def verify_release(paths: Paths, release: Release, progress: Progress) -> Verification:
    """Recomputes every digest of the release; `problems` names each bad, missing or extra file."""
    directory = release.directory(paths)
    manifest = read_release_manifest(directory)
    total = sum(entry.size for entry in manifest.values())
    advance = meter(progress, f"verifying {release.name}", total)
    problems: dict[str, str] = {}
    checked = 0
    for name, entry in manifest.items():
        problem, size = _verify_file(directory / name, entry, advance)
        checked += size
        if problem:
            problems[name] = problem
    problems |= _extra(directory, release, set(manifest)) | _bad_golden(paths, release)
    progress.finish()
    golden = len(list((directory / GOLDEN).glob("*.json")))
    return Verification(release.name, len(manifest) + golden, checked, problems, None if problems else utc_now())


def _verify_file(path: Path, entry: FileEntry, advance: Any) -> tuple[str | None, int]:
    if not path.exists():
        return "missing", 0
    try:
        size, digest = sha256_file(path, advance)
    except StoreError as error:
        return f"unreadable: {error.message}", 0
    if (size, digest) != (entry.size, entry.sha256):
        return f"bad: {size} bytes with SHA-256 {digest}, expected {entry.size} with {entry.sha256}", size
    return None, size


def _extra(directory: Path, release: Release, known: set[str]) -> dict[str, str]:
    extra = {item.name for item in directory.iterdir()} - {RELEASE_JSON, MANIFEST_JSON, MODEL, GOLDEN}
    folder = directory / MODEL
    inside = {f"{MODEL}/{item.name}" for item in folder.iterdir()} - known if folder.is_dir() else set()
    if release.linked:  # of a directory of somebody else only what the engine would read counts
        inside = {name for name in inside if is_relevant(name.removeprefix(f"{MODEL}/"))}
    return dict.fromkeys(sorted(extra | inside), "extra: not in the manifest")


def _bad_golden(paths: Paths, release: Release) -> dict[str, str]:
    from appliance.golden import read_golden

    problems = {}
    for file in sorted((release.directory(paths) / GOLDEN).iterdir()):
        name = f"{GOLDEN}/{file.name}"
        if file.name.startswith("."):
            continue  # being written, or left by a writer that was killed; the next one replaces it
        try:
            if read_golden(paths, release.name, file.stem) is None or file.suffix != ".json":
                problems[name] = "extra: no golden file"
        except (ReleaseError, StateError) as error:
            problems[name] = f"bad: {error.message}"
    return problems
