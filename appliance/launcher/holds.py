"""Who wants this GPU out of service, and how far: one entry an owner, kept over restarts and reboots."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, cast

from appliance.statefile import StateError, read_state, write_state

SCHEMA = 1
Level = Literal["drain", "stop"]
LEVELS = ("drain", "stop")


@dataclass(frozen=True, slots=True)
class Hold:
    level: Level  # drain: no new requests, engines stay up. stop: no engine, nobody holds the device
    reason: str
    since: float  # UTC seconds


class Holds:
    """All holds of one slot. What is in force is in memory; `saved` says whether the file says the same."""

    def __init__(self, path: Path) -> None:
        """StateError if the file cannot be understood: whoever held this GPU had a reason."""
        self._path = path
        self._holds = _read(path)
        self.saved = True

    def __len__(self) -> int:
        return len(self._holds)

    def __contains__(self, owner: str) -> bool:
        return owner in self._holds

    @property
    def stopped(self) -> bool:
        return any(hold.level == "stop" for hold in self._holds.values())

    def text(self) -> str:
        """ "watchdog: XID 79; operator: fan noise"."""
        return "; ".join(f"{owner}: {hold.reason}" for owner, hold in sorted(self._holds.items()))

    def as_dict(self) -> dict[str, dict[str, object]]:
        return {owner: asdict(hold) for owner, hold in sorted(self._holds.items())}

    def add(self, owner: str, level: Level, reason: str) -> None:
        """In force at once, even if it cannot be written (OSError): then it lasts until this process ends."""
        before = self._holds.get(owner)
        since = before.since if before is not None else round(time.time(), 3)
        self._holds[owner] = Hold(level, reason, since)
        self.save()

    def remove(self, owner: str) -> None:
        """Only once it is written (OSError: it stays)."""
        rest = {name: hold for name, hold in self._holds.items() if name != owner}
        self._write(rest)
        self._holds = rest

    def save(self) -> None:
        self.saved = False
        self._write(self._holds)
        self.saved = True

    def _write(self, holds: Mapping[str, Hold]) -> None:
        self._path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        write_state(self._path, {"holds": {owner: asdict(hold) for owner, hold in holds.items()}}, schema=SCHEMA)


def _read(path: Path) -> dict[str, Hold]:
    table = (read_state(path, schema=SCHEMA) or {"holds": {}}).get("holds")
    if not isinstance(table, dict):
        raise StateError(f"{path}: holds is no object", hint="a human has to look why this GPU was held")
    found = {}
    for owner, entry in table.items():
        entry = entry if isinstance(entry, dict) else {}
        level, reason, since = entry.get("level"), entry.get("reason"), entry.get("since")
        if level not in LEVELS or not isinstance(reason, str) or not isinstance(since, (int, float)):
            raise StateError(f"{path}: the hold of {owner} is not understood", hint="look why this GPU was held")
        found[owner] = Hold(cast(Level, level), reason, float(since))
    return found
