"""The Python side of the bundle: our own wheel, the locked ones, pip itself, and requirements.txt with their hashes."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import NamedTuple

from command import BundleError, run

PYTHON = (3, 11)  # Debian 12's
GLIBC = (2, 36)  # Debian 12's
PACKAGES = ("appliance", "engine", "kernels", "canary", "healthcheck")
BUILD_ONLY = ("setuptools", "wheel")  # in run.txt for the compiled cores of a checkout
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.so", "*.pyc", "fatbin")
_VERSION_LINE = re.compile(r'^(__version__|version) = "[^"]+"$', re.M)


def copy_tree(root: Path, target: Path, *, version: str, gpu: bool) -> Path:
    """A clean copy of what our wheel is made of, with `version` in it. Built files of the checkout stay behind: whether
    somebody ran `make kernels` or `make test` here must not change the bundle."""
    target.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(root / name, target)
    for name in PACKAGES:
        shutil.copytree(root / name, target / name, ignore=_LEFT_OUT)
    if gpu:
        fatbin = root / "kernels" / "fatbin"
        if not (fatbin / "manifest.json").is_file():
            raise BundleError("the kernels are not compiled", hint="make kernels (needs nvcc 13.0, no GPU)")
        shutil.copytree(fatbin, target / "kernels" / "fatbin")
    places = [target / name / "__init__.py" for name in PACKAGES] + [target / "pyproject.toml"]
    found = 0
    for path in places:
        text, count = _VERSION_LINE.subn(rf'\1 = "{version}"', path.read_text(), count=1)
        path.write_text(text)
        found += count
    if not found:
        raise BundleError("no file says which version this is", hint="this checkout is incomplete; see `git status`")
    return target


def own_wheel(tree: Path, target: Path, *, version: str) -> Path:
    """Builds our wheel and checks that it runs on the host: for its Python, and no newer glibc than its own."""
    if sys.version_info[:2] != PYTHON:
        raise BundleError(
            f"the bundle is for Python 3.11 and this is {sys.version_info[0]}.{sys.version_info[1]}",
            hint="make bundle PYTHON=python3.11 (with its headers); the host's Debian 12 has 3.11",
        )
    # No debug information: it holds the path of this build. CFLAGS cannot loosen the arithmetic (setup.py).
    env = {"CFLAGS": "-g0", "LDFLAGS": "-s"}
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    run([*command, "--no-build-isolation", "--no-index", "-w", target, "."], cwd=tree, env=env, hint="make setup")
    (wheel,) = target.glob("llm_appliance-*.whl")
    if metadata(wheel)["Version"] != version:
        raise BundleError(f"the wheel is {wheel.name}, not version {version}", hint="see wheels.py:copy_tree")
    with zipfile.ZipFile(wheel) as file:
        cores = [name for name in file.namelist() if name.endswith(".so")]
        modules = {str(path.relative_to(tree)) for name in PACKAGES for path in (tree / name).rglob("*.py")}
        if left_out := sorted(modules - set(file.namelist())):
            hint = "add its package to [tool.setuptools] packages in pyproject.toml"
            raise BundleError(f"our wheel lacks {', '.join(left_out[:5])}", hint=hint)
        if len(cores) != 3:
            raise BundleError(f"our wheel holds the compiled cores {cores}, not three", hint="see setup.py")
        for name in cores:
            check_glibc(Path(file.extract(name, tree / "built")), name)
    return wheel


def check_glibc(library: Path, name: str) -> None:
    """BundleError where `library` asks for symbols that Debian 12's glibc does not have."""
    shown = run(["readelf", "--version-info", "--wide", library], hint="apt-get install binutils")
    needed = max((tuple(map(int, found)) for found in re.findall(r"GLIBC_(\d+)\.(\d+)", shown)), default=(0, 0))
    if needed > GLIBC:
        raise BundleError(
            f"{name} was linked against glibc {needed[0]}.{needed[1]}; Debian 12 has {GLIBC[0]}.{GLIBC[1]}",
            hint="build the bundle on Debian 12 (a container will do)",
        )


