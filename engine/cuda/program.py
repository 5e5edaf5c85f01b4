"""The launches of a step for one model: which kernels, in which order, over which buffers.

Pure: addresses and sizes in, kernels.launch.Launch records out. In call order a step is

    step_prepare, embed,
    per layer: rmsnorm, qkv, qkv_post (bias, norms, rope, append to the pages), attention (decode rows; prefill tiles),
               o (+ residual), rmsnorm, gate_up (with SwiGLU), down (+ residual),
    rmsnorm of the rows whose logits are wanted, lm_head, sampler

Every kernel computes a row from that row (and attention from its sequence) in one fixed order, so T, the padding and
the split into decode rows and tiles decide nothing but speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.cuda.step_state import StepLimits, table_width
from kernels import attention, rows, sampler
from kernels.gemm import gemm_launch
from kernels.launch import Op
from kernels.layout import gate_up_rows, kv_layer_offsets, padded_columns, padded_head_dim, round_up

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.config import ModelConfig
    from kernels.launch import Executor, Launch

LOGITS_ROWS = 256
"""Rows of logits that are in memory at once; more are computed in groups."""

_SMALL_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64)

# Places in the trace: fixed for each op of a layer, whether a step has it or not.
TRACE_PREPARE, TRACE_EMBED, TRACE_LAYERS = 0, 1, 2
LAYER_OPS = ("norm", "qkv", "rope", "attention", "prefill", "o", "mlp_norm", "gate_up", "down")


def decode_buckets(max_batch_seqs: int) -> tuple[int, ...]:
    """Numbers of decode rows a graph is made for; the last one holds max_batch_seqs."""
    sizes = [*_SMALL_BUCKETS, *range(96, round_up(max_batch_seqs, 32) + 1, 32)]
    last = next(size for size in sizes if size >= max_batch_seqs)
    return tuple(size for size in sizes if size <= last)


def row_bucket(num_rows: int) -> int:
    """Token rows a step with prefill is padded to. Never more than a row tile of the prefill GEMM, so padding costs
    next to nothing; few different sizes, so their launches are prepared once."""
    return round_up(num_rows, 16 if num_rows <= 256 else 64 if num_rows <= 2048 else 128)


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Limits of a step, from the engine's options."""

    max_batch_seqs: int
    max_batch_tokens: int
    max_model_len: int
    probe_slots: int = 1  # sequences of one forward() beside the traffic

    @property
    def buckets(self) -> tuple[int, ...]:
        return decode_buckets(self.max_batch_seqs)

    def limits(self, model: ModelConfig, num_pages: int) -> StepLimits:
        slots, decode_rows = self.max_batch_seqs + self.probe_slots, self.buckets[-1]
        max_rows = row_bucket(decode_rows + self.max_batch_tokens)
        return StepLimits(
            max_slots=slots,
            table_width=table_width(self.max_model_len),
            num_pages=num_pages,
            max_rows=max_rows,
            max_decode_rows=decode_rows,
            max_logits_rows=max_rows + LOGITS_ROWS,
            max_tiles=attention.max_tiles(self.max_batch_tokens, slots, model.head_dim),
        )


