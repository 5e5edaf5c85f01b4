"""What a check gets (Host) and gives (Finding)."""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar, cast

from appliance import command
from appliance.hostconfig import HostConfig
from appliance.log import ApplianceError
from appliance.paths import Paths
from appliance.statefile import read_bounded

_READ_LIMIT = 8 << 20
_COMMAND_SECONDS = 15.0
NOT_NEEDED = "not needed: backend cpu"  # what checks of NVIDIA parts find on a host without GPUs


class Status(StrEnum):
    OK = "ok"
    DEGRADED = "degraded"  # it serves, but somebody should mend this
    FAILED = "failed"  # it does not serve as promised
    UNKNOWN = "unknown"  # could not be found out; never a pass, never a failure


@dataclass(frozen=True, slots=True)
class Finding:
    """One line for people: what is so (`text`) and what to do about it (`fix`)."""

    status: Status
    text: str
    fix: str | None = None


def ok(text: str) -> Finding:
    return Finding(Status.OK, text)


def degraded(text: str, fix: str) -> Finding:
    return Finding(Status.DEGRADED, text, fix)


def failed(text: str, fix: str) -> Finding:
    return Finding(Status.FAILED, text, fix)


def unknown(text: str, fix: str | None = None) -> Finding:
    return Finding(Status.UNKNOWN, text, fix)


@dataclass(frozen=True, slots=True)
class Device:
    """A character device node."""

    major: int
    minor: int
    mode: int  # permission bits


@dataclass(frozen=True, slots=True)
class Space:
    """Of a file system."""

    total_bytes: int
    free_bytes: int
    free_inodes: int | None  # None: this file system does not count them


def _device(path: Path) -> Device | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    if not stat.S_ISCHR(found.st_mode):
        return None
    return Device(os.major(found.st_rdev), os.minor(found.st_rdev), stat.S_IMODE(found.st_mode))


def _space(path: Path) -> Space:
    found = os.statvfs(path)
    inodes = found.f_favail if found.f_files else None
    return Space(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize, inodes)


@dataclass(frozen=True, slots=True)
class Host:
    """The host that is looked at. Tests give a tree under `root`, their own `run`, `device` and `space`."""

    paths: Paths
    config: HostConfig | None  # None: appliance.toml cannot be used (a check of its own says why)
    root: Path = Path("/")
    run: command.Runner = field(default=command.run)
    device: Callable[[Path], Device | None] = field(default=_device)
    space: Callable[[Path], Space] = field(default=_space)

    @property
    def cpu_only(self) -> bool:
        return self.config is not None and self.config.gpus.backend == "cpu"

    def read(self, path: str) -> str | None:
        """Text of a file below the root; None if it is not there or cannot be read."""
        try:
            return read_bounded(self.root / path.lstrip("/"), _READ_LIMIT).decode(errors="replace")
        except (OSError, ApplianceError):
            return None

    def command(self, *argv: str) -> command.Result:
        return self.run(list(argv), timeout=_COMMAND_SECONDS)

    def units(self, names: Iterable[str], properties: Iterable[str]) -> dict[str, dict[str, str]] | None:
        """`systemctl show`: unit -> property -> value; None where systemd does not answer."""
        wanted, keys = list(names), ["Id", *properties]
        result = self.command("systemctl", "show", f"--property={','.join(keys)}", "--", *wanted)
        if not result.ok:
            return None
        blocks = [_properties(block) for block in result.text.strip().split("\n\n")]
        return dict(zip(wanted, blocks)) if len(blocks) == len(wanted) else None


def _properties(block: str) -> dict[str, str]:
    pairs = (line.partition("=") for line in block.splitlines())
    return {key: value for key, equals, value in pairs if equals}


Check = Callable[[Host], Finding | list[Finding]]
"""Registered under a name in the CHECKS of its module."""


_Found = TypeVar("_Found", bound=Finding | list[Finding])


def of_cuda(check: Callable[[Host], _Found]) -> Callable[[Host], _Found]:
    """A check that only counts with backend cuda. Where the configuration cannot be read nobody knows the backend, and
    what is bad with cuda is unknown."""

    @functools.wraps(check)
    def cautious(host: Host) -> _Found:
        found = check(host)
        if host.config is not None:
            return found
        cautiously = [_if_cuda(each) for each in found] if isinstance(found, list) else _if_cuda(found)
        return cast(_Found, cautiously)

    return cautious


def _if_cuda(finding: Finding) -> Finding:
    if finding.status not in (Status.FAILED, Status.DEGRADED):
        return finding
    return unknown(f"the configuration cannot be read; with backend cuda: {finding.text}", finding.fix)


@dataclass(frozen=True, slots=True)
class Line:
    """A finding with where it comes from."""

    group: str
    check: str
    finding: Finding

    def as_json(self) -> dict[str, Any]:
        finding = self.finding
        return {"group": self.group, "check": self.check, "status": str(finding.status)} | {
            "text": finding.text,
            "fix": finding.fix,
        }


def run_checks(groups: dict[str, dict[str, Check]], host: Host) -> list[Line]:
    """All checks in order. One that breaks is reported as unknown, with what broke it, and the others go on."""
    lines = []
    for group, checks in groups.items():
        for name, check in checks.items():
            try:
                found = check(host)
            except ApplianceError as error:
                found = failed(error.message, error.hint or "see the message")
            except Exception as error:
                found = unknown(
                    f"the check itself broke: {type(error).__name__}: {error}", "report this: appliance bug-report"
                )
            lines += [Line(group, name, finding) for finding in (found if isinstance(found, list) else [found])]
    return lines
