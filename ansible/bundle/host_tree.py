"""The part of the bundle that goes to fixed places of the host: units, sysusers.d, tmpfiles.d, manual page, completion,
licence notes. All of it below /usr: /etc is the admin's.
"""

from __future__ import annotations

import gzip
import os
import shutil
import sys
from pathlib import Path

from archive import COMMANDS
from command import BundleError, run
from wheels import license_of, metadata

# systemd/PATTERN of the checkout -> directory of the host
DOC = "usr/share/doc/appliance"
PLACES = {
    "*.service": "usr/lib/systemd/system",
    "*.slice": "usr/lib/systemd/system",
    "*.target": "usr/lib/systemd/system",
    "preset/*.preset": "usr/lib/systemd/system-preset",
    "sysusers.d/*.conf": "usr/lib/sysusers.d",
    "tmpfiles.d/*.conf": "usr/lib/tmpfiles.d",
    "udev/*.rules": "usr/lib/udev/rules.d",
    "examples/*.conf": f"{DOC}/examples",
    "../appliance/alerts/*.yml": f"{DOC}/alerts",
    "../appliance/alerts/runbooks/*.md": f"{DOC}/runbooks",  # what runbook_url of the rules names
}
NOTICE = """\
LLM appliance {version}, Apache-2.0. This bundle also holds the following software, each under its own licence. The full
texts are in the *.dist-info directories below /usr/lib/appliance/{version}/venv and, for Debian packages, in
/usr/share/doc/PACKAGE/copyright.

Python packages
{wheels}

Debian packages
{packages}
"""


def collect(root: Path, tree: Path, content: Path, *, wheels: Path, packages: list[dict[str, str]]) -> None:
    """Fills content/host. `tree` is the clean copy of our sources; its own command line describes itself."""
    host = content / "host"
    for pattern, place in PLACES.items():
        found = sorted((root / "systemd").glob(pattern))
        if not found:
            raise BundleError(f"systemd/{pattern} is not there", hint="this checkout is incomplete; see `git status`")
        (host / place).mkdir(parents=True, exist_ok=True)
        for path in found:
            shutil.copyfile(path, host / place / path.name)
    for name in COMMANDS:
        for shell, place in (("bash", "bash-completion/completions/"), ("zsh", "zsh/vendor-completions/_")):
            text = _own_output(tree, "completion", shell, "--program", name)
            _put(host / f"usr/share/{place}{name}", text.encode())
    for name, section in (*((name, "8") for name in COMMANDS), ("appliance.toml", "5")):
        program = name.removesuffix(".toml")
        page = _own_output(tree, "man", "--page", section, "--program", program).encode()
        packed = gzip.compress(page, mtime=int(os.environ["SOURCE_DATE_EPOCH"]))
        _put(host / f"usr/share/man/man{section}/{name}.{section}.gz", packed)
    _put(host / DOC / "THIRD-PARTY", _notice(wheels, packages).encode())


def _put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _own_output(tree: Path, *arguments: str) -> str:
    text = run([sys.executable, "-m", "appliance", *arguments], cwd=tree, env={"PYTHONDONTWRITEBYTECODE": "1"})
    if not text.strip():
        raise BundleError(f"`appliance {' '.join(arguments)}` printed nothing")
    return text


def _notice(wheels: Path, packages: list[dict[str, str]]) -> str:
    lines, version = [], ""
    for wheel in sorted(wheels.glob("*.whl")):
        data = metadata(wheel)
        if data["Name"] == "llm-appliance":
            version = str(data["Version"])
        else:
            lines.append(f"  {data['Name']} {data['Version']}: {license_of(data)}")
    debs = (f"  {package['name']} {package['version']}" for package in packages)
    return NOTICE.format(version=version, wheels="\n".join(lines), packages="\n".join(debs))
