"""The ledger as the service keeps it: written when something that survives has changed, read again when somebody bound
further GPUs (`appliance gpus bind`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from appliance.log import ApplianceError
from healthcheck.ledger import adopt, read_ledger, write_ledger
from healthcheck.machine_types import HostState


class Keeper:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: HostState | None = None
        self._stamp: tuple[int, int] | None = None

    def load(self) -> HostState:
        """StateError where it cannot be understood: nothing is guessed about a GPU."""
        self._stamp = self._look()
        host = read_ledger(self._path)
        self._written = _lasting(host)
        return host

    def save(self, host: HostState) -> None:
        """OSError, ApplianceError: it is not written, and tried again with the next one."""
        lasting = _lasting(host)
        if lasting == self._written:
            return
        write_ledger(self._path, host)
        self._written, self._stamp = lasting, self._look()

    def adopt(self, host: HostState) -> HostState:
        """`host` with the slots that were bound since. OSError, StateError."""
        stamp = self._look()
        if stamp == self._stamp:
            return host
        found = adopt(host, self._path)
        self._stamp = stamp
        return found

    def _look(self) -> tuple[int, int] | None:
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            return None
        return stat.st_mtime_ns, stat.st_ino


def why_not_written(error: OSError | ApplianceError) -> str:
    """In few words: whoever shows it names the file."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _lasting(host: HostState) -> HostState:
    """Without what is not in the file."""
    gpus = {slot: gpu if gpu.idle_since is None else replace(gpu, idle_since=None) for slot, gpu in host.gpus.items()}
    return replace(host, gpus=gpus, admitted=None)
