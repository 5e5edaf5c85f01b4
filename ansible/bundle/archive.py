"""The bundle's manifest and its tar: the same content gives the same bytes."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path
from typing import Any

from wheels import sha256

SCHEMA = 1
MANIFEST = "manifest.json"
COMMANDS = ("appliance", "healthcheck", "canary")  # console scripts of pyproject.toml that get a link in /usr/bin


def make_manifest(content: Path, *, version: str, gpu: bool, packages: list[dict[str, str]]) -> dict[str, Any]:
    """Every file by its path in the bundle, with size, SHA-256 and mode (755 or 644). `host/` is what goes to the same
    place below / on the host; `host_links` are the symbolic links."""
    files = {}
    for path in sorted(content.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path} is neither file nor directory")
        if path.is_file():
            mode = "0755" if path.stat().st_mode & 0o100 else "0644"
            name = str(path.relative_to(content))
            files[name] = {"size": path.stat().st_size, "sha256": sha256(path), "mode": mode}
    return {
        "schema": SCHEMA, "name": "appliance", "version": version, "gpu": gpu,
        "target": {"distribution": "debian", "release": "12", "architecture": "x86_64", "python": "3.11"},
        "requirements": "requirements.txt", "packages": packages,
        "host_links": {f"usr/bin/{name}": f"/usr/lib/appliance/current/venv/bin/{name}" for name in COMMANDS},
        "files": files,
    }  # fmt: skip


def write(content: Path, manifest: dict[str, Any], output: Path) -> Path:
    """appliance-VERSION-debian12-x86_64[-gpu].tar, the manifest first, and beside it its SHA-256."""
    (content / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    flavour = "-gpu" if manifest["gpu"] else ""
    target = output / f"appliance-{manifest['version']}-debian12-x86_64{flavour}.tar"
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with tarfile.open(temporary, "w", format=tarfile.PAX_FORMAT) as tar:
            for name in (MANIFEST, *sorted(manifest["files"])):
                entry = tarfile.TarInfo(name)
                entry.size = (content / name).stat().st_size
                entry.mode = int(manifest["files"].get(name, {"mode": "0644"})["mode"], 8)
                entry.mtime = int(os.environ["SOURCE_DATE_EPOCH"])
                with (content / name).open("rb") as file:
                    tar.addfile(entry, file)
        digest = sha256(temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    target.with_name(target.name + ".sha256").write_text(f"{digest}  {target.name}\n")
    return target
