"""Windows as a run would see them, for the tests of evidence and judge."""

from __future__ import annotations

from typing import Any

from canary.evidence import Evidence
from canary.types import Policy, SideCounts, Window

EDGES = (0.05, 0.1, 0.25, 0.5)
TTFT = (0.3, 0.1, 0.01, 0.0)  # shares of first tokens that take that long: a tenth takes 100 ms


def side(requests: int = 1000, bad: int = 0, *, itl_slow: float = 0.0, late: float = 1.0, **more: Any) -> SideCounts:
    """itl_slow: share of inter-token latencies at the limit; late: how many times as many late first tokens."""
    slowness = {f"ttft:{edge:g}": round(requests * share * late) for edge, share in zip(EDGES, TTFT, strict=True)}
    values: dict[str, Any] = {
        "epoch": "a", "at": 0.0, "requests": requests, "connections": max(1, requests // 5), "clients": 12,
        "errors": {"http_5xx": bad}, "observations": {"itl": requests * 50, "ttft": requests},
        "slow": slowness | {"itl:0.08": round(requests * 50 * itl_slow)},
    }  # fmt: skip
    return SideCounts(**(values | more))


def window(canary: SideCounts | None = None, stable: SideCounts | None = None, **more: Any) -> Window:
    canary = canary or side()
    values: dict[str, Any] = {
        "seconds": 10.0, "canary": canary, "stable": stable or side(4000), "golden_ok": True,
        "kernel_connections": canary.connections,
    }  # fmt: skip
    return Window(**(values | more))


def gathered(policy: Policy, *windows: Window, times: int = 30, start: Evidence | None = None) -> Evidence:
    """Evidence of one further step in which these windows came `times` times."""
    evidence = (start or Evidence()).begin_step(policy.steps[0])
    for _ in range(times):
        for each in windows:
            evidence = evidence.add(each, policy)
    return evidence
