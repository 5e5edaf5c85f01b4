"""A child process that talks in lines on its stdin and stdout, for the loop of launcher/loop.py; never blocks.

Killed by SIGKILL when told. One that does not even end by that (a call into the driver that never returns: state D) is
given up: it is still waited for, but nobody else waits for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence

from appliance.launcher.loop import READ, Loop
from engine.spawn import python_env

_READ_BYTES = 1 << 16
KILL_SECONDS = 5.0  # what a killed process gets to be gone; it may have to close the devices first


class Child:
    """`on_line(line)`, without its newline; `on_end(code)` once when it has ended by itself (negative: the signal), not
    after `kill` or `leave`: those call back their own `gone`."""

    def __init__(
        self, loop: Loop, argv: Sequence[str], longest: int, on_line: Callable[[bytes], None],
        on_end: Callable[[int], None],
    ) -> None:  # fmt: skip
        """OSError where no process can be made."""
        self._loop, self._longest, self._on_line, self._on_end = loop, longest, on_line, on_end
        self._buffer = bytearray()
        self._gone: Callable[[], None] | None = None
        self._left = False  # by kill or leave: no on_line and on_end any more
        self.ended = False
        self.pid, self._stdin, self._stdout = _spawn(argv)
        loop.watch(self._stdout, READ, self._readable)
        loop.watch_child(self.pid, self._reaped)

    def send(self, line: bytes) -> bool:
        """False where it does not read: it is late or dead."""
        try:
            return os.write(self._stdin, line) == len(line)
        except (BlockingIOError, BrokenPipeError):
            return False

    def leave(self, last: bytes, seconds: float, gone: Callable[[bool], None]) -> None:
        """Sends `last`, ends its stdin and waits for its end; after `seconds` it is killed. gone(it has ended)."""
        self.send(last)
        self._forget()
        if self.ended:
            self._loop.later(0, lambda: gone(True))
            return
        timer = self._loop.later(seconds, lambda: self.kill(gone))

        def ended() -> None:
            timer.cancel()
            gone(True)

        self._gone = ended

    def kill(self, gone: Callable[[bool], None]) -> None:
        """gone(True) when it has ended; gone(False) if not within KILL_SECONDS, and gone(True) if it ever does."""
        self._forget()
        if self.ended:
            self._loop.later(0, lambda: gone(True))
            return
        timer = self._loop.later(KILL_SECONDS, lambda: gone(False))

        def ended() -> None:
            timer.cancel()
            gone(True)

        self._gone = ended
        with contextlib.suppress(ProcessLookupError):  # it has ended but is not reaped yet
            os.kill(self.pid, signal.SIGKILL)

    def _forget(self) -> None:
        """No more lines; the end of its stdin."""
        self._left = True
        if self._stdout >= 0:
            self._loop.unwatch(self._stdout)
            os.close(self._stdout)
            os.close(self._stdin)
            self._stdout = self._stdin = -1

    def _readable(self) -> None:
        try:
            data = os.read(self._stdout, _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._loop.unwatch(self._stdout)  # its end follows
            return
        self._buffer += data
        *lines, rest = bytes(self._buffer).split(b"\n")
        self._buffer = bytearray(rest)
        if len(rest) > self._longest:
            lines.append(rest)  # too long to be one of its lines: whoever reads it will say so
            self._buffer.clear()
        for line in lines:
            if not self._left:  # else what a line before brought about has ended it
                self._on_line(line)

    def _reaped(self, code: int) -> None:
        self.ended = True
        if not self._left:
            self._readable()  # what it said last
        if not self._left:
            self._forget()
            self._on_end(code)
        elif self._gone is not None:
            self._gone()


def _spawn(argv: Sequence[str]) -> tuple[int, int, int]:
    """(pid, its stdin, its stdout). Its standard error is ours: the journal."""
    in_read, in_write = os.pipe2(os.O_CLOEXEC)
    out_read, out_write = os.pipe2(os.O_CLOEXEC)
    try:
        pid = os.posix_spawn(
            argv[0],
            list(argv),
            python_env() if argv[0] == sys.executable else dict(os.environ),
            file_actions=[(os.POSIX_SPAWN_DUP2, in_read, 0), (os.POSIX_SPAWN_DUP2, out_write, 1)],
            setsigmask=[],
            setsigdef=[signal.SIGPIPE],
        )
    except OSError:
        os.close(in_write)
        os.close(out_read)
        raise
    finally:
        os.close(in_read)
        os.close(out_write)
    os.set_blocking(in_write, False)
    os.set_blocking(out_read, False)
    return pid, in_write, out_read
