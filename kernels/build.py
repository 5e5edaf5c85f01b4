"""`make kernels`: compile every kernels/*.cu with nvcc into a fatbin; `--check-registers`: compare what kernels use.

Files are named by a hash of source, headers, architectures and flags and left alone when it has not changed. What ptxas
says of every kernel (registers, spills, shared memory, stack) goes into resources.json beside the manifest;
kernels/registers.txt is the checked-in extract of it that a change must not alter unseen.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from kernels.manifest import (
    FATBIN_DIR,
    KERNELS_DIR,
    FileEntry,
    Manifest,
    ManifestError,
    read_manifest,
    source_hash,
    source_path,
    sources,
    write_manifest,
)  # fmt: skip

ARCHES = {"portable": ("80", "86", "89", "90a", "100", "120", "ptx80"), "hopper": ("90a",)}
FLAGS = ("-std=c++17", "-O3", "-fmad=false", "-lineinfo", "--compress-mode=size")
"""Never --use_fast_math. -fmad=false: a fused multiply-add is written as one (__fmaf_rn) where it is meant, so that two
kernels that must agree bit for bit do not depend on what the compiler fuses."""

TABLE = KERNELS_DIR / "registers.txt"
TABLE_ARCHES = ("80", "90a")
_TABLE_HEAD = """\
# What every kernel uses, as ptxas of nvcc {compiler} reports it: registers a thread, bytes otherwise. CI compiles and
# compares (python -m kernels.build --check-registers); after a change that is meant: --write-registers.
# kernel arch registers spills static_shared stack
"""


class BuildError(Exception):
    """nvcc is missing or refused a file; the message holds its output."""


@dataclass(frozen=True, slots=True, order=True)
class Resources:
    """One kernel on one architecture. spills: bytes stored and loaded."""

    kernel: str
    arch: str
    registers: int
    spills: int
    static_shared: int
    stack: int

    def line(self) -> str:
        return f"{self.kernel} {self.arch} {self.registers} {self.spills} {self.static_shared} {self.stack}"


def build(
    folder: Path = KERNELS_DIR,
    out: Path = FATBIN_DIR,
    *,
    only_arch: str | None = None,
    names: tuple[str, ...] = (),
    jobs: int = 2,
    force: bool = False,
    say: bool = False,
    flags: tuple[str, ...] = FLAGS,
) -> list[Resources]:
    """Compile what changed, write the manifest, delete fatbins no longer named by it. Returns the resources of all.

    only_arch: one of ARCHES, for a quick build; a file that has no code for it is left out. names: stems of the files
    to build (the others keep their entry). Raises BuildError, ManifestError.
    """
    compiler = nvcc_version()
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as lock:  # one build of a folder at a time: `make kernels` beside `make test`
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _build(folder, out, compiler, only_arch, names, jobs, force, say, flags)


def _build(
    folder: Path, out: Path, compiler: str, only_arch: str | None, names: tuple[str, ...], jobs: int, force: bool,
    say: bool, flags: tuple[str, ...],
) -> list[Resources]:  # fmt: skip
    old, old_resources = _previous(out, compiler)
    entries: dict[str, FileEntry] = {}
    resources: dict[str, list[Resources]] = {}
    waiting: list[tuple[str, Path, FileEntry]] = []
    for name, source in sources(folder).items():
        path = source_path(source)
        arches = tuple(arch for arch in ARCHES[path] if only_arch in (None, arch))
        if names and name not in names:
            if name in old:
                entries[name], resources[name] = old[name], old_resources[name]
            continue
        if not arches:
            continue
        digest = source_hash(source, arches, flags)
        found = old.get(name)
        if (
            not force
            and found is not None
            and found.source_hash == digest
            and _intact(out / found.fatbin, found.sha256)
        ):
            entries[name], resources[name] = found, old_resources[name]
            continue
        waiting.append((name, source, FileEntry(f"{name}-{digest[:16]}.fatbin", "", digest, path, arches, ())))
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        built = pool.map(lambda item: _compile(item[1], out, item[2], say, flags), waiting)
        for (name, _source, _entry), (entry, used) in zip(waiting, built, strict=True):
            entries[name], resources[name] = entry, used
    entries = dict(sorted(entries.items()))
    write_manifest(out, Manifest(compiler, entries), flags)
    _write_resources(out, resources)
    wanted = {entry.fatbin for entry in entries.values()}
    for stale in out.glob("*.fatbin"):
        if stale.name not in wanted:
            stale.unlink()
    return sorted(line for name in entries for line in resources[name])


def nvcc_version() -> str:
    """Such as "13.0.88". Raises BuildError."""
    nvcc = find_nvcc()
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"\bV(\d+\.\d+\.\d+)", text)
    if found is None:
        raise BuildError(f"{nvcc} --version says nothing known: {text!r}")
    return found[1]


def find_nvcc() -> str:
    nvcc = os.environ.get("NVCC") or shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        raise BuildError("there is no nvcc here: install the CUDA toolkit 13.0 or set NVCC=/path/to/nvcc")
    return nvcc


def _previous(out: Path, compiler: str) -> tuple[dict[str, FileEntry], dict[str, list[Resources]]]:
    """What an earlier build with the same compiler left; nothing if it is not all there."""
    try:
        manifest = read_manifest(out, check_sources=False)
        raw = json.loads((out / "resources.json").read_text())
        resources = {name: [Resources(**fields) for fields in lines] for name, lines in raw.items()}
    except (ManifestError, OSError, ValueError, TypeError, AttributeError):
        return {}, {}
    if manifest.compiler != compiler:
        return {}, {}
    return {name: entry for name, entry in manifest.files.items() if name in resources}, resources


def _intact(path: Path, sha256: str) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256


def _write_resources(out: Path, resources: dict[str, list[Resources]]) -> None:
    raw = {name: [asdict(line) for line in lines] for name, lines in sorted(resources.items())}
    (out / "resources.json").write_text(json.dumps(raw) + "\n")


def _compile(
    source: Path, out: Path, entry: FileEntry, say: bool, flags: tuple[str, ...]
) -> tuple[FileEntry, list[Resources]]:
    target = out / entry.fatbin
    temporary = target.with_suffix(".tmp")
    command = [find_nvcc(), *flags, "-Xptxas", "-v", "-I", str(KERNELS_DIR), *_targets(entry.arches)]
    command += ["-fatbin", "-o", str(temporary), str(source)]
    if say:
        print(f"kernels: compiling {source.name} for {', '.join(entry.arches)}", file=sys.stderr, flush=True)
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        raise BuildError(f"nvcc refused {source.name}:\n{run.stdout}{run.stderr}")
    image = temporary.read_bytes()
    temporary.replace(target)
    used = parse_ptxas(run.stderr)
    kernels = tuple(sorted({line.kernel for line in used}))
    if not kernels:
        raise BuildError(f"{source.name} has no kernels, or ptxas said nothing of them:\n{run.stderr}")
    sha256 = hashlib.sha256(image).hexdigest()
    return FileEntry(entry.fatbin, sha256, entry.source_hash, entry.path, entry.arches, kernels), used


def _targets(arches: tuple[str, ...]) -> list[str]:
    """One front-end pass for each virtual architecture."""
    options = []
    for arch in arches:
        if arch.startswith("ptx"):
            options += ["-gencode", f"arch=compute_{arch[3:]},code=compute_{arch[3:]}"]
        else:
            options += ["-gencode", f"arch=compute_{arch},code=sm_{arch}"]
    return options


_ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\w+)'")
_PROPERTIES = re.compile(r"Function properties for (\w+)")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


def parse_ptxas(text: str) -> list[Resources]:
    """What `ptxas -v` reports of every entry function. Device functions that were not inlined are passed over."""
    found: list[Resources] = []
    kernel = arch = function = ""
    stack = spills = 0
    for line in text.splitlines():
        if match := _ENTRY.search(line):
            kernel, arch = match.groups()
            function, stack, spills = kernel, 0, 0
        elif match := _PROPERTIES.search(line):
            function = match[1]
        elif (match := _STACK.search(line)) and function == kernel:
            stack, spills = int(match[1]), int(match[2]) + int(match[3])
        elif (match := _USED.search(line)) and kernel:
            shared = _SHARED.search(line)
            found.append(Resources(kernel, arch, int(match[1]), spills, int(shared[1]) if shared else 0, stack))
            kernel = ""
    return found


def table_lines(resources: list[Resources]) -> list[str]:
    return [used.line() for used in sorted(resources) if used.arch in TABLE_ARCHES]


def read_table(path: Path = TABLE) -> list[str]:
    """Lines without comments. A missing table is an empty one."""
    if not path.is_file():
        return []
    return [line for line in path.read_text().splitlines() if line and not line.startswith("#")]


def compare_table(resources: list[Resources], table: list[str]) -> list[str]:
    """What differs, as lines of a diff; empty if nothing does. Only architectures that were compiled are compared."""
    compiled = {used.arch for used in resources}
    new = set(table_lines(resources))
    old = {line for line in table if line.split()[1] in compiled}
    return [f"- {line}" for line in sorted(old - new)] + [f"+ {line}" for line in sorted(new - old)]


def spilling(resources: list[Resources]) -> list[str]:
    """Kernels that spill registers to memory, as table lines."""
    return [used.line() for used in sorted(resources) if used.spills]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.build", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("names", nargs="*", help="stems of the files to compile (default: all)")
    parser.add_argument(
        "--arch", choices=sorted({*ARCHES["portable"], *ARCHES["hopper"]}), help="only this one, quickly"
    )
    parser.add_argument("--out", type=Path, default=FATBIN_DIR)
    parser.add_argument("-j", "--jobs", type=int, default=2, help="files at a time")
    parser.add_argument("--force", action="store_true", help="compile files that have not changed too")
    parser.add_argument("--check-registers", action="store_true", help="compare with kernels/registers.txt")
    parser.add_argument("--write-registers", action="store_true", help="write kernels/registers.txt")
    options = parser.parse_args(arguments)
    try:
        used = build(
            out=options.out, only_arch=options.arch, names=tuple(options.names), jobs=options.jobs,
            force=options.force, say=True,
        )  # fmt: skip
    except (BuildError, ManifestError) as error:
        print(f"kernels: {error}", file=sys.stderr)
        return 1
    if options.write_registers:
        TABLE.write_text(_TABLE_HEAD.format(compiler=nvcc_version()) + "\n".join(table_lines(used)) + "\n")
    if options.check_registers and (differences := compare_table(used, read_table())):
        print("\n".join(differences))
        print("kernels: registers.txt says otherwise; if that is meant: python -m kernels.build --write-registers")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
