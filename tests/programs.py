"""Programs of the system that tests use: absent, they are a reason to skip on a developer's machine and a failure in CI
(.ci/setup installs them)."""

from __future__ import annotations

import os
import shutil

import pytest


def in_ci() -> bool:
    return os.environ.get("CI", "").lower() not in ("", "0", "false")


def need(program: str, package: str | None = None) -> str:
    """Path of `program`, which Debian's `package` (by default of the same name) brings."""
    path = shutil.which(program)
    if path is None:
        missing = f"{program} is not here: apt-get install {package or program}"
        if in_ci():
            pytest.fail(missing, pytrace=False)
        pytest.skip(missing)
    return path
