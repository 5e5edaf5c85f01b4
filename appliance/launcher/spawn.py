"""The child that becomes the engine, still waiting (launcher/trampoline.py), and the place of its socket."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import stat
import sys
import time
from pathlib import Path

from appliance.launcher.last_words import VARIABLE
from appliance.launcher.spec import EngineSpec
from engine.spawn import python_env

_CHANNEL_FD, _WORDS_FD = 3, 4
_MODE = 0o750  # of the directory of the sockets
_JOURNAL = "/run/systemd/journal/stdout"
_JOURNAL_SECONDS = 1.0


def spawn_trampoline(spec: EngineSpec, uid: int, gid: int, words: int) -> tuple[int, socket.socket]:
    """(pid, our end of its channel, non-blocking). `words`: descriptor of the engine's last words. Standard output and
    error are a journal stream of its own, or ours where we have none. OSError where no process can be made."""
    journal = journal_stream(spec.scope.name.removesuffix(".scope")) if "JOURNAL_STREAM" in os.environ else None
    if journal is None:
        return _spawn(spec, spec.env, uid, gid, words, [])
    with journal:
        found = os.fstat(journal.fileno())
        output = [(os.POSIX_SPAWN_DUP2, journal.fileno(), fd) for fd in (1, 2)]
        return _spawn(spec, spec.env | {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}, uid, gid, words, output)


def journal_stream(identifier: str, path: str = _JOURNAL) -> socket.socket | None:
    """Like what systemd gives a service (systemd-journald.service(8), stream logging). With a stream that is ours an
    engine could end our own logging: shutdown(2) reaches everybody who shares a socket. None: there is no journal."""
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        stream.settimeout(_JOURNAL_SECONDS)
        stream.connect(path)
        # Identifier, unit (that of the cgroup), priority, "<N>" at the start of a line counts, forward nowhere.
        stream.sendall(f"{identifier}\n\n6\n1\n0\n0\n0\n".encode())
        stream.shutdown(socket.SHUT_RD)
        stream.settimeout(None)
    except OSError:
        stream.close()
        return None
    return stream


def _spawn(
    spec: EngineSpec, env: dict[str, str], uid: int, gid: int, words: int, output: list[tuple[int, int, int]]
) -> tuple[int, socket.socket]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    env = env | {VARIABLE: str(_WORDS_FD)}
    order = {"fd": _CHANNEL_FD, "uid": uid, "gid": gid, "denied": spec.denied, "argv": spec.argv, "env": env}
    argv = [sys.executable, "-P", "-m", "appliance.launcher.trampoline", json.dumps(order)]
    with theirs:
        sources = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _WORDS_FD + 1) for fd in (theirs.fileno(), words)]
        try:
            pid = os.posix_spawn(
                argv[0],
                argv,
                python_env(),
                file_actions=[
                    # The targets are low and fixed, the sources copies above them: none overwrites another's source.
                    *output,
                    (os.POSIX_SPAWN_DUP2, sources[0], _CHANNEL_FD),
                    (os.POSIX_SPAWN_DUP2, sources[1], _WORDS_FD),
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                ],
                setsigmask=[],
                setsigdef=[signal.SIGPIPE],
            )
        except OSError:
            ours.close()
            raise
        finally:
            for fd in sources:
                os.close(fd)
    return pid, ours


def prepare_socket(path: Path, uid: int, gid: int) -> None:
    """Nothing is at `path`, and the engine (`uid`) can make its socket there. OSError.

    The directory is the engines' own, and they may have put anything there. Where unlink is not enough the directory is
    taken from them meanwhile (without CAP_FOWNER root can neither unlink in a sticky directory of others nor change its
    mode); a directory at `path` is moved aside, not walked through."""
    directory = path.parent
    directory.mkdir(mode=_MODE, exist_ok=True)
    if stat.S_IMODE(directory.stat().st_mode) == _MODE and not _is_directory(path):
        path.unlink(missing_ok=True)
    else:
        os.chown(directory, os.geteuid(), -1)
        directory.chmod(_MODE)
        if _is_directory(path):
            path.rename(directory / f".{path.name}.{time.monotonic_ns()}")
        path.unlink(missing_ok=True)
    os.chown(directory, uid, gid)


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
