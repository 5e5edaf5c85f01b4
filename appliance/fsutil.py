"""File system work of the model store: locks, durable writes, checked copies, and errors that say what to do.

Nothing is ever changed in place: files are built aside, fsynced, then renamed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from appliance.log import ApplianceError, BusyError, format_bytes
from engine.errors import CheckpointError, EngineError
from engine.jsonfile import read_json_object

CHUNK_BYTES = 4 * 1024 * 1024
_FICLONE = 0x40049409  # linux/fs.h: share the extents of another file (btrfs, xfs)
_RENAME_EXCHANGE = 2  # linux/fs.h
_AT_FDCWD = -100
_LOCK_POLL_SECONDS = 0.1

Advance = Callable[[int], None]
"""Called with the number of bytes just done."""


class StoreError(ApplianceError):
    """A model or the store cannot be used as asked; names the file."""


_HINTS = {
    errno.ENOSPC: "free some space, or put the store elsewhere with APPLIANCE_MODELS=DIR",
    errno.EDQUOT: "the quota is used up: free some space, or put the store elsewhere with APPLIANCE_MODELS=DIR",
    errno.EACCES: "check the owner and mode of the directory, run as its owner, or set APPLIANCE_MODELS=DIR",
    errno.EPERM: "check the owner and mode of the directory, run as its owner, or set APPLIANCE_MODELS=DIR",
    errno.EROFS: "the file system is mounted read-only; put the store elsewhere with APPLIANCE_MODELS=DIR",
    errno.EIO: "the disk reports I/O errors; look at the kernel log (dmesg)",
}


@contextlib.contextmanager
def explain_os_errors(doing: str) -> Iterator[None]:
    """Turns an OSError inside into a StoreError that names the file and the next step."""
    try:
        yield
    except OSError as error:
        where = f": {os.fsdecode(error.filename)}" if error.filename is not None else ""
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise StoreError(f"{doing}: {reason}{where}", hint=_HINTS.get(error.errno or 0)) from error


@contextlib.contextmanager
def explain_engine_errors(doing: str = "") -> Iterator[None]:
    """Turns an error of the engine inside into a StoreError with its words and hint."""
    try:
        yield
    except EngineError as error:
        cause = error.__cause__
        hint = error.hint or (_HINTS.get(cause.errno or 0) if isinstance(cause, OSError) else None)
        raise StoreError(f"{doing}: {error.message}" if doing else error.message, hint=hint) from error


@contextlib.contextmanager
def locked(
    path: Path, what: str, *, wait_seconds: float = 0, on_wait: Callable[[], None] | None = None
) -> Iterator[None]:
    """Holds an exclusive flock on `path` (created if missing, for its owner alone: whoever may open a file for reading
    may lock it); the kernel drops it when the process dies, however it
    dies. If another process holds it: calls `on_wait` once and waits for at most `wait_seconds`, then BusyError."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)  # the same file, so the same lock
    try:
        if not _try_lock(fd) and not (wait_seconds > 0 and _wait_for_lock(fd, wait_seconds, on_wait)):
            waited = f" (waited {wait_seconds:g} s)" if wait_seconds > 0 else ""
            raise BusyError(f"{what} is being changed by another process{waited}", hint="wait for it to end")
        yield
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_for_lock(fd: int, seconds: float, on_wait: Callable[[], None] | None) -> bool:
    """Asks again and again: a blocking flock has no time limit."""
    if on_wait:
        on_wait()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(_LOCK_POLL_SECONDS)
        if _try_lock(fd):
            return True
    return False


def read_json(path: Path, *, limit: int) -> dict[str, Any]:
    """The JSON object in a regular file of at most `limit` bytes, read as strictly as the engine reads its own."""
    with explain_engine_errors():
        return read_json_object(path, max_bytes=limit, error=CheckpointError)


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """A read-only descriptor of a regular file (symlinks followed); never blocks on a FIFO or a device."""
    with explain_os_errors(f"cannot read {path.name}"):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise StoreError(f"{path} is not a regular file")
        yield fd
    finally:
        os.close(fd)


