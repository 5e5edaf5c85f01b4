"""Errands: short-lived children that do what may block (errand_child.py), one at a time a key, with a deadline."""

from __future__ import annotations

import os
import sys
from typing import Any

from appliance.launcher.loop import Loop
from appliance.launcher.scopes import Call, Done


class _Errand(Call):
    argv = (sys.executable, "-P", "-m", "healthcheck.errand_child")
    whom = "the errand"


class Errands:
    """`run` never blocks and calls back exactly once, unless a newer errand of the same key replaced it."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._current: dict[str, object] = {}  # key -> the token of the errand whose answer still counts

    def run(self, key: str, request: dict[str, Any], seconds: float, done: Done) -> None:
        """`seconds`: then the child is killed and the answer is {"ok": false, ...}."""
        token = self._current[key] = object()

        def ended(answer: dict[str, Any]) -> None:
            if self._current.get(key) is token:
                del self._current[key]
                done(answer)

        try:
            _Errand(self._loop, request | {"parent": os.getpid()}, seconds, ended)
        except OSError as error:  # no process or no descriptor to be had
            answer = {"ok": False, "error": f"cannot start a child: {error.strerror}"}
            self._loop.later(0, lambda: ended(answer))

    def busy(self, key: str) -> bool:
        return key in self._current

    def forget(self, key: str) -> None:
        """What it answers does not count any more."""
        self._current.pop(key, None)

    def forget_all(self, prefix: str) -> None:
        """`forget` of every key that begins so."""
        for key in [key for key in self._current if key.startswith(prefix)]:
            del self._current[key]
