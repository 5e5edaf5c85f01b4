"""`python -m engine`: see serve.py. Imports take a second; a signal in that time just ends us."""

from __future__ import annotations

import os
import signal
import sys

for _signal in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):  # SIGTERM last: when it is ours, all are
    signal.signal(_signal, lambda *_: os._exit(0))  # nothing is open yet
for _fd in (0, 1, 2):  # closed by whoever started us: the next file opened would become our standard error
    try:
        os.fstat(_fd)
    except OSError:
        os.open(os.devnull, os.O_RDWR)

from engine.serve import main  # noqa: E402  # after that on purpose

if __name__ == "__main__":
    sys.exit(main())
