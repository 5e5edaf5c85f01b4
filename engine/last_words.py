"""One sentence for whoever started us, beside the log: why we end. Its descriptor is in $ENGINE_LAST_WORDS_FD
(appliance/launcher/last_words.py)."""

from __future__ import annotations

import contextlib
import os

_VARIABLE = "ENGINE_LAST_WORDS_FD"
_MAX_BYTES = 1000


def inherit() -> int | None:
    """The descriptor, kept from our own children; None where nobody asked."""
    text = os.environ.pop(_VARIABLE, "")
    if not (text.isascii() and text.isdecimal() and len(text) < 6):
        return None
    try:
        os.set_inheritable(int(text), False)
    except OSError:
        return None
    return int(text)


def say(fd: int | None, message: str, hint: str | None = None) -> None:
    """Best effort: the same is in the log."""
    if fd is not None:
        text = f"{message}; {hint}" if hint else message
        with contextlib.suppress(OSError):
            os.pwrite(fd, text.encode(errors="replace")[:_MAX_BYTES] + b"\0", 0)
