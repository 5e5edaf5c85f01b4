# Copyright: the LLM appliance maintainers
# SPDX-License-Identifier: Apache-2.0
"""The programs that installing needs on the host: dpkg, the venv and pip, sysusers, tmpfiles, systemctl, udevadm.

`Run` is AnsibleModule.run_command: (status, stdout, stderr). Everything works offline, from the unpacked bundle.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from ansible_collections.appliance.host.plugins.module_utils.installation import Installation, InstallError, unpack

Run = Callable[..., tuple[int, str, str]]
PYTHON = "/usr/bin/python3"
LOCK_SECONDS = 300.0
_DPKG_LOCK = Path("/var/lib/dpkg/lock-frontend")
SMOKE = """\
import engine._ring, engine.tokenizer._bpe, kernels._cpu, numpy, aiohttp, uvloop, msgspec, gi, pydbus
from appliance import __version__
print(__version__)
"""


def check(run: Run, command: list[str], what: str, **options: Any) -> str:
    """stdout; InstallError with the end of both outputs where it fails."""
    status, out, error = run(command, **options)
    if status != 0:
        raise InstallError(f"{what} failed (status {status}): {(out + error).strip()[-1500:]}")
    return out


def installed_packages(run: Run) -> set[str]:
    """Names of the Debian packages that are installed in full."""
    out = check(run, ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n"], "dpkg-query")
    return {words[0] for line in out.splitlines() if len(words := line.split()) == 2 and words[1] == "installed"}


def _lock_dpkg() -> IO[str]:
    """dpkg's front-end lock, as apt takes it: an unattended upgrade is waited for."""
    file = _DPKG_LOCK.open("w")
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except OSError:
            if time.monotonic() >= deadline:
                file.close()
                message = f"another package manager has held {_DPKG_LOCK} for {LOCK_SECONDS:g} s; run this again later"
                raise InstallError(message) from None
            time.sleep(1.0)


def install_packages(run: Run, bundle: Path, packages: list[dict[str, str]]) -> None:
    """Installs .deb files of the unpacked bundle, all at once."""
    environment = {"DEBIAN_FRONTEND": "noninteractive", "DPKG_FRONTEND_LOCKED": "1"}
    with _lock_dpkg():
        files = [str(bundle / package["file"]) for package in packages]
        check(run, ["dpkg", "--force-confdef", "--force-confold", "-i", *files], "dpkg", environ_update=environment)


def remove_packages(run: Run, packages: list[str]) -> tuple[list[str], str]:
    """Purges packages that we brought; (what was removed, why not the rest). What others need by now stays."""
    there = sorted(installed_packages(run) & set(packages))
    if not there:
        return [], ""
    environment = {"DEBIAN_FRONTEND": "noninteractive", "DPKG_FRONTEND_LOCKED": "1"}
    with _lock_dpkg():
        status, out, error = run(["dpkg", "--no-act", "--purge", *there])
        if status != 0:
            return [], f"kept {', '.join(there)}: {(out + error).strip()[-500:]}"
        check(run, ["dpkg", "--purge", *there], "dpkg --purge", environ_update=environment)
    return there, ""


def build_version(
    run: Run, host: Installation, source: Path, manifest_data: bytes, version: str,
    before_venv: Callable[[Path], None],
) -> None:  # fmt: skip
    """/usr/lib/appliance/VERSION from a bundle file: unpacked, checked, its venv made and tried, then renamed.
    `before_venv` gets the unpacked bundle: it installs Debian packages that the venv shows through."""
    host.lib.mkdir(mode=0o755, parents=True, exist_ok=True)
    host.clear_leftovers()
    new = host.lib / f".new-{version}"
    try:
        _fill(run, new, source, manifest_data, host.directory(version), before_venv)
        os.sync()  # else a power cut could leave the name with empty files behind it
        new.rename(host.directory(version))
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        if not any(host.lib.iterdir()):
            host.lib.rmdir()
        raise


def _fill(
    run: Run, new: Path, source: Path, manifest_data: bytes, final: Path, before_venv: Callable[[Path], None]
) -> None:
    unpacked = new / "unpacked"
    unpacked.mkdir(parents=True)
    unpack(source, unpacked, manifest_data)
    before_venv(unpacked)
    make_venv(run, unpacked, new / "venv", final / "venv")
    tried = check(
        run, [str(new / "venv/bin/python"), "-P", "-c", SMOKE], "the first import of our code", cwd="/"
    ).strip()
    if tried != final.name:
        raise InstallError(f"the bundle says version {final.name}, its code says {tried}; build it again")
    keep = new / "bundle"
    keep.mkdir()
    for name in ("manifest.json", "requirements.txt", "host"):
        (unpacked / name).rename(keep / name)
    shutil.rmtree(unpacked)


def make_venv(run: Run, bundle: Path, venv: Path, final: Path) -> None:
    """A venv at `venv` for use at `final`, filled from the bundle's wheels by the bundle's own pip. It shows the
    system's packages through (gi, pydbus), but all that we need beyond them is in it: --ignore-installed."""
    check(run, [PYTHON, "-I", "-m", "venv", "--without-pip", "--system-site-packages", str(venv)], "python3 -m venv")
    (pip,) = (bundle / "wheels").glob("pip-*.whl")
    command = [
        PYTHON, "-I", f"{pip}/pip", "--isolated", "--python", str(venv / "bin/python"), "install", "--quiet",
        "--disable-pip-version-check", "--no-input", "--no-cache-dir", "--no-warn-script-location", "--no-index",
        "--find-links", str(bundle / "wheels"), "--no-deps", "--ignore-installed", "--require-hashes",
        "--requirement", str(bundle / "requirements.txt"),
    ]  # fmt: skip
    check(run, command, "pip", environ_update={"PYTHONPATH": "", "SOURCE_DATE_EPOCH": "315532800"})
    _relocate(venv, final)


def _relocate(venv: Path, final: Path) -> None:
    """Scripts name their interpreter by its full path: where the venv will be, not where it is built."""
    for path in (venv / "pyvenv.cfg", *(venv / "bin").iterdir()):
        if path.is_file() and not path.is_symlink():
            data = path.read_bytes()
            if str(venv).encode() in data:
                path.write_bytes(data.replace(str(venv).encode(), str(final).encode()))


def settle(run: Run, changed: list[str]) -> None:
    """What a Debian package would do after vendor files changed: users, directories, units, udev rules."""
    places = {str(Path(name).parent) for name in changed}
    if "usr/lib/sysusers.d" in places:
        check(run, ["systemd-sysusers", "/usr/lib/sysusers.d/appliance.conf"], "systemd-sysusers")
    if "usr/lib/tmpfiles.d" in places:
        check(run, ["systemd-tmpfiles", "--create", "/usr/lib/tmpfiles.d/appliance.conf"], "systemd-tmpfiles")
    if places & {"usr/lib/systemd/system", "usr/lib/systemd/system-preset"}:
        check(run, ["systemctl", "daemon-reload"], "systemctl daemon-reload")
    if "usr/lib/udev/rules.d" in places and shutil.which("udevadm"):
        run(["udevadm", "control", "--reload"])  # no udevd in a container: nothing to tell
