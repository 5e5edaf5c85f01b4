"""Data that crosses module borders: sampling parameters, one forward step, and its results.

Shapes are written (rows, columns); dtypes are numpy's. Nothing here has behaviour beyond checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Mapping

PAGE_TOKENS = 128
"""Tokens of one KV page, on every backend (design.md; prefill chunks are aligned to it)."""

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


class FinishReason(StrEnum):
    STOP = "stop"  # EOS, a stop token id or (decided by engine-api) a stop string
    LENGTH = "length"  # max_tokens or the context is full
    ABORT = "abort"  # the client left or asked for it
    DEADLINE = "deadline"  # the request's own deadline passed
    ERROR = "error"  # this request failed (NaN logits ...); the others go on


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Already validated by engine-api. `seed` is always set: the API draws one if the client gave none and reports it,
    so that any request can be replayed bit for bit."""

    seed: int  # 0 <= seed < 2**64
    max_tokens: int  # >= 1 (0 only with echo, then nothing is sampled)
    min_tokens: int = 0  # EOS and stop ids get -inf before that many tokens were generated
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # (0, 1]
    min_p: float = 0.0  # [0, 1]
    repetition_penalty: float = 1.0  # > 0, over prompt and output (CTRL, arXiv 1909.05858)
    presence_penalty: float = 0.0  # [-2, 2], over the output only (OpenAI)
    frequency_penalty: float = 0.0  # [-2, 2], over the output only (OpenAI)
    logit_bias: dict[int, float] = {}  # token id -> [-100, 100]
    logprobs: int | None = None  # None = none, 0 = the sampled token's, k = and the k best
    stop_token_ids: tuple[int, ...] = ()  # from the request
    eos_token_ids: tuple[int, ...] = ()  # of the model
    ignore_eos: bool = False


class DeviceId(msgspec.Struct, frozen=True):
    """Which device computes; answers are compared between devices of one `name`."""

    backend: str  # "cpu" or "cuda"
    uuid: str  # "GPU-...", as the driver writes it; "CPU"
    name: str  # "NVIDIA H200"; "cpu": the CPU backend gives the same bits on every CPU of one architecture


@dataclass(slots=True)
class StepBatch:
    """One forward pass: the tokens of several sequences laid end to end. Any mix of prefill chunks and decode tokens.

    The KV slot of token t is row positions[t] % PAGE_TOKENS of page
    block_tables[seq_index[t], positions[t] // PAGE_TOKENS].
    A token attends to positions 0..positions[t] of its own sequence, all of which are in the pool or in this batch.
    """

    token_ids: Int32Array  # (num_tokens,)
    positions: Int32Array  # (num_tokens,)
    seq_index: Int32Array  # (num_tokens,) row of block_tables
    block_tables: Int32Array  # (num_seqs, max_pages), -1 where unused
    logits_rows: Int32Array  # (num_logits,) indices into token_ids whose logits are wanted, ascending


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []  # the k most probable, best first (ties: lower id first)


@dataclass(slots=True)
class SampleResult:
    """What the sampler decided for one row. `error` set = the row had no usable logits; token_id is then -1."""

    token_id: int
    logprob: TokenLogprob | None = None
    error: str | None = None


@dataclass(slots=True, frozen=True)
class Weights:
    """All parameters of a model as views into one arena.

    Canonical names and shapes (Hq/Hkv query and KV heads, D head_dim, H hidden, I intermediate, V vocabulary):
      embed (V, H); final_norm (H,); lm_head (V, H), the same view as embed when tied;
      layers.{i}.attn_norm (H,); layers.{i}.qkv ((Hq+2*Hkv)*D, H), rows q then k then v; layers.{i}.qkv_bias, same rows,
      only where the family has one; layers.{i}.q_norm, layers.{i}.k_norm (D,), Qwen3 only; layers.{i}.o (H, Hq*D);
      layers.{i}.mlp_norm (H,); layers.{i}.gate_up (2*I, H), rows gate then up; layers.{i}.down (H, I).
    Matrices are row-major (output, input): y = x @ W.T. dtype float32, or uint16 with bf16 bits
    (`dtype` says which). Norms and biases are always float32. Every view starts on a 64-byte border.
    """

    tensors: Mapping[str, npt.NDArray[Any]]
    dtype: str  # "float32" or "bfloat16": of the matrices
    arena_bytes: int
    checksum: str  # hex; engine.loader.arena_checksum of the arena as loaded
    arena: memoryview | None = None  # the bytes the checksum is of
    notes: tuple[str, ...] = ()  # what the operator should know of the checkpoint (ignored tensors ...)
