"""One HTTP request at work: submits its prompts to the engine, collects what comes back, ends what is left.

A Run owns one RequestHandle per prompt. Whatever way it is left (answered, stop string, error, client gone, deadline,
shutdown), every unfinished choice is aborted at once, so that its KV pages are free within two steps.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from engine.api.choice import Choice
from engine.api.errors import ApiError, from_engine, too_large, unavailable
from engine.api.offsets import prompt_offsets
from engine.api.relay import Replay
from engine.errors import AdmissionError, EngineError
from engine.log import log_event
from engine.messages import Generate, Tokens
from engine.types import FinishReason, TokenLogprob

if TYPE_CHECKING:
    from types import TracebackType

    from engine.api.choice import Delta
    from engine.api.relay import Progress
    from engine.api.sampling import Plan
    from engine.api.service import RequestHandle, Service, StopMatcher

logger = logging.getLogger(__name__)
_INLINE_STOP_CHARS = 256
_INLINE_LOGPROBS = 4096
_REASONS = {
    "deadline_exceeded": "deadline",
    "shutting_down": "shutdown",
    "aborted": "abort",
    "context_length_exceeded": "refused",
}
"""Codes of the errors that end a run -> the finish reason under which its open choices are counted; others: error."""


@dataclass(slots=True)
class Prompt:
    """One prompt and its n choices."""

    ids: list[int]
    max_tokens: int
    echo: str | None = None  # the prompt's text, to be sent before the answer
    added: tuple[int, int] | None = (
        None  # None: echo was decoded from ids; else ids before and behind its own (BOS, EOS)
    )
    choices: list[Choice] = field(default_factory=list)
    scores: list[TokenLogprob | None] = field(default_factory=list)  # echo: as they come, chunk by chunk
    waits_for_logprobs: bool = False  # nothing is sent before the prompt's logprobs are here
    open_choices: int = 0

    @property
    def done(self) -> bool:
        return self.open_choices == 0

    @property
    def cached_tokens(self) -> int:
        """Of this prompt, taken from the prefix cache by that of its choices that found most."""
        return max((choice.cached_tokens or 0 for choice in self.choices), default=0)


class Run:
    """Use as `async with Run(...) as run`, then `batches()` (stream) or `wait()` (JSON)."""

    def __init__(
        self,
        service: Service,
        plan: Plan,
        prompts: list[Prompt],
        *,
        request_id: str,
        arrival: float,
        stream: bool,
        resume: dict[int, Progress] | None = None,
    ) -> None:
        """`resume`: what the client has of each choice, which next_batch() then leaves out."""
        self.service, self.plan, self.prompts, self.request_id = service, plan, prompts, request_id
        self.error: ApiError | None = None
        self._arrival, self._stream = arrival, stream
        self._echo_logprobs = plan.params.logprobs is not None and any(p.echo is not None for p in prompts)
        self._handles: list[RequestHandle] = []
        self._pumps: list[asyncio.Task[None]] = []
        self._matcher: StopMatcher | None = None
        self._wake = asyncio.Event()
        self._dirty: dict[int, Choice] = {}
        self._first_token = False
        self._replays = {index: Replay(index, sent) for index, sent in (resume or {}).items()}
        self._resume = resume or {}
        self._last_batch = 0.0
        self._last_ping = time.monotonic()
        self._deadline_timer: asyncio.TimerHandle | None = None

    # ---- life ------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Run:
        service, stops = self.service, self.plan.stops
        if stops:
            # Built once for all choices (its tables are shared), and not on the event loop when the strings are long.
            size = sum(map(len, stops))
            self._matcher = (
                service.make_stop_matcher(stops)
                if size <= _INLINE_STOP_CHARS
                else await service.offload(service.make_stop_matcher, stops, size=size)
            )
        service.check_ready()
        try:
            self._submit()
        except EngineError as exc:
            self._close()
            raise from_engine(exc) from exc
        except BaseException:
            self._close()
            raise
        self.service.runs.add(self)
        if self._stream:
            self.service.streams += 1
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.service.runs.discard(self)
        if self._stream:
            self.service.streams -= 1
        self._close()
        left = kind is None or issubclass(kind, asyncio.CancelledError | ConnectionError)
        self._observe_end("disconnect" if left else "error")

    def _submit(self) -> None:
        service, plan = self.service, self.plan
        try:
            service.client.check_capacity(len(self.prompts), self.prompt_tokens)  # all prompts or none
        except AdmissionError as exc:
            raise too_large(f"{exc.message}; split the request", "prompt", "queue_exceeded") from exc
        index = 0
        unique = secrets.token_hex(4)  # a client may use one X-Request-Id twice
        for number, prompt in enumerate(self.prompts):
            offset = len(prompt.echo) if prompt.echo is not None else 0
            prompt.choices = [Choice(service, plan, index + i, offset, self._matcher) for i in range(plan.n)]
            for choice in prompt.choices:
                if (sent := self._resume.get(choice.index)) is not None:
                    choice.cached_tokens = sent.cached  # usage says what the first attempt would have said
            prompt.open_choices = plan.n
            index += plan.n
            prompt.waits_for_logprobs = self._echo_logprobs
            if prompt.echo is not None and not self._echo_logprobs:
                for choice in prompt.choices:
                    choice.prepend(prompt.echo, [])
                    self._dirty[choice.index] = choice
            handle = service.client.submit(
                Generate(
                    request_id=f"{self.request_id}.{unique}.{number}",
                    client_id=self.request_id,
                    prompt_ids=prompt.ids,
                    params=msgspec.structs.replace(plan.params, max_tokens=prompt.max_tokens),
                    n=plan.n,
                    echo_logprobs=self._echo_logprobs,
                    deadline=plan.deadline,
                    cache_salt=plan.cache_salt,
                )
            )
            self._handles.append(handle)
        for prompt, handle in zip(self.prompts, self._handles, strict=True):
            self._pumps.append(asyncio.create_task(self._pump(prompt, handle)))
            service.metrics.prompt_tokens.inc(len(prompt.ids))
            service.metrics.prompt_length.observe(len(prompt.ids))
        grace = plan.deadline - time.monotonic() + service.config.timeouts.deadline_grace
        self._deadline_timer = asyncio.get_running_loop().call_later(max(grace, 0), self.fail, self._deadline_error())

    def _close(self) -> None:
        """Abort what has not finished and stop listening. Idempotent, never waits."""
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        for prompt, handle in zip(self.prompts, self._handles, strict=False):
            if not prompt.done:
                handle.abort()
        for pump in self._pumps:
            pump.cancel()

    def fail(self, error: ApiError) -> None:
        """End the run with `error` (the first one counts)."""
        if self.error is None:
            self.error = error
        self._wake.set()

    # ---- from the engine -------------------------------------------------------------------------------------------

    async def _pump(self, prompt: Prompt, handle: RequestHandle) -> None:
        try:
            async with handle:
                async for message in handle:
                    if message.prompt_logprobs is not None and prompt.waits_for_logprobs:
                        prompt.scores += message.prompt_logprobs
                        if len(prompt.scores) == len(prompt.ids):
                            await self._take_prompt_logprobs(prompt)
                    self._take(prompt, handle, message)
                    if prompt.done or self.error is not None:
                        break
            if not prompt.done and self.error is None:
                self.fail(ApiError(500, "the engine ended the request without finishing it", code="engine_error"))
        except EngineError as exc:
            self.fail(from_engine(exc))
        except asyncio.CancelledError:
            raise
        except Exception as exc:
            log_event(logger, logging.ERROR, "request_failed", str(exc), req_id=self.request_id, exc_info=True)
            self.fail(ApiError(500, "internal error; the log has it under this request id", code="internal_error"))
        finally:
            self._wake.set()

    def _take(self, prompt: Prompt, handle: RequestHandle, message: Tokens) -> None:
        choice = prompt.choices[message.index]
        if choice.cached_tokens is None:  # the first message says it
            choice.cached_tokens = message.cached_tokens
        if choice.done():
            return
        if message.finish_reason in (FinishReason.ERROR, FinishReason.DEADLINE, FinishReason.ABORT):
            self._ended_badly(message)
            return
        if message.token_ids:
            self._observe_tokens(choice, len(message.token_ids))
        choice.feed(message)
        if choice.done():
            prompt.open_choices -= 1
            if message.finish_reason is None:
                handle.abort(message.index)  # a stop string: the engine does not know yet
            self.service.metrics.finished.labels(str(choice.finish_reason)).inc()
        if choice.dirty and not prompt.waits_for_logprobs:
            self._dirty[choice.index] = choice
        if self._stream or prompt.done:
            self._wake.set()

    async def _take_prompt_logprobs(self, prompt: Prompt) -> None:
        service, skip = self.service, self.plan.skip_special_tokens

        def place() -> list[tuple[TokenLogprob, int]]:
            offsets = prompt_offsets(service, prompt.ids, prompt.echo or "", prompt.added, skip_special_tokens=skip)
            # The first token has no logprob; NaN marks it for the renderer, which writes null.
            scores = (score or TokenLogprob(prompt.ids[0], float("nan")) for score in prompt.scores)
            return list(zip(scores, offsets, strict=True))

        entries = await service.offload(place, size=64 * len(prompt.ids))
        prompt.waits_for_logprobs = False
        for choice in prompt.choices:
            choice.prepend(prompt.echo or "", list(entries))
            self._dirty[choice.index] = choice

    def _ended_badly(self, message: Tokens) -> None:
        if message.finish_reason == FinishReason.DEADLINE:
            self.fail(self._deadline_error())
        elif message.finish_reason == FinishReason.ABORT:
            self.fail(unavailable("the engine ended this request (it is draining or was told to)", "aborted", 1))
        elif message.refused:
            self.fail(too_large(message.error or "this request can never be served", None, "context_length_exceeded"))
        else:
            text = message.error or "the engine could not go on with this request"
            log_event(logger, logging.ERROR, "engine_error", text, req_id=self.request_id, where=message.error_where)
            self.fail(ApiError(500, text, code="engine_error", where=message.error_where))

    @staticmethod
    def _deadline_error() -> ApiError:
        return ApiError(504, "the request's deadline passed before its answer was complete", code="deadline_exceeded")

    # ---- to the client ---------------------------------------------------------------------------------------------

    async def wait(self) -> None:
        """Until every choice has finished; raises the ApiError that ended the run."""
        while not self.done:
            if self.error is not None:
                raise self.error
            await self._wake.wait()
            self._wake.clear()

    @property
    def done(self) -> bool:
        return all(prompt.done for prompt in self.prompts)

    async def next_batch(self) -> list[tuple[Choice, Delta]] | None:
        """What there is to send: one Delta per choice, in order of arrival; None at the end; [] after a silence.

        Under load the tokens due within `coalesce_seconds` share a batch; the first one never waits.
        """
        config = self.service.config
        while True:
            if self._dirty:
                if self.service.streams >= config.coalesce_min_streams and not self.done and self.error is None:
                    wait = self._last_batch + config.coalesce_seconds - time.monotonic()
                    if wait > 0:
                        await asyncio.sleep(wait)
                dirty, self._dirty = self._dirty, {}
                batch = [(choice, choice.take()) for choice in dirty.values()]
                if self._replays and not (batch := await self._leave_out(batch)):
                    continue
                self._last_batch = time.monotonic()
                return batch
            if self.error is not None:
                raise self.error
            if self.done:
                return None
            silent_since = max(self._last_batch, self._last_ping)
            wait = silent_since + config.timeouts.sse_ping - time.monotonic()
            if wait <= 0:
                self._last_ping = time.monotonic()
                return []
            timer = asyncio.get_running_loop().call_later(wait, self._wake.set)
            try:
                await self._wake.wait()
            finally:
                timer.cancel()
            self._wake.clear()

    async def _leave_out(self, batch: list[tuple[Choice, Delta]]) -> list[tuple[Choice, Delta]]:
        """The batch without what was sent before the stream was cut."""

        def cut() -> None:
            for choice, delta in batch:
                if (replay := self._replays.get(choice.index)) is not None:
                    replay.cut(delta)

        count = sum(len(delta.logprobs) for _, delta in batch)
        try:
            await self.service.offload(cut, size=count) if count > _INLINE_LOGPROBS else cut()
        except ApiError as exc:
            log_event(logger, logging.ERROR, exc.code or "error", exc.message, req_id=self.request_id)
            raise
        return [
            (choice, delta)
            for choice, delta in batch
            if delta.text or delta.logprobs or delta.finish_reason is not None
        ]

    # ---- accounts --------------------------------------------------------------------------------------------------

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self.prompts)

    @property
    def completion_tokens(self) -> int:
        return sum(choice.num_tokens for prompt in self.prompts for choice in prompt.choices)

    @property
    def cached_tokens(self) -> int:
        return sum(prompt.cached_tokens for prompt in self.prompts)

    def _observe_tokens(self, choice: Choice, count: int) -> None:
        now, metrics = time.monotonic(), self.service.metrics
        if not self._first_token:
            self._first_token = True
            metrics.ttft.observe(now - self._arrival)
        if choice.last_token_at:
            interval = (now - choice.last_token_at) / count
            for _ in range(count):
                metrics.itl.observe(interval)
        choice.last_token_at = now

    def _observe_end(self, without_error: str) -> None:
        """Every choice counts once: by its own finish reason (then it did already), or by what ended the run;
        `without_error` when that was no error of ours."""
        reason = without_error if self.error is None else _REASONS.get(self.error.code or "", "error")
        metrics = self.service.metrics
        metrics.generated_tokens.inc(self.completion_tokens)
        metrics.cached_tokens.inc(self.cached_tokens)
        for prompt in self.prompts:
            for choice in prompt.choices:
                metrics.output_length.observe(choice.num_tokens)
                if not choice.done():
                    metrics.finished.labels(reason).inc()
        if self.service.config.log_prompts:
            self._log_exchange()

    def _log_exchange(self) -> None:
        """Only when the operator asked for it: what was said."""
        for prompt in self.prompts:
            log_event(
                logger,
                logging.INFO,
                "exchange",
                req_id=self.request_id,
                prompt=self.service.tokenizer.decode(prompt.ids, skip_special_tokens=False),
                outputs=["".join(choice.kept or []) for choice in prompt.choices],
            )
