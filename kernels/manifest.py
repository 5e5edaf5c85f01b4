"""kernels/fatbin/manifest.json: which fatbin belongs to which .cu file, what is in it, and what it was built from.

Written by kernels/build.py, read by engine/cuda/module.py.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

KERNELS_DIR = Path(__file__).resolve().parent
FATBIN_DIR = KERNELS_DIR / "fatbin"
SCHEMA = 1

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([\w./-]+)"', re.MULTILINE)
_PATH_LINE = re.compile(r"^// path: (\w+)$", re.MULTILINE)


class ManifestError(Exception):
    """The manifest or a fatbin is missing, damaged or does not belong to the sources beside it."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One .cu file as compiled. path: "hopper" (sm_90a only) or "portable". arches: "80", "90a" ... and "ptx80"."""

    fatbin: str  # file name
    sha256: str  # of its bytes
    source_hash: str  # of what it was built from, see source_hash()
    path: str
    arches: tuple[str, ...]
    kernels: tuple[str, ...]

    def runs_on(self, major: int, minor: int) -> bool:
        """Whether a GPU of this compute capability can load it: machine code of the same major version and not a newer
        minor one, or PTX from which the driver compiles."""
        for arch in self.arches:
            if arch.startswith("ptx"):
                version, ptx = arch[3:], True
            else:
                version, ptx = arch, False
            has = int(version.rstrip("af")[:-1]), int(version.rstrip("af")[-1])
            if version.endswith("a") and has == (major, minor):
                return True
            if not version.endswith("a") and (has <= (major, minor) if ptx else has[0] == major and has[1] <= minor):
                return True
        return False


@dataclass(frozen=True, slots=True)
class Manifest:
    compiler: str  # nvcc's version
    files: dict[str, FileEntry]  # stem of the .cu file -> entry


def sources(folder: Path = KERNELS_DIR) -> dict[str, Path]:
    """Stem -> path of all .cu files, sorted."""
    return {path.stem: path for path in sorted(folder.glob("*.cu"))}


def source_path(source: Path) -> str:
    """ "hopper" if the file says `// path: hopper` on a line of its own, else "portable"."""
    found = _PATH_LINE.search(source.read_text())
    if found is None:
        return "portable"
    if found[1] not in ("hopper", "portable"):
        raise ManifestError(f"{source}: path {found[1]!r} is neither hopper nor portable")
    return found[1]


def source_hash(source: Path, arches: tuple[str, ...], flags: tuple[str, ...]) -> str:
    """SHA-256 (hex) over the file, all headers of ours that it includes, the architectures and the compiler flags.
    Headers are looked for beside the including file, then in kernels/, as the compiler does."""
    digest = hashlib.sha256(repr((SCHEMA, arches, flags)).encode())
    seen: set[Path] = set()
    waiting = [source]
    while waiting:
        path = waiting.pop(0)
        if path in seen:
            continue
        seen.add(path)
        text = path.read_bytes()
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(text).digest())
        for name in _INCLUDE.findall(text.decode()):
            candidates = (path.parent / name, KERNELS_DIR / name)
            waiting += [found.resolve() for found in candidates if found.is_file()][:1]
    return digest.hexdigest()


def read_manifest(folder: Path = FATBIN_DIR, *, check_sources: bool = True) -> Manifest:
    """Raises ManifestError if it is missing or damaged, or if a source beside it has changed since."""
    path = folder / "manifest.json"
    try:
        raw = json.loads(path.read_text())
        if raw["schema"] != SCHEMA:
            raise ManifestError(f"{path} has schema {raw['schema']}, wanted {SCHEMA}")
        files = {name: _entry(fields) for name, fields in raw["files"].items()}
        manifest = Manifest(str(raw["compiler"]), files)
        flags = tuple(raw["flags"])
    except FileNotFoundError:
        raise ManifestError(f"there are no compiled kernels: {path} does not exist") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ManifestError(f"{path} is damaged: {error}") from error
    if check_sources:
        _check_sources(folder, manifest, flags)
    return manifest


def _entry(fields: dict[str, Any]) -> FileEntry:
    entry = FileEntry(**{**fields, "arches": tuple(fields["arches"]), "kernels": tuple(fields["kernels"])})
    if Path(entry.fatbin).name != entry.fatbin:
        raise ValueError(f"{entry.fatbin} is not a plain file name")
    return entry


def _check_sources(folder: Path, manifest: Manifest, flags: tuple[str, ...]) -> None:
    """Only where the sources lie in the folder above (a checkout); an installed package may come without."""
    for name, source in sources(folder.parent).items():
        entry = manifest.files.get(name)
        if entry is None:
            raise ManifestError(f"{source} was never compiled")
        if source_hash(source, entry.arches, flags) != entry.source_hash:
            raise ManifestError(f"{source} or a header it includes changed since it was compiled")


def write_manifest(folder: Path, manifest: Manifest, flags: tuple[str, ...]) -> None:
    """Atomically, so that a reader never sees half of it."""
    raw = {
        "schema": SCHEMA,
        "compiler": manifest.compiler,
        "flags": list(flags),
        "files": {name: asdict(entry) for name, entry in sorted(manifest.files.items())},
    }
    temporary = folder / "manifest.json.tmp"
    temporary.write_text(json.dumps(raw, indent=1) + "\n")
    temporary.replace(folder / "manifest.json")
