"""The controller's parts on a real host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from appliance.hostconfig import Gateway, load_config
from appliance.paths import Paths
from canary.netfilter.apply import Netfilter
from canary.seams import Judge, Parts, Samples
from canary.types import Policy


def real_parts(paths: Paths) -> Parts:
    """HostConfigError where appliance.toml cannot be used."""
    gateway = load_config(paths.config).gateway
    rules = Netfilter(port=gateway.port, canary_port=gateway.canary_port, lock=paths.run / "netfilter")
    return Parts(rules, lambda policy, releases: _samples(paths, gateway, policy, releases), _judge)


def _samples(paths: Paths, gateway: Gateway, policy: Policy, releases: Mapping[str, str]) -> Samples:
    from canary.probed import ProbedSamples  # TLS and threads: only in a run

    return ProbedSamples(paths, gateway, policy, releases)


def _judge(policy: Policy, evidence: dict[str, Any] | None) -> Judge:
    from canary.judging import EvidenceJudge  # scipy: only in a run

    return EvidenceJudge(policy, evidence)
