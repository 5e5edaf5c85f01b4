"""promtool, to check and test alert rules: out of Debian's package `prometheus`, unpacked and not installed.

Fetched once per version (roots.py:cached) with apt-get download, through this machine's own mirrors. A promtool that is
installed is taken as it is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.host.roots import HostError, cached, digest, is_cached
from tests.programs import in_ci

_SECONDS = 300
_PACKAGE = "prometheus"


def promtool() -> Path:
    """Path of promtool. Skips, with the reason, where there is none and none can be fetched; with CI set it fails."""
    installed = shutil.which("promtool")
    if installed:
        return Path(installed)
    try:
        return _fetched()
    except HostError as error:
        if in_ci():
            pytest.fail(f"no promtool: {error}", pytrace=False)
        pytest.skip(f"no promtool: {error}")


def _fetched() -> Path:
    for program in ("apt-get", "dpkg-deb"):
        if not shutil.which(program):
            raise HostError(f"{program} is missing: this is no Debian; install promtool yourself")
    key = digest(["promtool", _candidate()])
    if os.environ.get("APPLIANCE_OFFLINE") and not is_cached("promtool", key):
        raise HostError("APPLIANCE_OFFLINE is set and promtool is not in the cache")
    return cached("promtool", key, _unpack) / "usr/bin/promtool"


def _candidate() -> str:
    """The version that apt-get download would take."""
    shown = _run(["apt-cache", "policy", _PACKAGE])
    version = next((line.split()[1] for line in shown.splitlines() if line.strip().startswith("Candidate:")), "(none)")
    if version == "(none)":
        raise HostError(f"apt knows no package {_PACKAGE}: run apt-get update")
    return version


def _unpack(directory: Path) -> None:
    _run(["apt-get", "download", "-qq", _PACKAGE], cwd=directory)  # checks the archive's signature and hash
    (package,) = directory.glob("*.deb")
    _run(["dpkg-deb", "--extract", package.name, "all"], cwd=directory)
    (directory / "usr/bin").mkdir(parents=True)
    (directory / "all/usr/bin/promtool").rename(directory / "usr/bin/promtool")
    shutil.rmtree(directory / "all")
    package.unlink()


def _run(command: list[str], cwd: Path | None = None) -> str:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostError(str(error)) from None
    if done.returncode:
        raise HostError(f"{' '.join(command)}: {done.stderr[-1000:]}")
    return done.stdout
