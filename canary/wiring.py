"""The controller's parts on a real host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from appliance.hostconfig import load_config
from appliance.paths import Paths
from canary.netfilter.apply import Netfilter
from canary.samples import Samples
from canary.seams import Judge, Parts
from canary.types import Policy


def real_parts(paths: Paths) -> Parts:
    """HostConfigError where appliance.toml cannot be used."""
    gateway = load_config(paths.config).gateway
    rules = Netfilter(port=gateway.port, canary_port=gateway.canary_port, lock=paths.run / "netfilter")

    def samples(policy: Policy, releases: Mapping[str, str]) -> Samples:
        # A silent gateway is known to be dead in time for liveness_seconds.
        patience = max(0.2, policy.liveness_seconds / 2)
        return Samples(paths, releases=releases, limits=policy.limits, patience=patience)

    return Parts(rules, samples, _judge)


def _judge(policy: Policy, evidence: dict[str, Any] | None) -> Judge:
    from canary.judging import EvidenceJudge  # scipy: only in a run

    return EvidenceJudge(policy, evidence)
