"""Kernel files to shared libraries of the host: g++ with -DAPPLIANCE_EMULATE, once per content.

A file is preprocessed first, so that kernels made by macros are found; then a line that exports each kernel is added
and the result compiled and linked with the runtime (RUNTIME).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
KERNELS = ROOT / "kernels"
RUNTIME = ("runtime.cpp", "memory.cpp", "report.cpp", "asynchronous.cpp", "tensor_cores.cpp", "dependent.cpp")

# No contraction: as nvcc -fmad=false. Wrapping and aliasing as on the device, where both are harmless.
FLAGS = (
    *("-std=c++20", "-march=native", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"),
    *("-ffp-contract=off", "-fwrapv", "-fno-strict-aliasing", "-fno-math-errno"),
)
# The sanitizers' reports go to report.cpp. Large locals must touch the guard below a fiber's stack, not leap over it.
CHECKS = ("-fsanitize=alignment,bounds", "-fstack-clash-protection")
KERNEL_FLAGS = (*FLAGS, *CHECKS, "-O2", "-g1", "-Wno-unknown-pragmas", "-Wno-attributes", "-Wno-psabi")
RUNTIME_FLAGS = (*FLAGS, "-O3", "-g1")
# __global__ and __launch_bounds__ survive the preprocessor, for find_kernels; the compiler itself gets nothing.
ERASED = ("-D__global__=", "-D__launch_bounds__(...)=", "-D__cluster_dims__(...)=", "-D__maxnreg__(...)=")


class CompileError(Exception):
    """The compiler refused a kernel file; the text is the compiler's."""


@dataclass(frozen=True, slots=True)
class KernelDeclaration:
    name: str
    max_threads: str  # the first expression in __launch_bounds__, or "0"


def find_kernels(text: str) -> list[KernelDeclaration]:
    """The `extern "C" __global__` functions in preprocessed text. Templates are not among them: they have no C name."""
    found: dict[str, KernelDeclaration] = {}
    for match in re.finditer(r"\b__global__\b", text):
        before = re.split(r"[;}]", text[max(0, match.start() - 400) : match.start()])[-1]
        if 'extern "C"' not in before:
            continue
        declaration = before[before.index('extern "C"') :] + text[match.end() : match.end() + 1000]
        bounds = "0"
        launch = re.search(r"__launch_bounds__\s*\(", declaration.split("{")[0])
        if launch is not None:
            arguments, end = _arguments(declaration, launch.end())
            bounds = arguments[0].strip()
            declaration = declaration[: launch.start()] + declaration[end:]
        name = re.match(r'extern "C"\s+void\s+(\w+)\s*\(', declaration)
        if name is None:
            raise CompileError(f'not the form `extern "C" __global__ void name(`: {declaration[:100]!r}')
        found.setdefault(name[1], KernelDeclaration(name[1], bounds))
    return list(found.values())


def _arguments(text: str, start: int) -> tuple[list[str], int]:
    """The arguments of a call whose opening parenthesis ends at `start`, and where the closing one ends."""
    parts, depth = [""], 1
    for position in range(start, len(text)):
        character = text[position]
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0:
            return parts, position + 1
        if character == "," and depth == 1:
            parts.append("")
        else:
            parts[-1] += character
    raise CompileError(f"parenthesis not closed: {text[start : start + 100]!r}")


def cache_folder() -> Path:
    chosen = os.environ.get("APPLIANCE_EMULATOR_CACHE")
    private = Path(tempfile.gettempdir()) / f"appliance-emulator-{os.getuid()}"
    for folder in [Path(chosen)] if chosen else [ROOT / "build" / "emulator", private]:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    raise CompileError("no folder to keep compiled kernels in: set APPLIANCE_EMULATOR_CACHE to a writable one")


@lru_cache(maxsize=1)
def _toolchain() -> str:
    """What besides the sources decides the code: the compiler and, for -march=native, the processor."""
    version = subprocess.run([_compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    show = [_compiler(), "-march=native", "-Q", "--help=target"]
    return version + subprocess.run(show, capture_output=True, text=True, check=False).stdout


def _compiler() -> str:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise CompileError(f"{compiler} not found: the emulator needs g++ 12 or newer (or set CXX)")
    return compiler


def _run(command: Sequence[str], what: str) -> str:
    done = subprocess.run([_compiler(), *command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(f"{what} does not compile for the emulator:\n{done.stderr[:20000]}")
    return done.stdout


def _key(*parts: str | bytes) -> str:
    digest = hashlib.sha256(_toolchain().encode())
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:24]


def _publish(target: Path, command: Sequence[str], what: str) -> Path:
    """Runs the compiler with `-o` a temporary name, then renames: workers of pytest-xdist may build the same file."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.stem}-", suffix=target.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        _run([*command, "-o", str(temporary)], what)
        temporary.rename(target)
        _forget_old(target.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def _forget_old(folder: Path) -> None:
    """What nobody has used for two weeks; another worker may be doing the same."""
    limit = time.time() - 14 * 86400
    for path in folder.iterdir():
        try:
            if path.is_file() and path.stat().st_mtime < limit:
                path.unlink()
        except FileNotFoundError:
            continue


def _runtime_objects() -> list[Path]:
    headers = b"".join((HERE / name).read_bytes() for name in ("runtime.h", "internal.h", "context.h"))
    objects = []
    for name in RUNTIME:
        key = _key(headers, (HERE / name).read_bytes(), *RUNTIME_FLAGS)
        target = cache_folder() / f"{Path(name).stem}-{key}.o"
        if target.exists():
            os.utime(target)
        else:
            _publish(target, [*RUNTIME_FLAGS, "-c", str(HERE / name)], name)
        objects.append(target)
    return objects


def build(source: Path, hopper: bool, includes: Sequence[Path] = (KERNELS,)) -> tuple[Path, list[str]]:
    """Compiles one .cu file. Returns the library and the names of its kernels."""
    search = [f"-I{folder}" for folder in (source.parent, *includes, HERE)]
    defines = ["-DAPPLIANCE_EMULATE", f"-DEMULATOR_HOPPER={int(hopper)}"]
    text = _run(["-E", "-x", "c++", *FLAGS, *defines, *search, str(source)], source.name)
    kernels = find_kernels(text)
    text += "".join(f"\nEMULATOR_EXPORT({kernel.name}, {kernel.max_threads})" for kernel in kernels) + "\n"
    names = [kernel.name for kernel in kernels]
    objects = _runtime_objects()
    key = _key(text, *(str(item) for item in objects), *KERNEL_FLAGS, *ERASED)
    library = cache_folder() / f"{source.stem}-{'hopper' if hopper else 'portable'}-{key}.so"
    if library.exists():
        os.utime(library)
        return library, names
    export = _export_macro()
    with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
        unit = Path(folder) / f"{source.stem}.ii.cpp"
        unit.write_text(text)
        compiled = Path(folder) / f"{source.stem}.o"
        _run([*KERNEL_FLAGS, *ERASED, export, "-c", str(unit), "-o", str(compiled)], source.name)
        return _publish(library, ["-shared", str(compiled), *map(str, objects)], source.name), names


def _export_macro() -> str:
    """EMULATOR_EXPORT does not survive the preprocessor; it is given again on the command line."""
    text = (HERE / "cuda_export.h").read_text()
    body = text.partition("#define EMULATOR_EXPORT(name, max_threads)")[2].replace("\\\n", " ")
    return f"-DEMULATOR_EXPORT(name,max_threads)={' '.join(body.split())}"
