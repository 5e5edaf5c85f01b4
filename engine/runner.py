"""ModelRunner: the forward pass of one model on the CPU, over the paged KV pool.

One layer is nine ops (kernels/cpu_ops.py), each of which computes an output row from its own input row in one fixed
order; attention reads only the row's own sequence. Hence exactness: a token's logits have the same bits whatever else
is in the batch, however the prompt is cut into chunks, and with any number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from engine.errors import ConfigError
from engine.rope import rope_table
from engine.types import PAGE_TOKENS, Float32Array, StepBatch, Weights
from kernels import cpu_ops as ops

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.config import ModelConfig


MAX_THREADS = ops.MAX_THREADS


@dataclass(slots=True, frozen=True)
class _Layer:
    attn_norm: Float32Array
    qkv: npt.NDArray[Any]
    qkv_bias: Float32Array | None
    q_norm: Float32Array | None
    k_norm: Float32Array | None
    o: npt.NDArray[Any]
    mlp_norm: Float32Array
    gate_up: npt.NDArray[Any]
    down: npt.NDArray[Any]
    k_pages: Float32Array  # (num_pages, Hkv, PAGE_TOKENS, D)
    v_pages: Float32Array


def kv_bytes_per_page(config: ModelConfig) -> int:
    """Bytes of one KV page over all layers (fp32 keys and values), to size the pool before building a runner."""
    return config.num_layers * 2 * config.num_kv_heads * PAGE_TOKENS * config.head_dim * 4


class ModelRunner:
    """All memory is reserved here; a step allocates only the logits it returns.

    num_pages: size of the KV pool. max_batch_tokens: most tokens of one batch. max_model_len: positions 0..that-1 can
    be used (default config.max_position). Raises ConfigError if the weights do not fit the config.
    Not thread-safe: one forward at a time.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        num_pages: int,
        num_threads: int,
        max_batch_tokens: int = 2048,
        max_model_len: int | None = None,
    ) -> None:
        if num_pages < 1 or max_batch_tokens < 1:
            raise ConfigError("num_pages and max_batch_tokens must be at least 1")
        if not 1 <= num_threads <= MAX_THREADS:
            raise ConfigError(
                f"num_threads is {num_threads}; the CPU backend takes 1 to {MAX_THREADS}", hint="lower --threads"
            )
        if config.head_dim > ops.MAX_HEAD_DIM:
            raise ConfigError(f"head_dim is {config.head_dim}; the CPU backend supports up to {ops.MAX_HEAD_DIM}")
        self.config = config
        self.num_pages = num_pages
        self.num_threads = num_threads
        self.max_batch_tokens = max_batch_tokens
        self.max_model_len = max_model_len or config.max_position
        self._weights = weights
        self._embed = _tensor(weights, "embed", (config.vocab_size, config.hidden_size))
        self._lm_head = _tensor(weights, "lm_head", (config.vocab_size, config.hidden_size))
        self._final_norm = _tensor(weights, "final_norm", (config.hidden_size,))
        self._cos, self._sin = rope_table(config.rope, config.head_dim, self.max_model_len)
        # numpy asks for zero pages, so memory is taken when a page is first written, not here.
        pool_shape = (config.num_layers, 2, num_pages, config.num_kv_heads, PAGE_TOKENS, config.head_dim)
        self._pool: Float32Array = np.zeros(pool_shape, np.float32)
        self._layers = [self._layer(i) for i in range(config.num_layers)]
        self._workspace = _Workspace(config, max_batch_tokens)

    @property
    def kv_bytes_per_page(self) -> int:
        return kv_bytes_per_page(self.config)

    def forward(self, batch: StepBatch) -> Float32Array:
        """Logits (num_logits, vocab) float32 of batch.logits_rows; NaN and Inf are returned as they are.

        Raises ValueError (shapes, too many tokens) or IndexError (token id, position, page, row) before the pool is
        touched; the message names the token.
        """
        w = self._workspace.rows(self._check(batch))
        for _ in self._layer_ops(batch, w):
            pass
        return self._logits(w.x[batch.logits_rows])

    def find_nonfinite(self, batch: StepBatch) -> tuple[int | None, str, int] | None:
        """Runs the batch and returns (layer, op, row) of the first op whose output holds NaN or Inf (layer None: not in
        a layer), or None. Slow; for telling an operator where a request went wrong."""
        w = self._workspace.rows(self._check(batch))
        for layer, op, output in self._layer_ops(batch, w):
            if (row := _first_bad_row(output)) is not None:
                return layer, op, row
        bad = _first_bad_row(self._logits(w.x[batch.logits_rows]))
        return None if bad is None else (None, "lm_head", int(batch.logits_rows[bad]))

    def _layer_ops(self, batch: StepBatch, w: _Rows) -> Iterator[tuple[int | None, str, Float32Array]]:
        """Embedding and layers, one op each time the caller asks on: (layer, op, output). The result is left in w.x."""
        config, threads = self.config, self.num_threads
        ops.embed(w.x, self._embed, batch.token_ids, num_threads=threads)
        yield None, "embed", w.x
        tokens = (batch.positions, batch.seq_index, batch.block_tables)
        delta: Float32Array | None = None  # output of the last block, added to x by the next norm
        for i, layer in enumerate(self._layers):
            ops.rmsnorm(w.normed, w.x, layer.attn_norm, config.rms_eps, residual=delta, num_threads=threads)
            yield i, "attn_norm", w.normed
            ops.matmul(w.qkv, w.normed, layer.qkv, num_threads=threads)
            yield i, "qkv", w.qkv
            ops.qkv_rope_append(
                w.q, w.qkv, self._cos, self._sin, layer.k_pages, layer.v_pages, *tokens,
                bias=layer.qkv_bias, q_norm=layer.q_norm, k_norm=layer.k_norm, eps=config.rms_eps, num_threads=threads,
            )  # fmt: skip
            yield i, "rope", w.q
            ops.paged_attention(
                w.attn, w.q, layer.k_pages, layer.v_pages, *tokens,
                scale=config.head_dim**-0.5, window=config.sliding_window, num_threads=threads,
            )  # fmt: skip
            yield i, "attention", w.attn_flat
            delta = w.delta
            ops.matmul(delta, w.attn_flat, layer.o, num_threads=threads)
            yield i, "o", delta
            ops.rmsnorm(w.normed, w.x, layer.mlp_norm, config.rms_eps, residual=delta, num_threads=threads)
            yield i, "mlp_norm", w.normed
            ops.matmul(w.gate_up, w.normed, layer.gate_up, num_threads=threads)
            yield i, "gate_up", w.gate_up
            ops.swiglu(w.mlp, w.gate_up, num_threads=threads)
            yield i, "swiglu", w.mlp
            ops.matmul(delta, w.mlp, layer.down, num_threads=threads)
            yield i, "down", delta
        if delta is not None:
            ops.add(w.x, delta, num_threads=threads)

    def close(self) -> None:
        """Drops the pool and the weights."""
        self._layers = []
        self._pool = np.zeros(0, np.float32)
        self.max_batch_tokens = 0

    def _logits(self, x: Float32Array) -> Float32Array:
        """x (num_logits, H), a copy of the wanted rows only."""
        normed = np.empty_like(x)
        ops.rmsnorm(normed, x, self._final_norm, self.config.rms_eps, num_threads=self.num_threads)
        logits = np.empty((len(x), self.config.vocab_size), np.float32)
        ops.matmul(logits, normed, self._lm_head, num_threads=self.num_threads)
        return logits

    def _check(self, batch: StepBatch) -> int:
        """Everything the ops would refuse only after an earlier one has written to the pool. Returns num_tokens."""
        num_tokens = len(batch.token_ids)
        if not 1 <= num_tokens <= self.max_batch_tokens:
            raise ValueError(f"the batch has {num_tokens} tokens; wanted 1..{self.max_batch_tokens}")
        rows = batch.logits_rows
        if rows.ndim != 1 or rows.dtype != np.int32:
            raise ValueError("logits_rows must be int32 (num_logits,)")
        if len(rows) and (rows.min() < 0 or rows.max() >= num_tokens):
            raise IndexError(f"logits_rows must lie in 0..{num_tokens - 1}")
        if len(batch.positions) != num_tokens:
            raise ValueError(f"positions has size {len(batch.positions)}; there are {num_tokens} token ids")
        ops.check_tokens(
            self._pool[0, 0], self._pool[0, 1], batch.positions, batch.seq_index, batch.block_tables,
            window=self.config.sliding_window, max_position=self.max_model_len,
        )  # fmt: skip
        return num_tokens

    def _layer(self, index: int) -> _Layer:
        config = self.config
        heads, kv_heads, head_dim, hidden = config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size
        qkv_rows = (heads + 2 * kv_heads) * head_dim

        def get(name: str, *shape: int) -> npt.NDArray[Any]:
            return _tensor(self._weights, f"layers.{index}.{name}", shape)

        return _Layer(
            attn_norm=get("attn_norm", hidden),
            qkv=get("qkv", qkv_rows, hidden),
            qkv_bias=get("qkv_bias", qkv_rows) if config.qkv_bias else None,
            q_norm=get("q_norm", head_dim) if config.qk_norm else None,
            k_norm=get("k_norm", head_dim) if config.qk_norm else None,
            o=get("o", hidden, heads * head_dim),
            mlp_norm=get("mlp_norm", hidden),
            gate_up=get("gate_up", 2 * config.intermediate_size, hidden),
            down=get("down", hidden, config.intermediate_size),
            k_pages=self._pool[index, 0],
            v_pages=self._pool[index, 1],
        )


