"""release.json as `appliance release add` writes it, for tests that need a release without adding one."""

from __future__ import annotations

import sys
from typing import Any


def release_json(name: str, **changes: Any) -> dict[str, Any]:
    """All keys of appliance/releases.py:Release; `changes` replace some."""
    table = {
        "schema": 1, "name": name, "created": "2026-11-29T19:02:26Z", "model_name": "tiny", "model": "tiny",
        "engine_version": "0.0.0-checkout", "python": sys.executable, "options": {}, "model_bytes": 1_000_000,
        "linked": False, "family": "llama", "dtype": "float32", "parameters": 1_000_000, "note": "",
    }  # fmt: skip
    assert changes.keys() <= table.keys()
    return table | changes