def download(ci: Path, target: Path, *, cache: Path, gpu: bool) -> None:
    """The locked wheels for the host, whatever this machine is, each checked against the hashes in its lock file."""
    cache.mkdir(parents=True, exist_ok=True)
    for name in ["run", *(["gpu"] if gpu else []), "bundle"]:
        entries = _entries((ci / "requirements" / f"{name}.txt").read_text())
        wanted = [entry for entry in entries if entry.name not in (*BUILD_ONLY, "pycuda")]
        if not all(_cached(cache, entry) for entry in wanted):
            lock = cache / f"{name}.txt"
            lock.write_text("".join(entry.text for entry in wanted))
            _fetch(lock, cache)
        for entry in wanted:
            wheel = _cached(cache, entry)
            if wheel is None:
                raise BundleError(f"pip brought no wheel of {entry.name} {entry.version}", hint=f"rm -r {cache}")
            shutil.copy(wheel, target)
    if gpu:
        run([ci / "build-pycuda", target, sys.executable], hint="needs nvcc 13.0 and g++, no GPU; see make setup-gpu")


def _fetch(lock: Path, cache: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--require-hashes", "--only-binary", ":all:", "--implementation", "cp", "--python-version", "3.11"]
    newest = GLIBC[1]
    for tag in [*(f"manylinux_2_{minor}_x86_64" for minor in range(newest, 4, -1)), "manylinux2014_x86_64", "any"]:
        command += ["--platform", tag]
    run([*command, "-r", lock, "-d", cache], hint="is the package index reachable?")


def write_requirements(content: Path) -> None:
    """requirements.txt: each wheel of the bundle by name, version and hash. pip itself is not installed, only used."""
    lines = []
    for wheel in sorted((content / "wheels").glob("*.whl")):
        data = metadata(wheel)
        if data["Name"] != "pip":
            lines.append(f"{data['Name']}=={data['Version']} --hash=sha256:{sha256(wheel)}\n")
    (content / "requirements.txt").write_text("".join(lines))


def metadata(wheel: Path) -> Message:
    """The METADATA of a wheel."""
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        return Parser().parsestr(file.read(name).decode("utf-8", errors="replace"))


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Entry(NamedTuple):
    """One requirement of a lock file."""

    name: str
    version: str
    hashes: frozenset[str]
    text: str


def _entries(lock: str) -> list[Entry]:
    """What applies to the host, by the markers that `uv pip compile --universal` writes."""
    found = []
    for text in re.findall(r"^[a-z0-9](?:[^\n]*\\\n)*[^\n]*\n", lock, re.M):  # a line that backslashes continue
        head = re.match(r"([a-z0-9-]+)==([^\s;]+)(?: ; ([^\\\n]*))?", text)
        marker = head[3].strip() if head and head[3] else None
        wanted = re.fullmatch(r"python_full_version (<|>=) '3\.(\d+)'", marker) if marker else None
        if head is None or (marker and not wanted):
            raise BundleError(f"a lock file has {text[:80]!r}", hint="teach wheels.py:_entries about it")
        if not wanted or (PYTHON[1] < int(wanted[2])) == (wanted[1] == "<"):
            found.append(Entry(head[1], head[2], frozenset(re.findall(r"sha256:([0-9a-f]{64})", text)), text))
    return found


def _cached(cache: Path, entry: Entry) -> Path | None:
    """The wheel of that requirement, if the cache has one with a locked hash."""
    for path in sorted(cache.glob(f"*-{entry.version}-*.whl")):
        name = re.sub("[-_.]+", "-", path.name.split("-")[0]).lower()
        if name == entry.name and sha256(path) in entry.hashes:
            return path
    return None


def license_of(data: Message) -> str:
    """What the package says about its licence, in one line."""
    text = data["License-Expression"] or (data["License"] or "").strip().split("\n")[0]
    classifiers = [value.rpartition(" :: ")[2] for value in data.get_all("Classifier", []) if value[:7] == "License"]
    return text or ", ".join(classifiers) or f"see {os.fspath(data['Name'])}'s files"
