"""Stands in for `python -P -m engine` where the launcher's own behaviour is tested: one thread, no model.

What it says and does comes from the directory after `--behave`, read at every turn: `state.json` (answer of
/admin/state), `silent` (takes connections, never answers), `exit` (status to start with: ends at once), `words` (its
last), `drain` (seconds between SIGTERM and the end), `deaf` (ignores SIGTERM). It notes its own starts in `starts`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path


def main() -> int:
    behave = Path(sys.argv[sys.argv.index("--behave") + 1])
    path = sys.argv[sys.argv.index("--uds") + 1]
    with (behave / "starts").open("a") as file:
        file.write(json.dumps({"argv": sys.argv, "env": dict(os.environ), "pid": os.getpid()}) + "\n")
    if (behave / "words").exists():
        os.pwrite(int(os.environ["ENGINE_LAST_WORDS_FD"]), (behave / "words").read_bytes(), 0)
    if (behave / "exit").exists():
        return int((behave / "exit").read_text())
    ending: list[float] = []
    signal.signal(signal.SIGTERM, lambda *_: ending.append(time.monotonic()))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(8)
    listener.settimeout(0.02)
    kept = []
    while True:
        if ending and not (behave / "deaf").exists():
            drain = float((behave / "drain").read_text()) if (behave / "drain").exists() else 0.0
            if time.monotonic() - ending[0] >= drain:
                return 0
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        if (behave / "silent").exists():
            kept.append(connection)
            continue
        with connection, contextlib.suppress(OSError):
            connection.settimeout(1)
            connection.recv(65536)
            body = (behave / "state.json").read_bytes()
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


if __name__ == "__main__":
    sys.exit(main())
