"""Counters and histograms of a gateway as plain dicts: an observation costs well under a microsecond, and the worker
processes' can be added up. `render` gives Prometheus text format 0.0.4. Labels are few and bounded: never ids or text.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

Labels = tuple[str, ...]

# Edges at the limits that are judged: 80 ms is the inter-token limit of a canary step (design.md).
GAP_EDGES = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.05,
    0.06,
    0.08,
    0.1,
    0.15,
    0.25,
    0.5,
    1.0,
    2.5,
    10.0,
)
FIRST_EDGES = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
LATENCY_EDGES = (0.01, 0.025, 0.05, 0.08, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Counter:
    """Only ever grows; its name in the text ends in _total."""

    kind = "counter"

    def __init__(self, name: str, text: str, labels: Sequence[str] = ()) -> None:
        self.name, self.text, self.labels = name, text, tuple(labels)
        self.values: dict[Labels, float] = {}

    def inc(self, *labels: str, by: float = 1.0) -> None:
        self.values[labels] = self.values.get(labels, 0.0) + by

    def export(self) -> list[tuple[Labels, Any]]:
        return list(self.values.items())


class Gauge(Counter):
    """Set at the moment it is asked for."""

    kind = "gauge"

    def set(self, value: float, *labels: str) -> None:
        self.values[labels] = value


class Histogram:
    """Cumulative buckets with the given upper edges (seconds) and +Inf."""

    kind = "histogram"

    def __init__(self, name: str, text: str, labels: Sequence[str], edges: Iterable[float]) -> None:
        self.name, self.text, self.labels = name, text, tuple(labels)
        self.edges = sorted(set(edges))
        self.cells: dict[Labels, list[float]] = {}  # counts a bucket (not cumulative), then the sum

    def cell(self, *labels: str) -> list[float]:
        """The cell of one set of labels, for `add` on a hot path."""
        return self.cells.setdefault(labels, [0.0] * (len(self.edges) + 2))

    def add(self, cell: list[float], value: float) -> None:
        cell[bisect_left(self.edges, value)] += 1.0
        cell[-1] += value

    def observe(self, value: float, *labels: str) -> None:
        self.add(self.cell(*labels), value)

    def export(self) -> list[tuple[Labels, Any]]:
        return list(self.cells.items())


Metric = Counter | Histogram


class GatewayMetrics:
    """What one worker counts. `edges`: further histogram edges, at the operator's limits."""

    def __init__(self, slot: str, edges: Iterable[float] = ()) -> None:
        self.slot = slot
        further = tuple(edges)
        self.requests = Counter(
            "appliance_gateway_requests_total", "Answered requests by status", ("slot", "release", "route", "code")
        )
        self.latency = Histogram(
            "appliance_gateway_request_seconds",
            "From the arrival of a request to the end of its answer, by class of status; 499: its client left by then",
            ("slot", "release", "route", "code"),
            LATENCY_EDGES + further,
        )
        self.first_byte = Histogram(
            "appliance_gateway_first_byte_seconds",
            "From the arrival of a request to the first byte of its answer",
            ("slot", "release", "route"),
            FIRST_EDGES + further,
        )
        self.gap = Histogram(
            "appliance_gateway_event_gap_seconds",
            "Between two pieces of one stream as they were sent to the client, pauses of a replay included",
            ("slot", "release"),
            GAP_EDGES + further,
        )
        self.first_token = Histogram(
            "appliance_gateway_time_to_first_token_seconds",
            "From the arrival of a request to the first token of its stream",
            ("slot", "release"),
            FIRST_EDGES + further,
        )
        self.left = Histogram(
            "appliance_gateway_left_waiting_seconds",
            "How long a client that left had waited by then: ttft, for a stream's first token; itl, for its next one",
            ("slot", "release", "metric"),
            (*GAP_EDGES, *FIRST_EDGES, *further),
        )
        self.accepted = Counter(
            "appliance_gateway_accepted_connections_total",
            "Connections taken from the public listener, also those that then end in a TLS handshake",
            ("slot",),
        )
        self.opened = Counter(
            "appliance_gateway_opened_connections_total",
            "Of these, those that HTTP began on, by whether netfilter sent them here from another port",
            ("slot", "release", "via"),
        )
        self.closed = Counter(
            "appliance_gateway_closed_keepalives_total",
            "Connections ended by us with an answer that says so, while a canary run is on",
            ("slot", "reason"),
        )
        self.errors = Counter(
            "appliance_gateway_errors_total",
            "Requests that a client sees as failed by the server, by class",
            ("slot", "release", "class"),
        )
        self.retries = Counter(
            "appliance_gateway_retries_total",
            "Requests handed to a further engine before their first byte, by what the one before did",
            ("slot", "release", "reason"),
        )
        self.replays = Counter(
            "appliance_gateway_replays_total",
            "Streams cut in the middle, by what became of them",
            ("slot", "release", "outcome"),
        )
        self.disconnects = Counter(
            "appliance_gateway_disconnects_total", "Requests whose client left before the end", ("slot", "release")
        )
        self.responses = _Malformed(self)

    def all(self) -> list[Metric]:
        return [
            self.requests, self.latency, self.first_byte, self.gap, self.first_token, self.left,
            self.errors, self.retries, self.replays, self.disconnects, self.accepted, self.opened, self.closed,
        ]  # fmt: skip


