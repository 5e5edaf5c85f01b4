"""The CUDA sampler's data as the host sees it: records of sampler_state.cuh and sampler.cu, and its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.fixed_softmax import MAX_VOCAB

PADDING, SAMPLE, SCORE = 0, 1, 2  # sampler_state.cuh:RowMode
MAX_COUNT = (1 << 20) - 1
"""Of one token in one output: 20 bits of a word of `seen`."""

SLOT_PARAMS = np.dtype(
    [
        ("temperature", "<f8"),
        ("floor", "<f8"),
        ("top_p_share", "<u8"),
        ("seed", "<u8"),
        ("choice", "<u4"),
        ("top_k", "<i4"),
        ("min_tokens", "<i4"),
        ("logprobs", "<i4"),
        ("repetition", "<f4"),
        ("frequency", "<f4"),
        ("presence", "<f4"),
        ("flags", "<u4"),
        ("pad", "<u4", (4,)),
    ]
)
"""sampler_state.cuh:SlotParams, 80 bytes."""

SLOT_UPDATE = np.dtype(
    [
        ("params", SLOT_PARAMS),
        ("slot", "<i4"),
        ("clears", "<i4"),
        ("num_edits", "<i4"),
        ("edits", "<i4"),
        ("num_words", "<i4"),
        ("words", "<i4"),
        ("pad", "<i4", (6,)),
    ]
)
"""sampler.cu:SlotUpdate, 128 bytes."""

ROW_DESCRIPTOR = np.dtype(
    [("slot", "<i4"), ("num_generated", "<i4"), ("mode", "<i4"), ("target", "<i4"), ("position", "<i4")]
)
"""sampler_state.cuh:RowDescriptor, 20 bytes: one for every logits row. `mode`: PADDING (nothing is done), SAMPLE, or
SCORE (the logprob of token `target`). `num_generated`: index of the token to be sampled among those of its choice.
`position`: of that token in its sequence, only for reports."""

ROW_RESULT = np.dtype([("token", "<i4"), ("error", "<u4"), ("count", "<i4"), ("first", "<i4")])
"""sampler_state.cuh:RowResult, 16 bytes."""

BINS, GROUP = 512, 128  # sampler_select.cuh
_MAX_EDITS = 2047  # 11 bits of a word of `seen`
_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class SamplerShape:
    """Sizes that are fixed at start. ValueError for those the kernels cannot have."""

    num_slots: int  # with the dummy slot of padding rows
    vocab_size: int
    max_rows: int  # logits rows of a step
    max_edits: int  # of a slot: ids with a bias or that min_tokens masks (the API's limits on logit_bias and stop ids)
    max_logprobs: int  # >= 1

    def __post_init__(self) -> None:
        if not 0 < self.vocab_size < MAX_VOCAB:
            raise ValueError(f"vocab_size must be in [1, {MAX_VOCAB}), got {self.vocab_size}")
        if not 0 <= self.max_edits <= _MAX_EDITS:
            raise ValueError(
                f"logit_bias entries and stop ids of a request: at most {_MAX_EDITS} together on a GPU, the limits "
                f"allow {self.max_edits}; lower max_logit_bias or max_stop_token_ids"
            )
        if not 1 <= self.max_logprobs <= BINS:
            raise ValueError(f"max_logprobs must be 1 to {BINS} on a GPU, got {self.max_logprobs}")
        if self.num_slots < 1 or not 1 <= self.max_rows < 65536:
            raise ValueError(f"{self.num_slots} slots, {self.max_rows} rows: 1 or more, and fewer than 65536 rows")

    @property
    def scores(self) -> np.dtype[Any]:
        """What comes back of a row with logprobs: sampler_state.cuh:RowScores and the best tokens."""
        k = self.max_logprobs
        return np.dtype(
            [("total", "<u8"), ("logit", "<f4"), ("top", "<f4"), ("num_best", "<i4"), ("pad", "<i4"),
             ("ids", "<i4", (k,)), ("logits", "<f4", (k,))]
        )  # fmt: skip

    def layout(self) -> dict[str, tuple[int, int]]:
        """(offset, bytes) of each array in the sampler's memory, which is all zero before its first use."""
        groups = -(-self.vocab_size // GROUP)
        sizes = {
            "params": self.num_slots * SLOT_PARAMS.itemsize,
            "edits": self.num_slots * max(self.max_edits, 1) * 8,
            "seen": self.num_slots * -(-self.vocab_size // 4) * 16,
            "states": self.max_rows * 64,
            "weights": self.max_rows * BINS * 8,
            "counts": self.max_rows * BINS * 4,
            "raw_counts": self.max_rows * BINS * 4,
            "tops": self.max_rows * groups * 4,
            "raw_tops": self.max_rows * groups * 4,
            "group_sums": self.max_rows * groups * 8,
        }
        offset, layout = 0, {}
        for name, size in sizes.items():
            layout[name] = (offset, size)
            offset += -(-size // _ALIGNMENT) * _ALIGNMENT
        return layout

    @property
    def num_bytes(self) -> int:
        offset, size = self.layout()["group_sums"]
        return offset + size
