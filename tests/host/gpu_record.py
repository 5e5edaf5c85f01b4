"""The evidence of a run: one JSON file, rewritten after every step: a run that is cut off leaves what it saw."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_TEXT = 6000


class Record:
    """Checks by name, each with `ok` (True, False, None: could not be told) and its raw values; figures; texts.

    `strict`: a check that could not be told counts as failed, as does a part that was left out. Where it is False (a
    rehearsal without GPU, or on a machine whose cgroup v2 has no controllers) only False does."""

    def __init__(self, path: Path, seconds: float, *, strict: bool, **head: Any) -> None:
        self.path, self.strict = path, strict
        self._began = time.monotonic()
        self._seconds = seconds
        self.only: list[str] | None = None  # parts that are wanted; None: all
        self.data: dict[str, Any] = head | {"checks": {}, "figures": {}, "texts": {}, "seconds": {}}
        self.write()

    def left(self) -> float:
        return self._seconds - (time.monotonic() - self._began)

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f}  {text}", flush=True)

    def check(self, name: str, ok: bool | None, **raw: Any) -> bool:
        self.data["checks"][name] = {"ok": ok, **raw}
        words = {True: "ok", False: "FAILED", None: "not told"}
        shown = "" if ok else json.dumps(raw, default=str)[:600]
        self.say(f"{words[ok]:8}  {name}  {shown}".rstrip())
        self.write()
        return bool(ok)

    def figure(self, name: str, value: Any) -> None:
        self.data["figures"][name] = value
        self.say(f"          {name} = {json.dumps(value, default=str)[:300]}")
        self.write()

    def text(self, name: str, value: str) -> None:
        self.data["texts"][name] = value[-MAX_TEXT:]

    def part(self, name: str, call: Callable[..., None], *arguments: Any, needs: float = 0.0) -> None:
        """A part of the run: what it raises becomes a failed check, and the next part goes on. `needs`: seconds; a part
        for which less is left is not begun, and that could not be told."""
        if self.only is not None and name not in self.only:
            return
        if self.left() < needs:
            self.check(name, None, error=f"left out: {self.left():.0f} s are left, it needs about {needs:.0f}")
            return
        began = time.monotonic()
        try:
            call(*arguments)
        except Exception as error:
            # Whatever it is: the run goes on, and the record says what happened.
            self.check(name, False, error=str(error)[-3000:])
            self.text(f"traceback {name}", traceback.format_exc())
        self.data["seconds"][name] = round(time.monotonic() - began, 2)
        self.write()

    def failed(self) -> list[str]:
        bad = (False, None) if self.strict else (False,)
        return [name for name, check in self.data["checks"].items() if check["ok"] in bad]

    def write(self) -> None:
        """tmp + rename."""
        self.data["failed"] = self.failed()
        self.data["total_seconds"] = round(time.monotonic() - self._began, 1)
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        temporary.write_text(json.dumps(self.data, indent=1, default=str) + "\n")
        temporary.replace(self.path)
