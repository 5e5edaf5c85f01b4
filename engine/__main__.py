"""`python -m engine`: see serve.py. Imports take a second; a signal in that time just ends us."""

from __future__ import annotations

import os
import signal
import sys

for _signal in (signal.SIGTERM, signal.SIGINT):
    signal.signal(_signal, lambda *_: os._exit(0))  # nothing is open yet

from engine.serve import main  # noqa: E402  # after the handlers on purpose

if __name__ == "__main__":
    sys.exit(main())
