"""Who wants this GPU out of service, and how far: one entry an owner, kept over restarts and reboots. Beside the holds,
in the same file: the share of its usual load that somebody lets it have (probation)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, cast

from appliance.state_hints import damaged_hint
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
    """All holds and shares of one slot. What is in force is in memory; `saved` says whether the file says the same."""

    def __init__(self, path: Path) -> None:
        """StateError if the file cannot be understood: whoever held this GPU had a reason."""
        self._path = path
        self._holds, self._shares = _read(path)
        self.saved = True

    def __len__(self) -> int:
        return len(self._holds)

    def __contains__(self, owner: str) -> bool:
        return owner in self._holds

    @property
    def stopped(self) -> bool:
        return any(hold.level == "stop" for hold in self._holds.values())

    @property
    def share(self) -> float:
        """Of the load that this GPU would have, 0 to 1: the smallest that an owner allows."""
        return min(self._shares.values(), default=1.0)

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

    def set_share(self, owner: str, share: float) -> bool:
        """1 takes the owner's word back. In force at once, even if it cannot be written (OSError), as a hold is. False:
        it is so already."""
        if self._shares.get(owner, 1.0) == share:
            return False
        self._shares = {name: other for name, other in self._shares.items() if name != owner}
        if share < 1:
            self._shares[owner] = share
        self.save()
        return True

    def save(self) -> None:
        self.saved = False
        self._write(self._holds)
        self.saved = True

    def _write(self, holds: Mapping[str, Hold]) -> None:
        self._path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        table: dict[str, object] = {"holds": {owner: asdict(hold) for owner, hold in holds.items()}}
        if self._shares:
            table["shares"] = dict(sorted(self._shares.items()))
        write_state(self._path, table, schema=SCHEMA)


def _read(path: Path) -> tuple[dict[str, Hold], dict[str, float]]:
    state = read_state(path, schema=SCHEMA) or {"holds": {}}
    return _read_holds(path, state.get("holds")), _read_shares(path, state.get("shares", {}))


def _read_shares(path: Path, table: object) -> dict[str, float]:
    shares = {}
    for owner, share in table.items() if isinstance(table, dict) else [("?", None)]:
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
            raise StateError(f"{path}: the share of {owner} is not understood", hint=damaged_hint(path))
        shares[owner] = float(share)
    return shares


def _read_holds(path: Path, table: object) -> dict[str, Hold]:
    if not isinstance(table, dict):
        raise StateError(f"{path}: holds is no object", hint=damaged_hint(path))
    found = {}
    for owner, entry in table.items():
        entry = entry if isinstance(entry, dict) else {}
        level, reason, since = entry.get("level"), entry.get("reason"), entry.get("since")
        if level not in LEVELS or not isinstance(reason, str) or not isinstance(since, (int, float)):
            raise StateError(f"{path}: the hold of {owner} is not understood", hint=damaged_hint(path))
        found[owner] = Hold(cast(Level, level), reason, float(since))
    return found
