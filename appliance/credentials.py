"""`python -m appliance.credentials UNIT`: takes over changed credentials into a running unit, for `systemctl reload`.

systemd 252 copies LoadCredential= files when a unit starts and never again. The copies are files on a ramfs of the
unit's own, /run/credentials/UNIT, mounted read-only everywhere; the unit sees the same ramfs. So root remounts it
writable in a mount namespace that ends with this process (a copy of the host's: from an ExecReload= command systemd
hides /run/credentials), and replaces each file that differs, by rename: the unit reads the old one or the new one,
whole. Where the source is gone the copy becomes an empty line, as SetCredential= in
the unit does it at the start.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
from collections.abc import Sequence
from pathlib import Path

from appliance.log import ApplianceError, ExitCode, UsageError, report_error
from appliance.paths import Paths

NAMES = ("api-keys", "tls-cert", "tls-key")
ABSENT = b"\n"
_MAX_BYTES = 1 << 20  # systemd's limit of a unit's credentials
_UNIT = re.compile(r"appliance-[A-Za-z0-9@._-]{1,200}\.service")
_MOUNTS = Path("/run/credentials")
# <sched.h>, <sys/mount.h>
_CLONE_NEWNS = 0x00020000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 32, 4096, 16384, 1 << 18


def changed(source: Path, target: Path) -> dict[str, bytes]:
    """Name -> new content of each credential in `target` that differs from its file in `source`."""
    new = {}
    for name in NAMES:
        copy = target / name
        if not copy.is_file():
            continue  # this unit has no such credential
        content = _content(source / name)
        if content != copy.read_bytes():
            new[name] = content
    return new


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return ABSENT
    except OSError as error:
        raise ApplianceError(f"cannot read {path}: {error.strerror}", hint="a regular file of root, 0600") from None
    if len(data) > _MAX_BYTES:
        raise ApplianceError(f"{path} is larger than {_MAX_BYTES} bytes", hint="systemd takes no more")
    return data


def replace(target: Path, new: dict[str, bytes]) -> None:
    """Writes each of `new` beside its copy, with that one's owner and mode, and renames it over it."""
    for name, content in new.items():
        like = (target / name).stat()
        temporary = target / f".{name}.new"
        temporary.unlink(missing_ok=True)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            os.fchown(fd, like.st_uid, like.st_gid)
            os.fchmod(fd, like.st_mode & 0o777)
        os.replace(temporary, target / name)


class _Mounts:
    """The system calls; Python 3.11 has neither setns nor unshare."""

    def __init__(self, unit: str) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._unit = unit

    def enter_private_copy(self) -> None:
        """The host's mounts, in a namespace of this process alone."""
        fd = os.open("/proc/1/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._check(self._libc.setns(fd, _CLONE_NEWNS), "cannot enter the host's mount namespace")
        finally:
            os.close(fd)
        self._check(self._libc.unshare(_CLONE_NEWNS), "cannot make a mount namespace")
        self._mount(None, Path("/"), _MS_REC | _MS_PRIVATE)

    def make_writable(self, target: Path) -> None:
        self._mount(None, target, _MS_REMOUNT | _MS_BIND | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)

    def _mount(self, source: bytes | None, target: Path, flags: int) -> None:
        done = self._libc.mount(source, os.fsencode(target), None, ctypes.c_ulong(flags), None)
        self._check(done, f"cannot remount {target}")

    def _check(self, result: int, what: str) -> None:
        if result != 0:
            hint = f"run as root; `systemctl restart {self._unit}` takes the credentials over, with a pause"
            raise ApplianceError(f"{what}: {os.strerror(ctypes.get_errno())}", hint=hint)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m appliance.credentials", description=__doc__.partition("\n")[0])
    parser.add_argument("unit", help="for example appliance-gateway@stable.service")
    args = parser.parse_args(argv)
    try:
        if not _UNIT.fullmatch(args.unit):
            raise UsageError(f"{args.unit!r} is no unit of ours", hint="appliance-gateway@stable.service")
        mounts, target = _Mounts(args.unit), _MOUNTS / args.unit
        mounts.enter_private_copy()
        if not target.is_dir():
            raise ApplianceError(f"{target} is not there", hint=f"does {args.unit} run? `systemctl status {args.unit}`")
        new = changed(Paths.default().etc / "credentials", target)
        if new:
            mounts.make_writable(target)
            replace(target, new)
        print(f"credentials of {args.unit}: {', '.join(new) if new else 'nothing'} changed")
    except ApplianceError as error:
        report_error(error.message, hint=error.hint, code=error.exit_code)
        return error.exit_code
    except OSError as error:
        report_error(str(error), hint="run as root", code=ExitCode.FAILED)
        return ExitCode.FAILED
    return ExitCode.DONE


if __name__ == "__main__":
    raise SystemExit(main())
