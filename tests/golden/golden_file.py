"""Reading and writing of the golden .npz files: logits of Hugging Face transformers, stored so that they stay small.

Of each prompt, at every position: the logits of some fixed random vocabulary columns (48; SmolLM2 64; a very long
prompt 8), max|logit| over the whole row, and (SmolLM2) the 32 best ids and their logits; at a few positions the whole
row. A logit is one dot product of the final hidden state, so an error in that state shows in any sample of columns.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent


@dataclass
class GoldenPrompt:
    """One prompt of n tokens. Arrays: token_ids int32 (n,), columns_logits float32 (n, columns), row_max float32 (n,),
    full_positions int32 (k,), full_logits float32 (k, vocab), top_ids int32 and top_logits float32 (n, t) (t may be 0).

    `mode` is how transformers was run: "whole" (one forward pass) or "stepwise" (one token at a time with its cache);
    they differ only for dynamic rope scaling."""

    token_ids: np.ndarray
    columns_logits: np.ndarray
    row_max: np.ndarray
    full_positions: np.ndarray
    full_logits: np.ndarray
    top_ids: np.ndarray
    top_logits: np.ndarray
    mode: str = "whole"

    @classmethod
    def from_logits(
        cls, ids: list[int], logits: np.ndarray, columns: np.ndarray, full: list[int], top: int, mode: str = "whole"
    ) -> GoldenPrompt:
        """`logits` float32 (n, vocab) of all positions; `full` the positions kept whole."""
        order = np.argsort(-logits, axis=1, kind="stable")[:, :top]
        return cls(
            np.asarray(ids, np.int32),
            logits[:, columns],
            np.abs(logits).max(axis=1),
            np.asarray(full, np.int32),
            logits[full],
            order.astype(np.int32),
            np.take_along_axis(logits, order, axis=1),
            mode,
        )

    def errors(self, logits: np.ndarray, columns: np.ndarray, positions: np.ndarray | None = None) -> np.ndarray:
        """max|a-b| / max|b| of each row of `logits` float32 (rows, vocab) against this prompt at `positions` (default:
        all): over the stored columns, the best ids, and the whole row where that is stored. NaN counts as infinite."""
        at = np.arange(len(self.token_ids)) if positions is None else np.asarray(positions)
        if logits.shape[0] != len(at):
            raise ValueError(f"{logits.shape[0]} rows of logits for {len(at)} positions")
        worst = np.abs(logits[:, columns].astype(np.float64) - self.columns_logits[at]).max(axis=1)
        if self.top_ids.shape[1]:
            best = np.take_along_axis(logits, self.top_ids[at].astype(np.int64), axis=1).astype(np.float64)
            worst = np.maximum(worst, np.abs(best - self.top_logits[at]).max(axis=1))
        for position, row in zip(self.full_positions, self.full_logits):
            for index in np.flatnonzero(at == position):
                worst[index] = np.maximum(worst[index], np.abs(logits[index].astype(np.float64) - row).max())
        return np.where(np.isfinite(worst), worst, np.inf) / self.row_max[at]


@dataclass
class Golden:
    """One file. `meta`: versions, how it was run, hashes, and what the numbers were worth when they were made."""

    meta: dict[str, Any]
    columns: np.ndarray  # int32 (columns,) vocabulary ids
    prompts: list[GoldenPrompt] = field(default_factory=list)
    extra: dict[str, np.ndarray] = field(default_factory=dict)

    def check_weights(self, sha256: str) -> None:
        """AssertionError if the weights are not the ones the values belong to."""
        assert sha256 == self.meta["weights_sha256"], (
            f"these are not the weights the golden values of {self.meta['model']} were made with "
            f"(sha256 {sha256[:16]}, expected {self.meta['weights_sha256'][:16]}): make them again with the script "
            f"named in the file ({self.meta['made_by']})"
        )

    def save(self, path: Path) -> None:
        arrays: dict[str, Any] = {"meta": np.array(json.dumps(self.meta, sort_keys=True)), "columns": self.columns}
        arrays.update({f"extra.{key}": value for key, value in self.extra.items()})
        for index, prompt in enumerate(self.prompts):
            arrays.update({f"{index}.{key}": np.asarray(value) for key, value in vars(prompt).items()})
        np.savez_compressed(path, **arrays)

    @classmethod
    def load(cls, path: Path) -> Golden:
        with np.load(path, allow_pickle=False) as data:
            golden = cls(json.loads(str(data["meta"])), data["columns"])
            prefix = "extra."
            golden.extra = {key[len(prefix) :]: data[key] for key in data.files if key.startswith(prefix)}
            for index in range(golden.meta["num_prompts"]):
                names = GoldenPrompt.__dataclass_fields__
                values = {key: data[f"{index}.{key}"] for key in names}
                golden.prompts.append(GoldenPrompt(**{**values, "mode": str(values["mode"])}))
        return golden


def random_columns(name: str, vocab_size: int, count: int) -> np.ndarray:
    """`count` distinct ids, ascending, from a seed made of `name`."""
    seed = int.from_bytes(hashlib.sha256(f"{name} columns".encode()).digest()[:8], "little")
    raw = np.random.PCG64(seed).random_raw(vocab_size)
    return np.sort(np.argsort(raw, kind="stable")[:count]).astype(np.int32)


def relative_error(a: np.ndarray, b: np.ndarray) -> float:
    """The worst row's max|a-b| / max|b|; a, b (rows, vocab)."""
    gap = np.abs(a.astype(np.float64) - b).max(axis=1)
    return float((gap / np.abs(b).max(axis=1)).max())


def script_sha256(path: str | Path) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
