"""Where everything of an installed appliance lives. `Paths.under(root)` moves all of it, for tests.

| what | owner |
|---|---|
| /etc/appliance | the admin and Ansible |
| /usr/lib/appliance/VERSION | the package: one directory a version, `current` links to one |
| /var/lib/appliance | survives reboots; each file has one owner, named beside it below |
| /var/cache/appliance | can be deleted at any time (the driver's JIT cache) |
| /run/appliance | gone at a reboot |
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

SLOT_NAMES = ("stable", "canary")
RELEASE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
"""Of a release (use fullmatch): it becomes part of a unit name, a socket name and a metrics label."""


@dataclass(frozen=True, slots=True)
class Paths:
    etc: Path = Path("/etc/appliance")
    lib: Path = Path("/usr/lib/appliance")
    state: Path = Path("/var/lib/appliance")
    run: Path = Path("/run/appliance")
    models: Path = Path("/srv/appliance/models")
    cache: Path = Path("/var/cache/appliance")

    @classmethod
    def under(cls, root: Path) -> Paths:
        """The same tree below `root`."""
        default = cls()
        return cls(*(root / getattr(default, name).relative_to("/") for name in cls.__dataclass_fields__))

    @classmethod
    def default(cls) -> Paths:
        """The host's, or those below $APPLIANCE_ROOT (tests; the units never set it)."""
        root = os.environ.get("APPLIANCE_ROOT")
        return cls.under(Path(root)) if root else cls()

    # -- /etc
    @property
    def config(self) -> Path:
        return self.etc / "appliance.toml"

    @property
    def healthcheck_config(self) -> Path:  # what the admin changes of healthcheck/policy.toml
        return self.etc / "healthcheck.toml"

    @property
    def canary_config(self) -> Path:  # defaults of the canary's runs, and its hooks
        return self.etc / "canary.toml"

    # -- /var/lib
    @property
    def releases(self) -> Path:  # owner: appliance/releases.py
        return self.state / "releases"

    def release(self, name: str) -> Path:
        return self.releases / name

    def slot_pointer(self, slot: str) -> Path:  # owner: appliance/slots.py; a symlink to ../releases/NAME
        return self.state / "slots" / slot

    @property
    def gpus(self) -> Path:  # owner: the watchdog; bound at install by appliance/gpus.py
        return self.state / "gpus.json"

    @property
    def watchdog_memory(self) -> Path:  # owner: the watchdog; counters seen so far, PCI address of each UUID
        return self.state / "watchdog.json"

    def holds(self, gpu: int) -> Path:  # owner: the launcher of that GPU
        return self.state / "holds" / f"gpu{gpu}.json"

    def gpu_reset(self, uuid: str) -> Path:  # owner: healthcheck/reset.py; the result of the last reset of that GPU
        return self.state / "resets" / f"{uuid}.json"

    def gpu_reset_intent(self, uuid: str) -> Path:  # owner: healthcheck/reset.py; there while a reset is not over
        return self.state / "resets" / f"{uuid}.intent.json"

    @property
    def host_drain(self) -> Path:  # owner: `appliance drain --all`; read by the gateways
        return self.state / "drain.json"

    @property
    def events(self) -> Path:  # appended by everyone, appliance/events.py
        return self.state / "events.jsonl"

    @property
    def canary_run(self) -> Path:  # owner: the canary controller; the present or last run
        return self.state / "canary.json"

    @property
    def canary_runs(self) -> Path:  # owner: the canary controller; runs that are over, ID.json
        return self.state / "canary-runs"

    @property
    def canary_abort(self) -> Path:  # owner: `canary rollback`; who wants which run ended
        return self.state / "canary-abort.json"

    # -- /run
    @property
    def canary_abort_volatile(self) -> Path:  # owner: `canary rollback`, where canary_abort cannot be written
        return self.run / "canary-abort.json"

    def gpu_run(self, gpu: int) -> Path:
        return self.run / f"gpu{gpu}"

    def control_socket(self, gpu: int) -> Path:  # owner: the launcher
        return self.gpu_run(gpu) / "ctl"

    def launcher_state(self, gpu: int) -> Path:  # owner: the launcher; read by gateways and the CLI
        return self.gpu_run(gpu) / "state.json"

    def engine_socket(self, gpu: int, release: str) -> Path:  # owner: the engine
        return self.gpu_run(gpu) / "engines" / f"{release}.sock"

    @property
    def canary_marker(self) -> Path:  # owner: the canary controller; read by the gateways (gateway/canary_run.py)
        return self.run / "canary.json"

    def gateway_socket(self, slot: str) -> Path:  # admin listener of a gateway (state, metrics)
        return self.run / "gateway" / f"{slot}.sock"

    @property
    def watchdog_state(self) -> Path:  # owner: the watchdog; what everybody may know
        return self.run / "watchdog.json"

    @property
    def watchdog_socket(self) -> Path:  # owner: the watchdog; HTTP: /state, /metrics
        return self.run / "watchdog.sock"

    @property
    def watchdog_control(self) -> Path:  # owner: the watchdog; for root
        return self.run / "watchdog.ctl"

    @property
    def canary_alive(self) -> Path:  # owner: the canary controller; every few seconds, read by the gateways
        return self.run / "canary-alive.json"

    @property
    def canary_control(self) -> Path:  # owner: the canary controller
        return self.run / "canary.ctl"
