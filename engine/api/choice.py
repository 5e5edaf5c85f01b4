"""One choice of a request: token ids in, text out. Detokenizes, looks for stop strings, keeps what is not sent yet.

The result does not depend on how many tokens arrive in one message: wherever a cut could matter (stop strings, text
offsets) tokens are taken one by one.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.api.offsets import OffsetTracker
from engine.types import FinishReason

if TYPE_CHECKING:
    from engine.api.sampling import Plan
    from engine.api.service import Service, StopMatcher
    from engine.messages import Tokens
    from engine.types import TokenLogprob


@dataclass(slots=True)
class Delta:
    """What one choice has to say since it was last asked. `logprobs` are (entry, text offset) pairs."""

    text: str = ""
    logprobs: list[tuple[TokenLogprob, int]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Choice:
    """State of choice `index` (counted over all prompts of the request)."""

    __slots__ = (
        "_delta",
        "_detokenizer",
        "_matcher",
        "_offsets",
        "_plan",
        "_step_by_step",
        "_text",
        "cached_tokens",
        "finish_reason",
        "index",
        "kept",
        "last_token_at",
        "num_tokens",
        "stop_reason",
    )

    def __init__(
        self, service: Service, plan: Plan, index: int, offset: int = 0, matcher: StopMatcher | None = None
    ) -> None:
        """`offset`: characters of the choice's text before its first token. `matcher` is copied, so that the choices of
        a request share its tables and not its state."""
        self.index = index
        self.num_tokens = 0
        self.cached_tokens: int | None = None  # of its prompt, once the engine has said it
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.last_token_at = 0.0  # CLOCK_MONOTONIC seconds
        self.kept: list[str] | None = [] if service.config.log_prompts else None  # the whole text, for the log
        self._plan = plan
        self._detokenizer = service.make_detokenizer(service.tokenizer, skip_special_tokens=plan.skip_special_tokens)
        wanted = plan.params.logprobs is not None
        self._offsets = OffsetTracker(self._detokenizer, service, offset) if wanted else None
        self._matcher = copy.copy(matcher)
        self._step_by_step = bool(plan.stops) or plan.params.logprobs is not None
        self._delta = Delta()
        self._text: list[str] = []  # of the delta; joined once, since += on long texts is quadratic

    def done(self) -> bool:
        """It has a finish reason; whatever still comes for it is ignored."""
        return self.finish_reason is not None

    @property
    def dirty(self) -> bool:
        """There is something to send."""
        delta = self._delta
        return bool(self._text or delta.logprobs or delta.finish_reason is not None)

    def take(self) -> Delta:
        """The delta so far; the next one starts empty."""
        delta, self._delta = self._delta, Delta()
        delta.text, self._text = "".join(self._text), []
        return delta

    def prepend(self, text: str, logprobs: list[tuple[TokenLogprob, int]]) -> None:
        """Put the echoed prompt before everything else."""
        self._emit(text, front=True)
        self._delta.logprobs = logprobs + self._delta.logprobs

    def _emit(self, text: str, *, front: bool = False) -> None:
        if text:
            if self.kept is not None:
                self.kept.append(text)
            self._text.insert(0 if front else len(self._text), text)

    def feed(self, message: Tokens) -> None:
        """Take the tokens of one message, and its finish reason. Nothing is taken after the choice has finished."""
        if self.done():
            return
        if self._step_by_step:
            for position, token in enumerate(message.token_ids):
                self._feed_one(token, message.logprobs[position] if message.logprobs else None)
                if self.done():
                    return
        elif message.token_ids:
            self.num_tokens += len(message.token_ids)
            self._emit(self._detokenizer.push(message.token_ids))
        if message.finish_reason is not None:
            self._end(message.finish_reason, message.stop_token_id)

    def _feed_one(self, token: int, logprob: TokenLogprob | None) -> None:
        self.num_tokens += 1
        if self._offsets is None:
            text = self._detokenizer.push((token,))
        else:
            text, offset = self._offsets.push(token)
            if logprob is not None:
                self._delta.logprobs.append((logprob, offset))
        # Text of the first min_tokens tokens is never (part of) a stop.
        if self._matcher is None or self.num_tokens <= self._plan.params.min_tokens:
            self._emit(text)
        else:
            self._match(text)

    def _match(self, text: str) -> None:
        if self._matcher is None:
            self._emit(text)
            return
        emit, stopped = self._matcher.push(text)
        self._emit(emit)
        if stopped is not None:
            if self._plan.include_stop:
                self._emit(stopped)
            self._finish(FinishReason.STOP, stopped)

    def _end(self, reason: FinishReason, stop_token_id: int | None) -> None:
        """The engine ended the choice: let go of what was held back."""
        self._match(self._detokenizer.flush())
        if self.done():
            return
        if self._matcher is not None:
            self._emit(self._matcher.flush())
        stop_text = self._plan.stop_ids_text.get(stop_token_id) if stop_token_id is not None else None
        if stop_text is not None and self._plan.include_stop:
            self._emit(stop_text)
        asked_for = stop_token_id in self._plan.params.stop_token_ids
        self._finish(reason, stop_text if stop_text is not None else stop_token_id if asked_for else None)

    def _finish(self, reason: FinishReason, stop_reason: str | int | None) -> None:
        self.finish_reason = str(reason)
        self.stop_reason = stop_reason
        self._delta.finish_reason, self._delta.stop_reason = self.finish_reason, stop_reason