def write_durable(path: Path, data: bytes) -> None:
    """Replaces `path` by `data` atomically (tmp + fsync + rename + fsync of the directory)."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def fsync_dir(path: Path) -> None:
    """Makes renames and creations inside `path` survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sha256_file(path: Path, advance: Advance | None = None) -> tuple[int, str]:
    """(size, SHA-256 in hex) of a regular file."""
    digest, size = hashlib.sha256(), 0
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with open_regular(path) as fd:
        while count := os.readv(fd, [buffer]):
            digest.update(buffer[:count])
            size += count
            if advance:
                advance(count)
    return size, digest.hexdigest()


def copy_file(source: Path, target: Path, advance: Advance | None = None) -> tuple[int, str]:
    """Copies a regular file to a new file, fsynced, mode 0644; (size, SHA-256) of what was written.

    Shares the extents where the file system can (no hardlink: a later edit of the source must not change the model).
    A source that changes meanwhile is refused.
    """
    with open_regular(source) as source_fd:
        before = os.fstat(source_fd)
        target_fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            shared = _reflink(source_fd, target_fd)
            size, digest = _copy_or_hash(target_fd if shared else source_fd, None if shared else target_fd, advance)
            os.fchmod(target_fd, 0o644)
            os.fsync(target_fd)
        finally:
            os.close(target_fd)
        after = os.fstat(source_fd)
    if size != before.st_size or (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size):
        raise StoreError(f"{source} changed while it was being copied", hint="try again when nothing writes to it")
    return size, digest


def can_share(source: Path, directory: Path) -> bool:
    """Whether a copy of `source` in `directory` would share its extents, and so take no space."""
    probe = directory / f".share.{os.getpid()}"
    with open_regular(source) as source_fd:
        probe_fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            return _reflink(source_fd, probe_fd)
        finally:
            os.close(probe_fd)
            probe.unlink()


def _reflink(source_fd: int, target_fd: int) -> bool:
    try:
        fcntl.ioctl(target_fd, _FICLONE, source_fd)
    except OSError:
        return False  # another file system or one without shared extents: the bytes are copied instead
    return True


def _copy_or_hash(source_fd: int, target_fd: int | None, advance: Advance | None) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    buffer = memoryview(bytearray(CHUNK_BYTES))
    while count := os.readv(source_fd, [buffer]):
        chunk = buffer[:count]
        digest.update(chunk)
        while target_fd is not None and chunk:
            chunk = chunk[os.write(target_fd, chunk) :]
        size += count
        if advance:
            advance(count)
    return size, digest.hexdigest()


def need_space(directory: Path, num_bytes: int, what: str) -> None:
    """Refuses before the work starts if `num_bytes` do not fit on the file system of `directory`."""
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise StoreError(
            f"{what} needs {format_bytes(num_bytes)}, but only {format_bytes(free)} are free in {directory}",
            hint=_HINTS[errno.ENOSPC],
        )


def publish_dir(staged: Path, target: Path) -> None:
    """Puts the finished directory `staged` at `target` in one step. If `target` exists the two are exchanged, and the
    old one is then at `staged`, for the caller to delete."""
    if not os.path.lexists(target):
        os.rename(staged, target)
    elif not _exchange(staged, target):
        # No atomic exchange on this file system: between these two renames the name is absent, never half there.
        retired = staged.with_name(staged.name + ".old")
        os.rename(target, retired)
        os.rename(staged, target)
        os.rename(retired, staged)
    fsync_dir(target.parent)
    fsync_dir(staged.parent)


def _exchange(first: Path, second: Path) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):  # glibc before 2.28, old musl
        return False
    if libc.renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS):
        return False
    raise OSError(code, os.strerror(code), str(first))
