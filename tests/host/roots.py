"""Debian root filesystems for the test hosts: made once per content hash by mmdebstrap, then only read.

They live in $APPLIANCE_TEST_CACHE (default /var/tmp/appliance-test), which all checkouts of a user share. An entry is
complete or absent: it is built under a lock in a directory of its own and appears by one rename.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.host import linux

SUITE = "bookworm"
BUILD_SECONDS = 1200
KEEP_SECONDS = 21 * 86400
_FORMAT = 1  # counted up when this module builds the same recipe differently


class HostError(Exception):
    """A test host cannot be made or does not answer; the text says why, with the end of its log."""


@dataclass(frozen=True)
class Recipe:
    """A root filesystem. `commands` are shell lines that run in it, as root, after the packages are installed."""

    name: str
    packages: tuple[str, ...]
    commands: tuple[str, ...] = ()
    suite: str = SUITE

    def digest(self) -> str:
        return digest(asdict(self) | {"packages": sorted(self.packages)})


def digest(value: object) -> str:
    """Of anything JSON can say, with what else decides what a build makes."""
    text = json.dumps([_FORMAT, platform.machine(), value], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def cache_directory() -> Path:
    """Created for this user only: what lies in it is booted as root."""
    path = Path(os.environ.get("APPLIANCE_TEST_CACHE") or "/var/tmp/appliance-test")
    path.mkdir(mode=0o755, parents=True, exist_ok=True)
    status = path.lstat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022 or not path.is_dir() or path.is_symlink():
        raise HostError(f"{path} must be a directory of uid {os.geteuid()} that nobody else may write to")
    return path.resolve()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def cached(name: str, key: str, build: Callable[[Path], None]) -> Path:
    """The entry NAME-KEY; `build(directory)` fills an empty directory for it where it is absent. Who comes second
    waits. Other entries of that name that nobody asked for in three weeks are removed."""
    cache = cache_directory()
    entry = cache / f"{name}-{key}"
    with _locked(cache / f"{name}-{key}.lock"):
        if not entry.is_dir():
            building = cache / f".building-{name}-{key}"
            shutil.rmtree(building, ignore_errors=True)  # a builder died: we hold its lock
            building.mkdir()
            try:
                build(building)
            except BaseException:
                shutil.rmtree(building, ignore_errors=True)
                raise
            os.sync()  # else a power cut could leave the name with empty files behind it
            building.rename(entry)
            _forget_others(cache, name, entry)
    os.utime(entry)
    return entry


def _forget_others(cache: Path, name: str, entry: Path) -> None:
    for other in cache.glob(f"{name}-" + "?" * 16):
        if other != entry and time.time() - other.stat().st_mtime > KEEP_SECONDS:
            with _locked(cache / f"{other.name}.lock"):
                shutil.rmtree(other)


def is_cached(name: str, key: str) -> bool:
    return (cache_directory() / f"{name}-{key}").is_dir()


def root_filesystem(recipe: Recipe) -> Path:
    """The directory of this root. Never write to it: use it below an overlay or copy it."""

    def build(directory: Path) -> None:
        bootstrap(recipe, directory / "root")

    return cached(recipe.name, recipe.digest(), build) / "root"


def bootstrap(recipe: Recipe, target: Path) -> None:
    """mmdebstrap into `target`, as root, through this machine's own mirrors and apt settings."""
    command = [
        "mmdebstrap", "--quiet", "--mode=root", "--format=directory", "--variant=minbase",
        f"--include={','.join(recipe.packages)}",
        "--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-exclude=/usr/share/locale/*",
        *(f"--aptopt={line}" for line in _apt_settings()),
        *(f'--customize-hook=chroot "$1" sh -euc \'{line}\'' for line in recipe.commands),
        recipe.suite, str(target), *_mirrors(recipe.suite),
    ]  # fmt: skip
    # With the builder all of its children go: nothing goes on writing where the next builder cleans up.
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=BUILD_SECONDS,
        preexec_fn=linux.die_with_parent, env=os.environ | {"LC_ALL": "C.UTF-8"},
    )  # fmt: skip
    if done.returncode:
        raise HostError(f"mmdebstrap could not build the root {recipe.name!r}:\n{done.stderr[-4000:]}")


def _apt_settings() -> list[str]:
    """This machine's ways to the mirrors (proxies, certificates, retries), as lines of apt.conf. mmdebstrap itself
    heeds the environment only."""
    shown = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, timeout=60)
    wanted = ("Acquire::http", "Acquire::https", "Acquire::Retries", "Acquire::Check-", "Acquire::ForceIPv")
    return [line for line in shown.stdout.splitlines() if line.startswith(wanted) and not line.endswith('"";')]


def _mirrors(suite: str) -> list[str]:
    """This machine's own Debian mirrors of that suite; none if it has none, which means Debian's default."""
    fields = "$(SITE) $(CODENAME) $(ORIGIN) $(COMPONENT)"
    shown = subprocess.run(
        ["apt-get", "indextargets", "--format", fields, "Created-By: Packages"], capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    rows = {tuple(line.split()) for line in shown.stdout.splitlines()}
    lines = [
        f"deb {row[0]} {row[1]} main"
        for row in sorted(rows)
        if len(row) == 4
        and row[2:] == ("Debian", "main")
        and row[1] in (suite, f"{suite}-updates", f"{suite}-security")
    ]
    return lines if any(f" {suite} " in line for line in lines) else []
