"""How this distribution starts a Python process of its own, from any directory.

`python -m` puts the current directory first on sys.path, so a stray uvloop.py there would run as us; -P (3.11) keeps it
out. A checkout that is not installed is named in PYTHONPATH instead.
"""

from __future__ import annotations

import os
import site
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]


def python_module(module: str) -> list[str]:
    """argv of `python -m module`, to be followed by its arguments."""
    return [sys.executable, "-P", "-m", module]


def python_env() -> dict[str, str]:
    """Environment in which python_module() finds our packages."""
    env = dict(os.environ)
    if str(_ROOT) not in site.getsitepackages():
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), env.get("PYTHONPATH")]))
    return env