def workspace(model: ModelConfig, sizes: StepSizes, max_logprobs: int) -> dict[str, int]:
    """Bytes of every buffer of a step but weights and pages. All must be zero at the start: columns that only pad are
    never written."""
    limits = sizes.limits(model, 0)
    rows_, slots = limits.max_rows, limits.max_slots + 1
    hidden, heads, kv_heads, head_dim = model.hidden_size, model.num_heads, model.num_kv_heads, model.head_dim
    rope_bytes = sizes.max_model_len * (head_dim // 2) * 4
    return {
        **{name: 4 * words for name, words in limits.arrays().items()},
        "x": 4 * rows_ * hidden,
        "normed": 2 * rows_ * padded_columns(hidden),
        "qkv": 4 * rows_ * (heads + 2 * kv_heads) * head_dim,
        "q": 2 * rows_ * heads * padded_head_dim(head_dim),
        "attended": 2 * rows_ * padded_columns(heads * head_dim),
        "mlp": 2 * rows_ * padded_columns(model.intermediate_size),
        "head_in": 2 * LOGITS_ROWS * padded_columns(hidden),
        "logits": 4 * LOGITS_ROWS * round_up(model.vocab_size, 4),
        "cos": rope_bytes,
        "sin": rope_bytes,
        "partial": attention.partial_bytes(limits.max_decode_rows, limits.table_width, heads, head_dim),
        "counters": attention.counter_bytes(limits.max_decode_rows, heads, kv_heads),
        "trace": 8 * trace_length(model.num_layers),
        **sampler.workspace(slots, LOGITS_ROWS, model.vocab_size, max_logprobs),
    }


def trace_length(num_layers: int) -> int:
    return TRACE_LAYERS + num_layers * len(LAYER_OPS) + 2 + sampler.NUM_LAUNCHES


class Program:
    """Launches over fixed buffers. `weights`: canonical name (engine/params.py) -> address of the tiled matrix or the
    float32 vector. `buffers`: name -> address, of `workspace()` and "pool"."""

    def __init__(
        self,
        executor: Executor,
        model: ModelConfig,
        limits: StepLimits,
        weights: Mapping[str, int],
        buffers: Mapping[str, int],
        *,
        max_position: int,
    ) -> None:
        self.executor, self.model, self.limits = executor, model, limits
        self._w, self._b = weights, buffers
        self._max_position = max_position
        self._hidden = model.hidden_size
        self._k_hidden = padded_columns(model.hidden_size)
        self._k_heads = padded_columns(model.num_heads * model.head_dim)
        self._k_inter = padded_columns(model.intermediate_size)
        self._qkv_rows = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        self._window = model.sliding_window or 0
        self.ld_logits = round_up(model.vocab_size, 4)

    def prepare(self, num_rows: int, decode_rows: int, num_logits_rows: int) -> Launch:
        b, limits = self._b, self.limits
        return rows.step_prepare(
            b["upload"], b["token_ids"], b["positions"], b["slots"], b["block_tables"], b["tiles"], b["logits_rows"],
            b["descriptors"], b["page_prefix"], b["last_token"],
            num_rows=num_rows, decode_rows=decode_rows, num_logits_rows=num_logits_rows, max_slots=limits.max_slots,
            table_width=limits.table_width, num_pages=limits.num_pages, vocab_size=self.model.vocab_size,
            window=self._window,
        )  # fmt: skip

    def embed(self, num_rows: int) -> Launch:
        b = self._b
        return rows.embed(
            b["token_ids"], b["slots"], b["positions"], self._w["embed"], b["x"],
            num_rows=num_rows, hidden=self._hidden, vocab_size=self.model.vocab_size,
        )  # fmt: skip

    def before_attention(self, layer: int, num_rows: int) -> list[Launch]:
        """norm, qkv, rope and append."""
        model, limits, b = self.model, self.limits, self._b
        k_layer, v_layer = self._kv(layer)
        name = f"layers.{layer}."
        return [
            self._norm(name + "attn_norm", num_rows, layer),
            gemm_launch(
                self.executor, "f32", b["normed"], self._w[name + "qkv"], b["qkv"], num_rows=num_rows,
                num_outputs=self._qkv_rows, k_pad=self._k_hidden, ld_x=self._k_hidden, ld_out=self._qkv_rows,
                op=Op.QKV, layer=layer,
            ),
            rows.qkv_post(
                b["qkv"], b["cos"], b["sin"], b["positions"], b["slots"], b["block_tables"], b["q"], k_layer, v_layer,
                num_rows=num_rows, num_heads=model.num_heads, num_kv_heads=model.num_kv_heads, head_dim=model.head_dim,
                table_width=limits.table_width, num_pages=limits.num_pages, max_slots=limits.max_slots,
                max_position=self._max_position, layer=layer, bias=self._w.get(name + "qkv_bias", 0),
                q_norm=self._w.get(name + "q_norm", 0), k_norm=self._w.get(name + "k_norm", 0), eps=model.rms_eps,
            ),
        ]  # fmt: skip

    def after_attention(self, layer: int, num_rows: int) -> list[Launch]:
        """o, norm, gate_up, down."""
        b, w, name, inter = self._b, self._w, f"layers.{layer}.", self.model.intermediate_size
        return [
            gemm_launch(
                self.executor, "add", b["attended"], w[name + "o"], b["x"], num_rows=num_rows,
                num_outputs=self._hidden, k_pad=self._k_heads, ld_x=self._k_heads, ld_out=self._hidden, op=Op.O,
                layer=layer,
            ),
            self._norm(name + "mlp_norm", num_rows, layer),
            gemm_launch(
                self.executor, "swiglu", b["normed"], w[name + "gate_up"], b["mlp"], num_rows=num_rows,
                num_outputs=gate_up_rows(inter), k_pad=self._k_hidden, ld_x=self._k_hidden, ld_out=self._k_inter,
                op=Op.GATE_UP, layer=layer,
            ),
            gemm_launch(
                self.executor, "add", b["mlp"], w[name + "down"], b["x"], num_rows=num_rows, num_outputs=self._hidden,
                k_pad=self._k_inter, ld_x=self._k_inter, ld_out=self._hidden, op=Op.DOWN, layer=layer,
            ),
        ]  # fmt: skip

    def head(self, num_logits_rows: int, first: int = 0) -> list[Launch]:
        """Logits of logits rows first .. + num_logits_rows - 1 (at most LOGITS_ROWS) into the buffer's first rows."""
        b = self._b
        return [
            rows.rmsnorm(
                b["x"], self._w["final_norm"], b["head_in"], num_rows=num_logits_rows, hidden=self._hidden,
                ld_out=self._k_hidden, eps=self.model.rms_eps, rows=b["logits_rows"] + 4 * first,
            ),
            gemm_launch(
                self.executor, "f32", b["head_in"], self._w["lm_head"], b["logits"], num_rows=num_logits_rows,
                num_outputs=self.model.vocab_size, k_pad=self._k_hidden, ld_x=self._k_hidden, ld_out=self.ld_logits,
                op=Op.LM_HEAD,
            ),
        ]  # fmt: skip

    def _norm(self, weight: str, num_rows: int, layer: int) -> Launch:
        b = self._b
        return rows.rmsnorm(
            b["x"], self._w[weight], b["normed"], num_rows=num_rows, hidden=self._hidden, ld_out=self._k_hidden,
            eps=self.model.rms_eps, layer=layer,
        )  # fmt: skip

    def _kv(self, layer: int) -> tuple[int, int]:
        model = self.model
        k, v = kv_layer_offsets(layer, self.limits.num_pages, model.num_kv_heads, model.head_dim)
        return self._b["pool"] + k, self._b["pool"] + v
