"""An Engine over the tiny model in one process, with a backend between that can record, fail and lose its device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.backend import Pending, StepResult, StepWork
from engine.config import ModelConfig
from engine.core_config import CoreConfig, with_defaults
from engine.cpu_backend import CpuBackend
from engine.engine import Engine
from engine.loader import load_weights
from engine.messages import CoreMessage, Fault, Generate, Tokens
from engine.types import SamplingParams, TokenLogprob

MAX_STEPS = 3000


class SpyBackend(CpuBackend):
    """The CPU backend; `events` tells what was asked of it, `on_launch` / `on_collect` may raise in its place."""

    events: list[tuple[str, int]]
    on_launch: Callable[[StepWork], None] | None = None
    on_collect: Callable[[StepWork], None] | None = None

    def launch(self, work: StepWork) -> Any:
        self.events.append(("launch", work.plan.step))
        if self.on_launch is not None:
            self.on_launch(work)
        return super().launch(work)

    def collect(self, pending: Pending) -> StepResult:
        self.events.append(("collect", pending.work.plan.step))
        if self.on_collect is not None:
            self.on_collect(pending.work)
        return super().collect(pending)


def make_engine(directory: Path, *, depth: int, pages: int = 64, **options: Any) -> Engine:
    config = with_defaults(
        CoreConfig(model_dir=str(directory), kv_tokens=pages * 128, plans_in_flight=depth, **options)  # type: ignore[arg-type]
    )
    model = ModelConfig.from_dir(directory)
    assert config.max_batch_tokens is not None
    backend = SpyBackend(
        model,
        load_weights(directory, model),
        num_pages=pages,
        num_threads=1,
        max_batch_tokens=config.max_batch_tokens,
        max_model_len=min(model.max_position, pages * 128),
        plans_in_flight=depth,
    )
    backend.events = []
    return Engine(config, model, backend)


@dataclass
class Answer:
    """All that one choice was told."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    finish: str | None = None
    stop_token_id: int | None = None
    error: str | None = None
    where: dict[str, Any] | None = None
    after_end: int = 0  # messages after the finish reason: must stay 0


class Answers:
    def __init__(self) -> None:
        self.by_choice: dict[tuple[str, int], Answer] = {}
        self.faults: list[Fault] = []

    def take(self, messages: list[CoreMessage]) -> None:
        for message in messages:
            if isinstance(message, Fault):
                self.faults.append(message)
            if not isinstance(message, Tokens):
                continue
            answer = self.by_choice.setdefault((message.request_id, message.index), Answer())
            answer.after_end += answer.finish is not None
            answer.token_ids += message.token_ids
            answer.logprobs += message.logprobs or []
            answer.prompt_logprobs += message.prompt_logprobs or []
            if message.finish_reason is not None:
                answer.finish = str(message.finish_reason)
                answer.stop_token_id, answer.error = message.stop_token_id, message.error
                answer.where = message.error_where

    def __getitem__(self, key: str | tuple[str, int]) -> Answer:
        return self.by_choice[key if isinstance(key, tuple) else (key, 0)]


def request(name: str, prompt: list[int], *, n: int = 1, echo: bool = False, **params: Any) -> Generate:
    deadline = params.pop("deadline", None)
    values = {"seed": 1, "max_tokens": 20, "temperature": 0.0, **params}
    return Generate(
        request_id=name, prompt_ids=prompt, params=SamplingParams(**values), n=n, echo_logprobs=echo, deadline=deadline
    )


def drive(engine: Engine, requests: list[Generate], at_step: dict[int, Callable[[], None]] | None = None) -> Answers:
    """Adds everything, then steps until nothing is left. `at_step`: called before that step, as engine-core handles
    what arrives between steps."""
    answers = Answers()
    for message in requests:
        answers.take(engine.add(message))
    for step in range(MAX_STEPS):
        if at_step and step in at_step:
            at_step[step]()
        if not engine.has_work:
            break
        answers.take(engine.step())
        if not engine._operations:  # a probe holds pages that no sequence has
            engine.scheduler.check_integrity()
    assert not engine.has_work, f"not done after {MAX_STEPS} steps"
    assert engine.kv_cache.free_pages == engine.backend.num_pages
    assert all(answer.after_end == 0 for answer in answers.by_choice.values())
    return answers
