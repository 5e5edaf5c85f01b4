"""One of the n answers to a request, as the step loop keeps it, and the logprobs of its prompt (echo)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.backend import Scoring

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.messages import Generate
    from engine.plan import ScheduledSeq
    from engine.sampler import SampleState
    from engine.sequence import Sequence
    from engine.types import TokenLogprob


@dataclass(slots=True)
class Choice:
    """Its sequence in the scheduler, its sampler state, and what of it was not sent yet."""

    message: Generate
    sequence: Sequence
    sampling: SampleState
    scores: list[TokenLogprob | None] | None = None  # echo: logprobs of prompt tokens that were not sent yet
    num_scored: int = 0
    reported: bool = False  # the first message (with cached_tokens) was sent
    stop_ids: frozenset[int] = field(default_factory=frozenset)

    @property
    def log_id(self) -> str:
        """The id the client knows, under which all layers log."""
        return self.message.client_id or self.message.request_id

    def wanted_scores(self, item: ScheduledSeq) -> Scoring | None:
        """The prompt tokens that the positions of this item judge (p judges p + 1), or None."""
        last = item.seq.num_prompt_tokens - 1
        if self.scores is None or self.num_scored > last or item.start >= last:
            return None
        end = min(item.start + item.count, last)
        return Scoring(item.start, item.seq.token_ids[item.start + 1 : end + 1], self.message.params.logprobs or 0)

    def keep_scores(self, item: ScheduledSeq, scores: Iterable[TokenLogprob]) -> None:
        """Take in what wanted_scores() asked for; what is known from before a preemption is not taken again."""
        if self.scores is None:
            return
        for score, p in zip(scores, itertools.count(item.start)):
            if p + 1 == self.num_scored:
                self.scores.append(score)
                self.num_scored += 1
