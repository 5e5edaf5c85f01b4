"""Runs commands of the host. The only user of subprocess for that in the control plane's CLI.

argv lists only, never a shell; every call has a time limit and a limit of output, after which the whole process group
is killed; the locale is C, so that what is parsed does not depend on the caller's.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, NoReturn

from appliance.log import ApplianceError, ExitCode

MAX_OUTPUT_BYTES = 4 << 20
NOT_FOUND = 127  # as a shell says it
_KILL_SECONDS = 5.0
_KEPT = ("PATH", "HOME", "TERM", "XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS")


class CommandError(ApplianceError):
    """A command of the host failed; the message has its last words."""


class CommandTimeout(CommandError):
    """A command of the host took too long and was killed."""

    exit_code = ExitCode.INCONCLUSIVE


@dataclass(frozen=True, slots=True)
class Result:
    """How a command ended. `code` is -N after signal N, NOT_FOUND where there is no such program."""

    argv: tuple[str, ...]
    code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    truncated: bool = False  # more than the limit was written; the command was then killed

    @property
    def ok(self) -> bool:
        return self.code == 0 and not self.timed_out and not self.truncated

    @property
    def text(self) -> str:
        return self.stdout.decode(errors="replace")

    def why(self) -> str:
        """In a few words, how it failed."""
        if self.code == NOT_FOUND and not self.stdout:
            return f"{self.argv[0]} is not installed"
        if self.timed_out:
            return f"{self.argv[0]} did not end in time and was killed"
        if self.truncated:
            return f"{self.argv[0]} wrote too much and was killed"
        words = self.stderr.decode(errors="replace").strip().splitlines()
        last = f": {words[-1][:300]}" if words else ""
        how = f"signal {-self.code}" if self.code < 0 else f"exit code {self.code}"
        return f"{self.argv[0]} ended with {how}{last}"


Runner = Callable[..., Result]
"""`run`, or what a test puts in its place: (argv, *, timeout, limit=...) -> Result."""


def run(
    argv: Sequence[str],
    *,
    timeout: float,
    limit: int = MAX_OUTPUT_BYTES,
    stdin: bytes = b"",
    environ: Mapping[str, str] | None = None,
) -> Result:
    """Runs `argv` for at most `timeout` seconds and `limit` bytes of each of stdout and stderr. Never raises for what
    the command does: see Result. `stdin` is what it may read, `environ` are variables beside ours."""
    environment = dict(environ or {}) | {name: os.environ[name] for name in _KEPT if name in os.environ}
    environment |= {"LC_ALL": "C.UTF-8", "SYSTEMD_COLORS": "0", "SYSTEMD_PAGER": "cat", "PAGER": "cat"}
    given = _file_of(stdin) if stdin else subprocess.DEVNULL
    try:
        child = subprocess.Popen(
            list(argv), stdin=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
            start_new_session=True,
        )  # fmt: skip
    except FileNotFoundError:
        return Result(tuple(argv), NOT_FOUND, b"", b"")
    except OSError as error:
        return Result(tuple(argv), 126, b"", (error.strerror or str(error)).encode())
    finally:
        if given != subprocess.DEVNULL:
            os.close(given)
    try:
        outputs, timed_out, truncated = _collect(child, time.monotonic() + timeout, limit)
        code = _end(child) if timed_out or truncated else child.wait()
    except BaseException:
        _end(child)
        raise
    finally:
        for pipe in (child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()
    return Result(tuple(argv), code, bytes(outputs[0]), bytes(outputs[1]), timed_out, truncated)


def _file_of(data: bytes) -> int:
    """A file in memory to read `data` from: unlike a pipe, nobody has to write while the command runs."""
    fd = os.memfd_create("stdin", os.MFD_CLOEXEC)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _collect(child: subprocess.Popen[bytes], deadline: float, limit: int) -> tuple[list[bytearray], bool, bool]:
    """(stdout and stderr, timed out?, truncated?). Ends when both pipes are closed and the child has ended: a daemon
    that inherited a pipe counts as output that does not end, and runs into the time limit."""
    outputs = [bytearray(), bytearray()]
    with selectors.DefaultSelector() as selector:
        for number, pipe in enumerate((child.stdout, child.stderr)):
            assert pipe is not None
            selector.register(pipe, selectors.EVENT_READ, number)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                return outputs, True, False
            for key, _ in selector.select(left):
                block = _read(key.fileobj)
                if not block:
                    selector.unregister(key.fileobj)
                output = outputs[key.data]
                output += block[: limit - len(output)]
                if len(output) >= limit and block:
                    return outputs, False, True
    try:
        child.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return outputs, True, False
    return outputs, False, False


def _read(pipe: int | IO[bytes] | object) -> bytes:
    fd = pipe if isinstance(pipe, int) else pipe.fileno()  # type: ignore[attr-defined]
    return os.read(fd, 1 << 16)


def _end(child: subprocess.Popen[bytes]) -> int:
    """Kills the whole group (the child is its leader until it has been waited for). One that hangs in the kernel, as
    nvidia-smi does on a dead GPU, does not even hear SIGKILL: it is left behind after _KILL_SECONDS."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        return child.wait(_KILL_SECONDS)
    return -signal.SIGKILL


def check(result: Result, doing: str, *, hint: str | None = None) -> Result:
    """`result` if the command did its work, else CommandError (CommandTimeout) that says what failed."""
    if result.ok:
        return result
    kind = CommandTimeout if result.timed_out else CommandError
    raise kind(f"{doing}: {result.why()}", hint=hint)


def become(argv: Sequence[str]) -> NoReturn:
    """Replaces this process by `argv` (an interactive command: one process less between it and the terminal)."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvp(argv[0], list(argv))
    except OSError as error:
        raise CommandError(f"cannot run {argv[0]}: {error.strerror}", hint="is it installed?") from None
