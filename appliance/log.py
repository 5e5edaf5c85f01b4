"""Errors, exit codes and terminal output shared by every command of the appliance.

Humans read stderr, programs read stdout: results (text or --json) go to stdout, progress and errors to stderr, so
that `appliance ... --json | jq` always works. Nothing here touches the host.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from enum import IntEnum
from typing import IO, Any, NoReturn


class ExitCode(IntEnum):
    """The same meaning for every command (design: exit codes)."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    INCONCLUSIVE = 3  # or timed out
    REFUSED = 4  # by preflight or policy
    BUSY = 5  # a lock or another run


class ApplianceError(Exception):
    """An error an operator can act on: `message` says what is wrong, `hint` what to do next."""

    exit_code = ExitCode.FAILED

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(ApplianceError):
    """The command line asks for something that makes no sense."""

    exit_code = ExitCode.USAGE


class BusyError(ApplianceError):
    """Another process holds the lock."""

    exit_code = ExitCode.BUSY


def use_color(stream: IO[str]) -> bool:
    """True where ANSI colours are wanted: a terminal, NO_COLOR unset or empty (no-color.org), TERM not dumb."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, code: str, stream: IO[str]) -> str:
    """`text` in the SGR colour `code` ("31" red, "32" green, "2" dim) if `stream` shows colours."""
    return f"\x1b[{code}m{text}\x1b[0m" if use_color(stream) else text


def printable(text: str) -> str:
    """`text` with control characters escaped, so that a hostile file name cannot drive the terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def report_error(message: str, *, hint: str | None = None, code: int = ExitCode.FAILED, as_json: bool = False) -> None:
    """Prints an error to stderr, and with `as_json` also as one JSON object to stdout."""
    print(f"{paint('error:', '31', sys.stderr)} {printable(message)}", file=sys.stderr)
    if hint:
        print(f"{paint('hint:', '36', sys.stderr)} {printable(hint)}", file=sys.stderr)
    if as_json:
        with contextlib.suppress(OSError):  # standard output may be what is broken; the words above are out
            emit_json({"error": {"message": message, "hint": hint, "exit_code": int(code)}})


def die(message: str, *, hint: str | None = None, code: ExitCode = ExitCode.FAILED, as_json: bool = False) -> NoReturn:
    """Reports an error and ends the process with `code`. Only for the outermost layer of a command: everything below
    raises ApplianceError, which `appliance.cli.main` turns into this."""
    report_error(message, hint=hint, code=code, as_json=as_json)
    raise SystemExit(int(code))


def emit_json(value: Any) -> None:
    """Prints one JSON document and a newline to stdout; escaped where stdout cannot take a character (another encoding,
    or a file name that is no UTF-8)."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value, indent=2)
    sys.stdout.write(text + "\n")


def format_bytes(count: float) -> str:
    """1536 -> '1.5 kB' (decimal units, as disks and networks use them)."""
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        count /= 1000
        if count < 999.5 or unit == "TB":
            return f"{count:.1f} {unit}" if count < 99.95 else f"{count:.0f} {unit}"
    raise AssertionError("unreachable")


class Progress:
    """Progress of one long command on stderr.

    On a terminal: one line that is rewritten at most ten times a second. Elsewhere (journal, CI log): one line a stage.
    `quiet` shows nothing.
    """

    def __init__(self, *, quiet: bool = False, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._live = not quiet and self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._stage = ""
        self._started = self._drawn_at = 0.0
        self._line_open = False

    def stage(self, text: str) -> None:
        """Starts a stage, for example 'converting the weights'."""
        self.finish()
        self._stage, self._started, self._drawn_at = text, time.monotonic(), 0.0
        if self._live:
            self._draw(text)
        elif not self._quiet:
            print(printable(text), file=self._stream, flush=True)

    def update(self, done: int, total: int) -> None:
        """`done` of `total` bytes of this stage."""
        now = time.monotonic()
        if not self._live or (now - self._drawn_at < 0.1 and done < total):
            return
        self._drawn_at = now
        percent = 100 * done // total if total else 100
        rate = done / max(now - self._started, 1e-3)
        self._draw(
            f"{self._stage}  {percent:3d} %  {format_bytes(done)} of {format_bytes(total)}  {format_bytes(rate)}/s"
        )

    def finish(self) -> None:
        """Ends the line of a live stage."""
        if self._line_open:
            self._stream.write("\n")
            self._stream.flush()
            self._line_open = False

    def _draw(self, text: str) -> None:
        width = max(20, _columns(self._stream) - 1)
        self._stream.write(f"\r\x1b[K{printable(text)[:width]}")
        self._stream.flush()
        self._line_open = True


def _columns(stream: IO[str]) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 80
