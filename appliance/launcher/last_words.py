"""Why an engine ended, in its own words: memory of a fixed size that the engine inherits (engine/last_words.py writes a
line into it) and that its launcher reads when it is gone. No file of the engine's is opened, no stream of its journal
is shared, and it cannot grow."""

from __future__ import annotations

import fcntl
import os

from appliance.log import printable

VARIABLE = "ENGINE_LAST_WORDS_FD"  # engine/last_words.py
BYTES = 1024
_MAX_CHARS = 400
_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class LastWords:
    """Of one start of an engine."""

    def __init__(self) -> None:
        """OSError where there is no memory for it."""
        self.fd = os.memfd_create("last-words", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, BYTES)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)

    def take(self) -> str:
        """What was said, on one printable line, "" where nothing was; closes it."""
        data = os.pread(self.fd, BYTES, 0)
        self.close()
        text = data.partition(b"\0")[0].decode(errors="replace")
        line = printable(" ".join(text.split()))
        return line if len(line) <= _MAX_CHARS else f"{line[: _MAX_CHARS - 3]}..."

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
