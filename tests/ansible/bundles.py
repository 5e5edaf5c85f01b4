"""Small bundles for tests: real in form, made by the builder's own archive.py, without real wheels."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

from tests.ansible.modules import load_builder

archive = load_builder("archive")
UNIT = "host/usr/lib/systemd/system/appliance.target"


def make_bundle(directory: Path, *, version: str = "1.0", files: dict[str, str] | None = None) -> Path:
    """A bundle with requirements.txt, a unit, and `files` (path in the bundle -> text; "" leaves one out)."""
    content = directory / f"content-{version}"
    texts = {"requirements.txt": "", UNIT: f"[Unit]\nDescription={version}\n", "wheels/a.whl": "wheel " * 300}
    texts |= files or {}
    shutil.rmtree(content, ignore_errors=True)
    for name, text in texts.items():
        path = content / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    manifest: dict[str, Any] = archive.make_manifest(content, version=version, gpu=False, packages=[])
    with mock.patch.dict(os.environ, SOURCE_DATE_EPOCH="1000000000"):
        bundle: Path = archive.write(content, manifest, directory)
    return bundle
