"""`python -m appliance.credentials UNIT`: takes over changed credentials into a running unit, for `systemctl reload`.

With --check, before a unit starts: SetCredential= stands in for every file that systemd could not load, be it missing,
a directory or a dangling link, and the gateway, which may not look into root's directory, cannot tell these apart. So
root looks: keys that are there in whatever form and were not handed over keep the unit from starting without them.

systemd 252 copies LoadCredential= files when a unit starts and never again. The copies are files on a ramfs of the
unit's own, /run/credentials/UNIT, mounted read-only everywhere; the unit sees the same ramfs. So root remounts it
writable in a mount namespace that ends with this process (a copy of the host's: from an ExecReload= command systemd
hides /run/credentials), and replaces each file that differs, by rename: the unit reads the old one or the new one,
whole. Where the source is gone the copy becomes an empty line, as SetCredential= in
the unit does it at the start.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from appliance.log import ApplianceError, ExitCode, UsageError, report_error
from appliance.paths import Paths
from appliance.statefile import StateError, read_bounded

NAMES = ("api-keys", "tls-cert", "tls-key")
KEYS = "api-keys"
ABSENT = b"\n"
MAX_BYTES = 1 << 20  # systemd's limit of a unit's credentials
_HINT = "a regular file of root, mode 0600, of at most 1 MiB; without such a file there are no keys"
_UNIT = re.compile(r"appliance-[A-Za-z0-9@._-]{1,200}\.service")
_MOUNTS = Path("/run/credentials")
# <sched.h>, <sys/mount.h>
_CLONE_NEWNS = 0x00020000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 32, 4096, 16384, 1 << 18


class CredentialError(ApplianceError):
    """A credential is there, but not in a form that can be used: nothing may go on as if none were given."""

    exit_code = ExitCode.REFUSED


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
    refuse_unusable(path)
    try:
        return read_bounded(path, MAX_BYTES)
    except FileNotFoundError:
        return ABSENT
    except (StateError, OSError) as error:
        raise _unusable(path, error) from None


def refuse_unusable(path: Path) -> None:
    """CredentialError for what is there and is no file: a dangling link (also of its directory), a directory. A missing
    file is none given, and no error."""
    dangling = next((part for part in (path.parent, path) if part.is_symlink() and not part.exists()), None)
    if dangling is not None:
        raise CredentialError(
            f"{path} cannot be loaded: {dangling} is a link to {os.readlink(dangling)!r}, which is not there",
            hint=f"make it lead to the file (is what holds it mounted?), or remove it: {_HINT}",
        )
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unusable(path, error) from None
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "no regular file"
        raise CredentialError(f"{path} cannot be loaded: it is {kind}", hint=_HINT)


def _unusable(path: Path, error: StateError | OSError) -> CredentialError:
    reason = error.strerror if isinstance(error, OSError) else error.message
    return CredentialError(f"{path} cannot be loaded: {reason}", hint=_HINT)


def check_keys(source: Path, handed: Path | None) -> None:
    """CredentialError where the file of keys in `source` is there in whatever form and a unit with the credentials in
    `handed` would not have it. None: what it was handed cannot be seen, so the file alone is judged."""
    with contextlib.suppress(FileNotFoundError):
        if handed is not None and (handed / KEYS).read_bytes() != ABSENT:
            return  # keys were handed over, from there or from where a drop-in says
    path = source / KEYS
    if _content(path).strip() and handed is not None:
        raise CredentialError(f"{path} is there, but systemd has not loaded it", hint=f"try again; else: {_HINT}")


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
    parser.add_argument("--check", action="store_true", help="refuse if its keys are there and were not handed to it")
    args = parser.parse_args(argv)
    try:
        if not _UNIT.fullmatch(args.unit):
            raise UsageError(f"{args.unit!r} is no unit of ours", hint="appliance-gateway@stable.service")
        if args.check:
            handed = _MOUNTS / args.unit
            check_keys(Paths.default().etc / "credentials", handed if handed.is_dir() else None)
            return ExitCode.DONE
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