def _first_bad_row(output: Float32Array) -> int | None:
    """Index of the first row (leading axis) with NaN or Inf, or None."""
    bad = np.flatnonzero(~np.isfinite(output).reshape(len(output), -1).all(axis=1))
    return int(bad[0]) if len(bad) else None


def _tensor(weights: Weights, name: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    tensor = weights.tensors.get(name)
    if tensor is None:
        raise ConfigError(f"the weights have no {name}")
    if tensor.shape != shape:
        raise ConfigError(f"{name} has shape {tensor.shape}; this config needs {shape}")
    wanted = np.float32 if len(shape) == 1 or weights.dtype == "float32" else np.uint16
    if tensor.dtype != wanted or not tensor.flags.c_contiguous:
        raise ConfigError(f"{name} is {tensor.dtype}; wanted C-contiguous {np.dtype(wanted)}")
    return tensor


def _aligned_zeros(rows: int, width: int) -> Float32Array:
    """Zeros that start on a cache line: numpy aligns to 16 bytes, and a vector load across two lines costs double."""
    raw = np.zeros(rows * width + 16, np.float32)
    start = -(raw.ctypes.data // 4) % 16
    return raw[start : start + rows * width].reshape(rows, width)


@dataclass(slots=True, frozen=True)
class _Rows:
    """Views of the workspace for one number of tokens T."""

    x: Float32Array  # (T, H) the residual stream
    normed: Float32Array  # (T, H)
    delta: Float32Array  # (T, H)
    qkv: Float32Array  # (T, (Hq + 2 Hkv) D)
    q: Float32Array  # (T, Hq, D)
    attn: Float32Array  # (T, Hq, D)
    attn_flat: Float32Array  # the same as (T, Hq D)
    gate_up: Float32Array  # (T, 2 I)
    mlp: Float32Array  # (T, I)


class _Workspace:
    """Activations of one step, reserved once for the largest batch."""

    def __init__(self, config: ModelConfig, max_tokens: int) -> None:
        self._heads = (config.num_heads, config.head_dim)
        q_width = config.num_heads * config.head_dim
        widths = {
            "x": config.hidden_size,
            "normed": config.hidden_size,
            "delta": config.hidden_size,
            "qkv": q_width + 2 * config.num_kv_heads * config.head_dim,
            "q": q_width,
            "attn": q_width,
            "gate_up": 2 * config.intermediate_size,
            "mlp": config.intermediate_size,
        }
        self._buffers = {name: _aligned_zeros(max_tokens, width) for name, width in widths.items()}

    def rows(self, num_tokens: int) -> _Rows:
        views = {name: buffer[:num_tokens] for name, buffer in self._buffers.items()}
        heads = (num_tokens, *self._heads)
        attn_flat = views["attn"]
        return _Rows(**{**views, "q": views["q"].reshape(heads), "attn": attn_flat.reshape(heads)}, attn_flat=attn_flat)
