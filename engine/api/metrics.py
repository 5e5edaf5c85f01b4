"""Prometheus metrics of one endpoint, in a registry of its own. Labels are few and bounded: never ids, never text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from engine.api.service import EngineClient
    from engine.messages import Stats

# Edges at the limits that are judged: 80 ms is the inter-token limit of a canary step (design.md).
_ITL_BUCKETS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip
_TTFT_BUCKETS = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
_LATENCY_BUCKETS = (
    0.01, 0.025, 0.05, 0.08, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)


class Metrics:
    """All metrics of engine-api; those of engine-core are read from its last Stats at scrape time."""

    def __init__(self, client: EngineClient) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.ttft = Histogram(
            "appliance_time_to_first_token_seconds",
            "From the arrival of a request to its first token",
            buckets=_TTFT_BUCKETS,
            registry=registry,
        )
        self.itl = Histogram(
            "appliance_inter_token_latency_seconds",
            "Between two tokens of one choice, as engine-api received them",
            buckets=_ITL_BUCKETS,
            registry=registry,
        )
        self.latency = Histogram(
            "appliance_request_latency_seconds",
            "From the arrival of a request to the end of its answer",
            ["route"],
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self.prompt_length = Histogram(
            "appliance_request_prompt_tokens", "Prompt tokens per prompt", buckets=_TOKEN_BUCKETS, registry=registry
        )
        self.output_length = Histogram(
            "appliance_request_generation_tokens",
            "Generated tokens per choice",
            buckets=_TOKEN_BUCKETS,
            registry=registry,
        )
        self.prompt_tokens = Counter("appliance_prompt_tokens", "Prompt tokens accepted", registry=registry)
        self.generated_tokens = Counter("appliance_generation_tokens", "Tokens generated", registry=registry)
        self.cached_tokens = Counter(
            "appliance_prompt_tokens_cached", "Prompt tokens from the prefix cache", registry=registry
        )
        self.finished = Counter(
            "appliance_requests_finished", "Choices by finish reason", ["reason"], registry=registry
        )
        self.responses = Counter(
            "appliance_http_responses", "HTTP responses", ["route", "method", "code"], registry=registry
        )
        self.stream_errors = Counter(
            "appliance_stream_errors", "Streams that we ended with an error", registry=registry
        )
        self.resumes = Counter("appliance_stream_resumes", "Streams that a gateway asked to resume", registry=registry)
        self.registry.register(_EngineCollector(client))

    def render(self) -> bytes:
        """The exposition text (version 0.0.4)."""
        return generate_latest(self.registry)


class _EngineCollector:
    """Turns the last Stats of engine-core into samples."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def collect(self) -> Iterable[Metric]:
        client = self._client
        up = client.state in ("ready", "draining")
        yield GaugeMetricFamily("appliance_engine_up", "1 while engine-core serves", value=float(up))
        yield GaugeMetricFamily(
            "appliance_requests_queued_api", "Requests handed to engine-core and not yet begun", client.queued_requests
        )
        yield GaugeMetricFamily(
            "appliance_prompt_tokens_queued_api", "Their prompt tokens", value=client.queued_prompt_tokens
        )
        if client.stats is not None:
            yield from _core_metrics(client.stats)


def _core_metrics(stats: Stats) -> Iterable[Metric]:
    yield GaugeMetricFamily("appliance_kv_pages_free", "Free KV pages", value=stats.kv_pages_free)
    yield GaugeMetricFamily("appliance_kv_pages_total", "KV pages of the pool", value=stats.kv_pages_total)
    yield GaugeMetricFamily(
        "appliance_kv_slots_unused", "Unused token slots in last pages of running sequences", stats.kv_slots_unused
    )
    yield GaugeMetricFamily("appliance_requests_running", "Sequences in the batch", value=stats.running)
    yield GaugeMetricFamily("appliance_requests_waiting", "Sequences waiting", value=stats.waiting)
    buckets = GaugeMetricFamily(
        "appliance_requests_waiting_by_length", "Sequences waiting, by prompt length", labels=["bucket"]
    )
    for bucket, count in stats.waiting_by_bucket.items():
        buckets.add_metric([bucket], count)
    yield buckets
    yield CounterMetricFamily("appliance_engine_steps", "Steps of engine-core", value=stats.steps)
    yield CounterMetricFamily("appliance_preemptions", "Sequences preempted for memory", value=stats.preemptions)
    yield CounterMetricFamily(
        "appliance_prefix_cache_query_tokens", "Prompt tokens looked up in the prefix cache", stats.prefix_query_tokens
    )
    yield CounterMetricFamily(
        "appliance_prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache", stats.prefix_hit_tokens
    )
    yield GaugeMetricFamily("appliance_step_seconds", "Duration of the last step", value=stats.step_seconds)
