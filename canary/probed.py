"""What the gateways count, and the canary's port as a client meets it."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from appliance.hostconfig import Gateway
from appliance.paths import Paths
from canary.probe import probe_all, targets
from canary.samples import Reading, Samples
from canary.types import Policy

_PROBE_SECONDS = 0.5


class ProbedSamples:
    """seams.Samples. A refused connection is counted by no gateway; a probe sees it."""

    def __init__(self, paths: Paths, gateway: Gateway, policy: Policy, releases: Mapping[str, str]) -> None:
        # A silent gateway is known to be dead in time for liveness_seconds.
        patience = max(0.2, policy.liveness_seconds / 2)
        self._samples = Samples(paths, releases=releases, limits=policy.limits, patience=patience)
        self._targets = targets(gateway, "canary")

    def read(self) -> Reading:
        reading = self._samples.read()
        dead = [probe for probe in probe_all(self._targets, _PROBE_SECONDS) if probe.dead]
        if not dead or "canary" in reading.not_alive:
            return reading
        said = "; ".join(f"{probe.target}: {probe.text or probe.kind}" for probe in dead)
        canary = reading.canary and replace(reading.canary, alive=False)
        return replace(reading, canary=canary, not_alive=reading.not_alive | {"canary": said})

    def check(self) -> None:
        self._samples.check()
