"""What the handlers share: client, tokenizer, configuration, metrics, keys, and whether we still take requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from aiohttp import web

from engine.api.auth import KeyStore
from engine.api.errors import ApiError, unavailable
from engine.api.metrics import Metrics
from engine.api.relay import NO_RELAY, RelayHeaders

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from engine.api.config import ApiConfig
    from engine.api.run import Run
    from engine.messages import Fatal, Fault, Generate, Loading, LoadPhase, Ready, Stats, Tokens

R = TypeVar("R")
_SLOW_STEPS = 4
_LOAD_PARTS: dict[LoadPhase, tuple[float, float]] = {
    "weights": (0.0, 0.8),
    "checksum": (0.8, 0.9),
    "warm-up": (0.9, 0.99),
}


class RequestHandle(Protocol):
    """engine.client.RequestHandle: the Tokens of one request, all choices interleaved."""

    def __aiter__(self) -> AsyncIterator[Tokens]: ...
    def abort(self, index: int | None = None) -> None: ...
    async def __aenter__(self) -> RequestHandle: ...
    async def __aexit__(self, *exc: object) -> None: ...


class EngineClient(Protocol):
    """engine.client.EngineClient, as far as the API uses it."""

    @property
    def state(self) -> str: ...
    @property
    def loading(self) -> Loading | None: ...
    @property
    def ready(self) -> Ready | None: ...
    @property
    def stats(self) -> Stats | None: ...
    @property
    def last_stats_at(self) -> float: ...
    @property
    def last_step_at(self) -> float | None: ...
    @property
    def open_requests(self) -> int: ...
    @property
    def queued_requests(self) -> int: ...
    @property
    def queued_prompt_tokens(self) -> int: ...
    @property
    def on_death(self) -> asyncio.Event: ...
    @property
    def faults(self) -> Sequence[Fault]: ...
    @property
    def fatal(self) -> Fatal | None: ...
    def check_capacity(self, num_requests: int, num_tokens: int) -> None: ...
    def submit(self, msg: Generate) -> RequestHandle: ...
    async def control(self, op: str, *, timeout_seconds: float = ..., **args: Any) -> dict[str, Any]: ...


class Tokenizer(Protocol):
    """engine.tokenizer.Tokenizer, as far as the API uses it."""

    @property
    def special_ids(self) -> dict[str, int]: ...
    @property
    def vocab_size(self) -> int: ...
    def token_text(self, token_id: int) -> str: ...
    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]: ...
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, tools: Any = None, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str: ...


class Detokenizer(Protocol):
    def push(self, ids: Sequence[int]) -> str: ...
    def flush(self) -> str: ...


class StopMatcher(Protocol):
    def push(self, text: str) -> tuple[str, str | None]: ...
    def flush(self) -> str: ...


@dataclass(slots=True)
class Context:
    """What is known about one HTTP request while it is in work."""

    request_id: str
    arrival: float  # CLOCK_MONOTONIC seconds
    trusted: bool = False  # may use the model: a key, no keys configured, or the Unix socket
    admin: bool = False
    key_label: str | None = None
    run: Run | None = None
    buffered_bytes: int = 0  # of its body, see Service.reserve
    error_code: str | None = None  # for the log line
    error_param: str | None = None
    relay: RelayHeaders = NO_RELAY  # what a gateway says of it


class Service:
    """Everything a handler needs. One per application."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        config: ApiConfig,
        *,
        make_detokenizer: Callable[..., Detokenizer],
        make_stop_matcher: Callable[[list[str]], StopMatcher],
    ) -> None:
        self.client, self.tokenizer, self.config = client, tokenizer, config
        self.make_detokenizer, self.make_stop_matcher = make_detokenizer, make_stop_matcher
        self.keys = KeyStore(config.key_file)
        self.admin_keys = KeyStore(config.admin_key_file)
        self.metrics = Metrics(client)
        self.pool = ThreadPoolExecutor(config.tokenizer_threads, thread_name_prefix="tokenize")
        self.large_pool = ThreadPoolExecutor(1, thread_name_prefix="tokenize-large")
        self.large_backlog_bytes = 0  # waiting for, or in work in, large_pool
        self.started = time.time()
        self.drain_reason: str | None = None  # set by /admin/drain or SIGTERM
        self.shutting_down = False
        self.runs: set[Run] = set()
        self.streams = 0
        self.active = 0  # requests in work, probes not counted
        self.connections = 0
        self.metrics_public = True  # False on a listener beyond loopback
        self._buffered_bytes = 0
        self._longest_token: int | None = None

    async def offload(self, function: Callable[..., R], *args: Any, size: int) -> R:
        """Run something long in the tokenizer's threads. `size` is about how many bytes it works on: large work has a
        thread of its own, so that nobody's ordinary request waits behind it."""
        loop = asyncio.get_running_loop()
        if size <= self.config.limits.large_work_bytes:
            return await loop.run_in_executor(self.pool, lambda: function(*args))
        self.large_backlog_bytes += size
        try:
            return await loop.run_in_executor(self.large_pool, lambda: function(*args))
        finally:
            self.large_backlog_bytes -= size

    async def longest_token(self) -> int:
        """Bytes of the longest token of the vocabulary: no token adds more characters than that to a text."""
        if self._longest_token is None:
            tokenizer = self.tokenizer

            def look() -> int:
                return max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))

            self._longest_token = await self.offload(look, size=0)
        return self._longest_token

    def check_large_backlog(self, num_bytes: int) -> None:
        """429 for a large body while too much large work waits; one that waits for nobody is always taken."""
        limits = self.config.limits
        if num_bytes <= limits.large_work_bytes or not self.large_backlog_bytes:
            return
        if self.large_backlog_bytes + num_bytes > limits.max_large_backlog_bytes:
            raise ApiError(429, "too many large requests at once", code="queue_full", headers={"Retry-After": "2"})

    def reserve(self, context: Context, num_bytes: int) -> None:
        """Account for a piece of a body in memory; 429 when all bodies together are too much."""
        if self._buffered_bytes + num_bytes > self.config.limits.max_buffered_bytes:
            raise ApiError(429, "too many large requests at once", code="queue_full", headers={"Retry-After": "1"})
        self._buffered_bytes += num_bytes
        context.buffered_bytes += num_bytes

    def release(self, context: Context) -> None:
        """The body of this request is in memory no more."""
        self._buffered_bytes -= context.buffered_bytes
        context.buffered_bytes = 0

    def not_ready(self) -> tuple[str, str] | None:
        """(code, reason) why no request is taken now, or None."""
        state = self.client.state
        if state == "dead":
            return "engine_dead", "the engine is gone; it must be restarted"
        if self.drain_reason is not None or state == "draining":
            return "draining", self.drain_reason or "the engine is draining"
        if state == "loading" or self.client.ready is None:
            return "loading", f"the model is loading ({100 * self.load_fraction:.0f} %)"
        silent = time.monotonic() - self.client.last_stats_at
        stats = self.client.stats
        # A large model on a slow CPU may need longer than the limit for one honest step.
        longest = max(
            self.config.timeouts.heartbeat, _SLOW_STEPS * stats.longest_step_seconds if stats is not None else 0.0
        )
        if silent > longest:
            return "engine_silent", f"the engine has not reported for {silent:.0f} s"
        return None

    def check_ready(self) -> None:
        """503 + Retry-After while loading, draining, dead or silent."""
        problem = self.not_ready()
        if problem is not None:
            code, reason = problem
            raise unavailable(reason, code)

    @property
    def load_fraction(self) -> float:
        """Of the load, 0 to 1; never falls, and is 1 only when the model is loaded. Each phase has a part that is about
        its share of the time."""
        if self.client.ready is not None:
            return 1.0
        loading = self.client.loading
        if loading is None:
            return 0.0
        start, end = _LOAD_PARTS[loading.phase]
        return start + (end - start) * (min(loading.done / loading.total, 1.0) if loading.total else 0.0)

    @property
    def max_model_len(self) -> int:
        ready = self.client.ready
        return ready.max_model_len if ready is not None else self.config.max_model_len

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, which may be more than the tokenizer's entries."""
        ready = self.client.ready
        if ready is None:
            raise unavailable("the model is loading", "loading")
        return ready.vocab_size

    @property
    def fingerprint(self) -> str:
        """Changes whenever weights, engine version or backend change: same fingerprint and seed, same bits."""
        ready = self.client.ready
        checksum, backend = (ready.weights_checksum[:12], ready.backend) if ready else ("", "")
        return f"fp_{checksum}_{backend}_{self.config.version}"


SERVICE = web.AppKey("service", Service)
CONTEXT = web.RequestKey("context", Context)
