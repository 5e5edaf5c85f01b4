"""Stand-ins with the engine's surfaces: a client that answers from a script, a byte tokenizer, a naive stop matcher."""

from __future__ import annotations

import asyncio
import codecs
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.errors import AdmissionError, EngineDead, QueueFull, TemplateError, TextError
from engine.messages import Fatal, Fault, Generate, Ready, Stats, Tokens
from engine.types import DeviceId, FinishReason, TokenLogprob

BOS, EOS, IM_START, IM_END = 256, 257, 258, 259
SPECIAL = {"<s>": BOS, "</s>": EOS, "<|im_start|>": IM_START, "<|im_end|>": IM_END}
TEXT = {token: text for text, token in SPECIAL.items()}
VOCAB = 272  # a few rows more than the tokenizer has entries, as real models do


class ByteTokenizer:
    """One token per byte, four special ones, ChatML."""

    vocab_size = 260
    bos_token_id = BOS
    eos_token_id = EOS
    special_ids = SPECIAL

    def __init__(self, *, bos: bool = True) -> None:
        self.bos = bos
        self.encode_threads: list[int] = []
        self.template_kwargs: dict[str, Any] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        self.encode_threads.append(threading.get_ident())
        ids = [BOS] if add_special_tokens and self.bos else []
        try:
            data = text.encode()
        except UnicodeEncodeError as exc:
            raise TextError("lone surrogate", position=exc.start) from exc
        while data:
            for name, token in SPECIAL.items():
                if parse_special and data.startswith(name.encode()):
                    ids.append(token)
                    data = data[len(name) :]
                    break
            else:
                cut = data.find(b"<", 1) if parse_special else -1
                piece, data = (data, b"") if cut < 0 else (data[:cut], data[cut:])
                ids.extend(piece)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        detokenizer = ByteDetokenizer(self, skip_special_tokens=skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.flush()

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else TEXT.get(token_id, "").encode()

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, tools: Any = None, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        self.template_kwargs = kwargs
        if messages[0]["role"] == "assistant":
            raise TemplateError("the conversation must not begin with the assistant")
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")


class ByteDetokenizer:
    def __init__(self, tokenizer: ByteTokenizer, *, skip_special_tokens: bool = True) -> None:
        self._skip = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        out = ""
        for token in ids:
            if token < 256:
                out += self._decoder.decode(bytes([token]))
            elif not self._skip:
                out += self._decoder.decode(b"", True) + TEXT.get(token, "")
        return out

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class NaiveStopMatcher:
    """Holds back the longest suffix that is a prefix of a stop string."""

    def __init__(self, stops: list[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        emit = ""
        for character in text:
            self._held += character
            for stop in sorted(self._stops, key=len, reverse=True):
                if self._held.endswith(stop):
                    emit += self._held[: -len(stop)]
                    self._held = ""
                    return emit, stop
            keep = next(
                k
                for k in range(len(self._held), -1, -1)
                if any(stop.startswith(self._held[len(self._held) - k :]) for stop in self._stops)
            )
            cut = len(self._held) - keep
            emit, self._held = emit + self._held[:cut], self._held[cut:]
        return emit, None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


@dataclass
class Script:
    """How the fake engine behaves."""

    reply: Callable[[Generate, int], list[int]] | None = None  # tokens of a choice; default from the seed
    token_delay: float = 0.0
    first_delay: float = 0.0
    tokens_per_message: int = 1
    never_answer: bool = False
    fail_after: int | None = None  # tokens, then finish_reason error
    end_early_after: int | None = None  # tokens, then the iterator ends without a finish reason
    finish: FinishReason | None = None  # instead of stop or length
    control_delay: float = 0.0
    max_queue: int = 1000
    max_queued_tokens: int = 262_144


@dataclass
class FakeHandle:
    client: FakeClient
    msg: Generate
    queue: asyncio.Queue[Tokens | BaseException | None] = field(default_factory=asyncio.Queue)
    unfinished: set[int] = field(default_factory=set)
    aborts: list[int | None] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    def __aiter__(self) -> AsyncIterator[Tokens]:
        return self

    async def __anext__(self) -> Tokens:
        item = await self.queue.get()
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, BaseException):
            raise item
        return item

    def abort(self, index: int | None = None) -> None:
        self.aborts.append(index)
        gone = set(self.unfinished) if index is None else self.unfinished & {index}
        self.unfinished -= gone
        for one in gone:
            self.queue.put_nowait(
                Tokens(request_id=self.msg.request_id, index=one, token_ids=[], finish_reason=FinishReason.ABORT)
            )
        if not self.unfinished:
            self.end()

    def end(self) -> None:
        self.client.running.discard(self.msg.request_id)
        if self.task is not None:
            self.task.cancel()
        self.queue.put_nowait(None)

    async def __aenter__(self) -> FakeHandle:
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self.unfinished:
            self.abort()


class FakeClient:
    """engine.client.EngineClient without an engine."""

    def __init__(self, script: Script | None = None, *, max_model_len: int = 512) -> None:
        self.script = script or Script()
        self.state = "ready"
        self.loading = None
        self.ready: Ready | None = Ready(
            kv_pages=64,
            max_model_len=max_model_len,
            vocab_size=VOCAB,
            weights_bytes=1000,
            weights_checksum="c0ffee" * 10,
            load_seconds=0.1,
            backend="fake",
            device=DeviceId("fake", "GPU-fake", "Fake 1"),
        )
        self.stats: Stats | None = Stats(
            steps=1,
            kv_pages_free=60,
            kv_pages_total=64,
            kv_slots_unused=3,
            running=1,
            waiting=0,
            waiting_by_bucket={"1-128": 0},
        )
        self.last_stats_at = time.monotonic() + 3600  # never stale unless a test says so
        self.last_step_at: float | None = time.monotonic()
        self.queued_requests = 0
        self.queued_prompt_tokens = 0
        self.on_death = asyncio.Event()
        self.fatal: Fatal | None = None
        self.faults: list[Fault] = []
        self.submitted: list[Generate] = []
        self.handles: list[FakeHandle] = []
        self.running: set[str] = set()
        self.controls: list[tuple[str, dict[str, Any]]] = []
        self.control_timeouts: list[float] = []
        self.cancelled_controls = 0

    @property
    def open_requests(self) -> int:
        return len(self.running)

    def check_capacity(self, num_requests: int, num_tokens: int) -> None:
        if self.state == "dead":
            raise EngineDead("engine-core exited with signal 9")
        script = self.script
        if num_requests > script.max_queue or (num_requests > 1 and num_tokens > script.max_queued_tokens):
            raise AdmissionError(f"{num_requests} prompts of {num_tokens} tokens are more than this server queues")
        if len(self.running) + num_requests > script.max_queue:
            raise QueueFull("too many requests are waiting", retry_after_seconds=3)

    def submit(self, msg: Generate) -> FakeHandle:
        self.check_capacity(1, len(msg.prompt_ids))
        assert msg.request_id not in {h.msg.request_id for h in self.handles}
        handle = FakeHandle(self, msg, unfinished=set(range(msg.n)))
        self.submitted.append(msg)
        self.handles.append(handle)
        self.running.add(msg.request_id)
        if not self.script.never_answer:
            handle.task = asyncio.create_task(self._generate(handle))
        return handle

    async def control(self, op: str, *, timeout_seconds: float = 60.0, **args: Any) -> dict[str, Any]:
        self.controls.append((op, args))
        self.control_timeouts.append(timeout_seconds)
        try:
            await asyncio.sleep(self.script.control_delay)
        except asyncio.CancelledError:
            self.cancelled_controls += 1
            raise
        return {"hash": "abc"}

    def fail(self, handle: FakeHandle, error: str) -> None:
        """Report an engine error for every choice of one request."""
        for index in sorted(handle.unfinished):
            message = Tokens(
                request_id=handle.msg.request_id,
                index=index,
                token_ids=[],
                finish_reason=FinishReason.ERROR,
                error=error,
                error_where={"op": "lm_head"},
            )
            handle.queue.put_nowait(message)
        handle.unfinished.clear()
        handle.end()

    def die(self) -> None:
        self.state = "dead"
        self.on_death.set()
        for handle in self.handles:
            if handle.unfinished:
                handle.queue.put_nowait(EngineDead("engine-core exited with signal 9"))
                handle.unfinished.clear()
                if handle.task is not None:
                    handle.task.cancel()
        self.running.clear()

    # ---- generation ------------------------------------------------------------------------------------------------

    def tokens(self, msg: Generate, index: int) -> list[int]:
        if self.script.reply is not None:
            return self.script.reply(msg, index)
        rng = random.Random(f"{msg.params.seed}/{index if msg.params.temperature else 0}")
        return [rng.randrange(97, 123) for _ in range(2 * msg.params.max_tokens)]

    async def _generate(self, handle: FakeHandle) -> None:
        msg, script = handle.msg, self.script
        await asyncio.sleep(script.first_delay)
        replies = [self.tokens(msg, index) for index in range(msg.n)]
        extra: dict[str, Any] = {"cached_tokens": 0}
        if msg.echo_logprobs:
            extra["prompt_logprobs"] = [None] + [self._logprob(msg, t) for t in msg.prompt_ids[1:]]
        position = 0
        while handle.unfinished:
            for index in sorted(handle.unfinished):
                self._step(handle, index, replies[index], position, extra)
                extra = {}
            position += script.tokens_per_message
            await asyncio.sleep(script.token_delay)

    def _step(self, handle: FakeHandle, index: int, reply: list[int], position: int, extra: dict[str, Any]) -> None:
        msg, script, params = handle.msg, self.script, handle.msg.params
        now: list[int] = []
        finish: FinishReason | None = FinishReason.LENGTH if params.max_tokens == 0 else None
        stop_id = None
        for token in reply[position : position + script.tokens_per_message]:
            count = position + len(now)
            if count >= params.max_tokens:
                finish = FinishReason.LENGTH
                break
            ends = token in params.stop_token_ids or (token in params.eos_token_ids and not params.ignore_eos)
            if ends and count >= params.min_tokens:
                finish, stop_id = FinishReason.STOP, token
                break
            now.append(token)
        total = position + len(now)
        if finish is None and total >= params.max_tokens:
            finish = FinishReason.LENGTH
        if finish is None and position + script.tokens_per_message >= len(reply):
            finish = FinishReason.STOP
        if finish is not None and script.finish is not None:
            finish = script.finish
        if script.fail_after is not None and total >= script.fail_after:
            extra = extra | {
                "error": "NaN logits",
                "error_where": {"layer": 3, "op": "lm_head", "position": total},
            }
            finish = FinishReason.ERROR
        if script.end_early_after is not None and total >= script.end_early_after:
            handle.unfinished.clear()
            handle.queue.put_nowait(None)
            return
        if finish is not None:
            handle.unfinished.discard(index)
        handle.queue.put_nowait(
            Tokens(
                request_id=msg.request_id,
                index=index,
                token_ids=now,
                logprobs=[self._logprob(msg, t) for t in now] if params.logprobs is not None else None,
                finish_reason=finish,
                stop_token_id=stop_id,
                **extra,
            )
        )
        if not handle.unfinished:
            self.running.discard(msg.request_id)
            handle.queue.put_nowait(None)

    def _logprob(self, msg: Generate, token: int) -> TokenLogprob:
        k = msg.params.logprobs or 0
        return TokenLogprob(token, -0.5, [((token + i) % 256, -0.5 - i if i < 2 else float("-inf")) for i in range(k)])
