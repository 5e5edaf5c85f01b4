"""API keys: only their SHA-256 is on disk, compared in constant time, reloadable while requests run."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
import threading
from pathlib import Path

from engine.errors import ConfigError

_LINE = re.compile(r"([0-9a-fA-F]{64})(?:\s+(\S.*))?")
_MAX_FILE_BYTES = 1 << 20


class KeyStore:
    """The keys of one file. Lines: `<sha256 hex of the key> [label]`; blank lines and `#` comments are skipped."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._keys: list[tuple[bytes, str]] = []
        self._lock = threading.Lock()
        self.reload()

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def configured(self) -> bool:
        """A file was named; an empty one lets nobody in."""
        return self._path is not None

    def reload(self) -> None:
        """Read the file again; on an error the keys in force stay in force and ConfigError is raised. Thread-safe."""
        if self._path is not None:
            with self._lock:  # what was read last is what counts
                self._keys = read_key_file(self._path)

    def match(self, key: str) -> str | None:
        """Label of the matching key or None. Looks at every key, so that timing does not tell which one was near."""
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        found: str | None = None
        for stored, label in self._keys:
            if hmac.compare_digest(stored, digest):
                found = label
        return found


def read_key_file(path: Path) -> list[tuple[bytes, str]]:
    """Parse a key file; ConfigError names the line."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # a FIFO would make us wait for its writer
                raise ConfigError(f"the key file {path} is no regular file", hint="name a file of lines of sha256 hex")
            data = file.read(_MAX_FILE_BYTES + 1)
        text = data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read the key file {path}: {exc}", hint="it must be readable UTF-8 text") from exc
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigError(f"the key file {path} is over {_MAX_FILE_BYTES} bytes", hint="one line per key is enough")
    keys: list[tuple[bytes, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        matched = _LINE.fullmatch(line)
        if matched is None:
            raise ConfigError(
                f"{path}:{number}: not a SHA-256 in hex",
                hint="write the line with: printf %s \"$KEY\" | sha256sum | cut -d' ' -f1",
            )
        keys.append((bytes.fromhex(matched[1]), (matched[2] or f"key{number}").strip()))
    return keys


def bearer(header: str | None) -> str | None:
    """The token of an `Authorization: Bearer` header, or None."""
    if header is None:
        return None
    scheme, _, token = header.partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None