class _Malformed:
    """What engine.api.connection counts: requests that never became one (not HTTP, headers too long)."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._labels: tuple[str, str] = ("malformed", "400")

    def labels(self, route: str, method: str, code: str) -> _Malformed:
        self._labels = (route, code)
        return self

    def inc(self) -> None:
        self._metrics.requests.inc(self._metrics.slot, "", *self._labels)
        if self._labels[1].startswith("5"):
            self._metrics.errors.inc(self._metrics.slot, "", "internal")


# ---- sums and text -------------------------------------------------------------------------------------------------

Snapshot = dict[str, list[tuple[Labels, Any]]]
"""Metric name -> samples, as JSON can carry it."""


def snapshot(metrics: Iterable[Metric]) -> Snapshot:
    return {metric.name: metric.export() for metric in metrics}


def merge(metrics: Iterable[Metric], snapshots: Iterable[Snapshot]) -> None:
    """Add the samples of other processes (same code, so same edges) to `metrics`."""
    known = {metric.name: metric for metric in metrics}
    for one in snapshots:
        for name, samples in one.items():
            metric = known[name]
            for labels, value in samples:
                if isinstance(metric, Histogram):
                    cell = metric.cell(*labels)
                    cell[:] = [a + b for a, b in zip(cell, value, strict=True)]
                else:
                    metric.inc(*labels, by=value)


def render(metrics: Iterable[Metric]) -> bytes:
    """Prometheus text format 0.0.4 (prometheus.io/docs/instrumenting/exposition_formats)."""
    lines: list[str] = []
    for metric in metrics:
        lines += [f"# HELP {metric.name} {_escape(metric.text)}", f"# TYPE {metric.name} {metric.kind}"]
        lines += _histogram(metric) if isinstance(metric, Histogram) else _simple(metric)
    return ("\n".join(lines) + "\n").encode()


def _simple(metric: Counter) -> Iterator[str]:
    for labels, value in metric.values.items():
        yield f"{metric.name}{_labels(metric.labels, labels)} {_number(value)}"


def _histogram(metric: Histogram) -> Iterator[str]:
    names = (*metric.labels, "le")
    for labels, cell in metric.cells.items():
        total = 0.0
        for edge, count in zip([*metric.edges, math.inf], cell[:-1], strict=True):
            total += count
            yield f"{metric.name}_bucket{_labels(names, (*labels, _number(edge)))} {_number(total)}"
        yield f"{metric.name}_sum{_labels(metric.labels, labels)} {_number(cell[-1])}"
        yield f"{metric.name}_count{_labels(metric.labels, labels)} {_number(total)}"


def _labels(names: Sequence[str], values: Sequence[str]) -> str:
    if not names:
        return ""
    return "{" + ",".join(f'{name}="{quote_label(value)}"' for name, value in zip(names, values, strict=True)) + "}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def quote_label(text: str) -> str:
    """A label's value, without the quotes around it."""
    return _escape(text).replace('"', '\\"')


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf"
    return str(int(value)) if value == int(value) else repr(value)
