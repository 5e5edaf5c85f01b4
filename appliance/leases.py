"""Engines that a command has asked launchers for beside what the slots point at, remembered across a kill.

A lease is written down before the launcher is asked and crossed out after the engine is stopped (or a slot points at
its release), so the next change of releases knows what a killed one left running. The same file names the releases that
a committed change is still putting out of service: /var/lib/appliance/leases.json.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.events import append_event
from appliance.fleet import Fleet
from appliance.log import ApplianceError
from appliance.slots import slots_of
from appliance.statefile import read_state, write_state

SCHEMA = 1
_STOP_SECONDS = 60.0  # beyond what the engine gets to drain


@dataclass(slots=True)
class Leases:
    """Only used by the holder of the lock of the releases (ReleaseStore.changing)."""

    fleet: Fleet

    def all(self) -> list[tuple[int, str]]:
        """(GPU, release) of every lease."""
        return [(int(lease["gpu"]), str(lease["release"])) for lease in self._read().get("leases", [])]

    def retiring(self) -> list[str]:
        """Releases that a committed change put out of service, and whose engines may still run."""
        return [str(release) for release in self._read().get("retiring", [])]

    def retire(self, release: str | None) -> None:
        """Notes, before the commit point, what the change puts out of service."""
        if release is not None and release not in self.retiring():
            self._write(retiring=[*self.retiring(), release])

    def retired(self, release: str) -> None:
        """Its engines are gone, or it is in service again."""
        if release in self.retiring():
            self._write(retiring=[name for name in self.retiring() if name != release])

    def take(self, gpu: int, release: str, op: str = "run") -> None:
        """Asks the launcher for an engine (op "run": beside the others, "replace": instead of them); it is being
        started when this returns."""
        self._write([*[lease for lease in self.all() if lease != (gpu, release)], (gpu, release)])
        try:
            self.fleet.call(gpu, op, release=release, wait=False, timeout=30.0)
        except ApplianceError:
            with suppress(ApplianceError):
                self.drop(gpu, release)  # it may have been heard before the answer was lost
            raise

    def drop(self, gpu: int, release: str) -> None:
        """Has the engine drained and stopped, unless a slot points at the release."""
        if not slots_of(self.fleet.paths, release):
            seconds = self.fleet.config.engine.drain_timeout + _STOP_SECONDS
            self.fleet.call(gpu, "stop", release=release, wait=True, timeout=seconds)
        self._write([lease for lease in self.all() if lease != (gpu, release)])

    def drop_all(self, *, keep: str | None = None) -> list[str]:
        """Drops every lease but those of the release `keep`; says what could not be done, and forgets it only where
        the launcher is gone (its engines are then gone too)."""
        problems = []
        for gpu, release in self.all():
            if release == keep:
                continue
            try:
                self.drop(gpu, release)
            except ApplianceError as error:
                if self._alive(gpu):
                    problems.append(f"GPU {gpu} still runs {release}: {error.message}")
                else:
                    self._write([lease for lease in self.all() if lease != (gpu, release)])
        return problems

    def recover(self, *, keep: str | None = None) -> list[str]:
        """What a killed command left running is stopped, but for the release `keep`, which the caller goes on with."""
        left = [lease for lease in self.all() if lease[1] != keep]
        if not left:
            return []
        releases = sorted({release for _, release in left})
        append_event(self.fleet.paths.events, "release_leftovers_stopped", releases=releases)
        self.fleet.stage(f"stopping what an interrupted command left running: {', '.join(releases)}")
        return self.drop_all(keep=keep)

    def settle(self, release: str) -> None:
        """A slot points at `release` now: its engines need no lease."""
        self._write([lease for lease in self.all() if lease[1] != release])

    def _alive(self, gpu: int) -> bool:
        try:
            self.fleet.state(gpu)
        except ApplianceError:
            return False
        return True

    @property
    def _path(self) -> Path:
        return self.fleet.paths.state / "leases.json"

    def _read(self) -> dict[str, Any]:
        return read_state(self._path, schema=SCHEMA) or {}

    def _write(self, leases: list[tuple[int, str]] | None = None, retiring: list[str] | None = None) -> None:
        leases = self.all() if leases is None else leases
        retiring = self.retiring() if retiring is None else retiring
        entries = [{"gpu": gpu, "release": release} for gpu, release in leases]
        if entries or retiring or self._path.exists():
            write_state(self._path, {"leases": entries, "retiring": retiring}, schema=SCHEMA)
