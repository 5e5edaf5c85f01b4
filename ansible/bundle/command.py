"""Runs the programs of the controller that the bundle needs (pip, apt-get, readelf): no shell, no input, a deadline."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from appliance.log import ApplianceError


class BundleError(ApplianceError):
    """The bundle cannot be built; says what is missing or wrong."""


def run(
    command: Sequence[str | Path], *, cwd: Path | None = None, env: Mapping[str, str] | None = None,
    timeout: float = 900.0, hint: str | None = None,
) -> str:  # fmt: skip
    """Its standard output. BundleError with the end of both outputs where it fails."""
    shown = " ".join(str(word) for word in command[:4])
    try:
        done = subprocess.run(
            [str(word) for word in command], cwd=cwd, env=os.environ | {"LC_ALL": "C.UTF-8"} | dict(env or {}),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout,
        )  # fmt: skip
    except FileNotFoundError:
        raise BundleError(f"there is no {command[0]} here", hint=hint) from None
    except subprocess.TimeoutExpired:
        raise BundleError(
            f"`{shown} ...` was not done in {timeout:g} s", hint="is the network slow? run it again"
        ) from None
    if done.returncode:
        text = (done.stdout + done.stderr).strip()[-2000:]
        raise BundleError(f"`{shown} ...` failed with status {done.returncode}: {text}", hint=hint)
    return done.stdout
