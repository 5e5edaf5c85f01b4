"""Blots secrets out of text that leaves the host.

Two ways at once: by form (bearer tokens, sk-... keys, NAME=value of telling names, passwords in URLs, PEM blocks, key
files' hashes), and by value (whatever the credentials directory holds, wherever it appears).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from appliance.log import ApplianceError
from appliance.statefile import read_bounded

BLOT = b"[redacted]"
_MIN_SECRET_BYTES = 8
_MAX_FILE_BYTES = 1 << 20
_NAMES = (
    rb"(?:api[-_ ]?key|apikey|authorization|bearer|credential|passw(?:or)?d|passphrase|private[-_ ]?key|secret"
    rb"|token(?!s|iz))"  # not max_batch_tokens, not tokenizer
)
_PEM = re.compile(rb"-----BEGIN [A-Z0-9 ]*-----.*?(?:-----END [A-Z0-9 ]*-----|\Z)", re.S)
_FORMS = (
    # Authorization: Bearer abc, also in JSON and in headers as Python prints them
    (re.compile(rb"(?i)\b(bearer|basic)(\s+)[^\s\"',;]+"), rb"\1\2" + BLOT),
    # https://user:password@host
    (re.compile(rb"(?i)\b([a-z][a-z0-9+.-]*://[^\s/:@\"']*):[^\s/@\"']+@"), rb"\1:" + BLOT + rb"@"),
    # api_key = "..", "token": "..", --admin-token=.., HF_TOKEN=..; a quoted value ends with its quote
    (
        re.compile(
            rb"(?i)([\w-]*" + _NAMES + rb"[\w-]*[\"']?\s*[=:]\s*)(\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'|[^\s\"',;}\]]+)"
        ),
        rb"\1" + BLOT,
    ),
    # OpenAI, Hugging Face, GitHub and AWS keys, JSON web tokens
    (re.compile(rb"\b(?:sk-|hf_|gh[opsu]_|github_pat_|AKIA|xox[abp]-)[A-Za-z0-9_-]{8,}"), BLOT),
    (re.compile(rb"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]*)?"), BLOT),
)


@dataclass(frozen=True, slots=True)
class Redactor:
    """`secrets`: values to blot out as they are, longest first."""

    secrets: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, directory: Path) -> Redactor:
        """With everything in the files of a credentials directory; without where it cannot be read (then nothing that
        runs as this user can have read it either)."""
        return cls(tuple(sorted(_values(directory), key=len, reverse=True)))

    def clean(self, data: bytes) -> bytes:
        for secret in self.secrets:
            data = data.replace(secret, BLOT)
        data = _PEM.sub(BLOT, data)
        for form, blotted in _FORMS:
            data = form.sub(blotted, data)
        return data


def _values(directory: Path) -> Iterable[bytes]:
    found: set[bytes] = set()
    try:
        files = [path for path in directory.rglob("*") if path.is_file()]
    except OSError:
        return found
    for path in files:
        try:
            data = read_bounded(path, _MAX_FILE_BYTES)
        except (OSError, ApplianceError):
            continue
        for line in data.splitlines():
            words = {line.strip(), *line.split()}
            found |= {word for word in words if len(word) >= _MIN_SECRET_BYTES and not word.startswith(b"-----")}
    return found
