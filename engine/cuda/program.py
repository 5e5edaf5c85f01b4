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
from engine.cuda.step_trace import trace_length
from engine.errors import ConfigError
from kernels import attention, rows, sampler
from kernels.attention import AttentionShape
from kernels.gemm import gemm_launch
from kernels.launch import Op
from kernels.layout import PAGE_TOKENS, gate_up_rows, kv_layer_offsets, padded_columns, padded_head_dim, round_up
from kernels.sampler import SamplerShape

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.config import ModelConfig
    from kernels.launch import Executor, Launch

UPDATE_WORDS = 1 << 16
"""32-bit words of one upload of sampler slots; more are sent in turns."""

LOGITS_ROWS = 256
"""Rows of logits that are in memory at once; more are computed in groups."""

_SMALL_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64)

MAX_LOGPROBS = 20
MAX_SAMPLER_EDITS = 1152
"""Of one request: best tokens reported; ids with a bias or that min_tokens masks. The endpoint's limits are within."""


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
            # every path's tiles hold 4 tokens at least, and each sequence has one that is not full
            max_tiles=self.max_batch_tokens // 4 + slots,
        )

    def sampler(self, model: ModelConfig) -> SamplerShape:
        slots = self.max_batch_seqs + self.probe_slots + 1
        return SamplerShape(slots, model.vocab_size, LOGITS_ROWS, MAX_SAMPLER_EDITS, MAX_LOGPROBS)


def attention_shape(model: ModelConfig) -> AttentionShape:
    """ConfigError for heads that no kernel takes."""
    try:
        return AttentionShape(model.num_heads, model.num_kv_heads, model.head_dim, model.sliding_window or 0)
    except ValueError as error:
        raise ConfigError(f"the CUDA backend cannot serve this model: {error}", hint="use --backend cpu") from error


def workspace(model: ModelConfig, sizes: StepSizes) -> dict[str, int]:
    """Bytes of every buffer of a step but weights and pages. All must be zero at the start: columns that only pad are
    never written."""
    limits, shape = sizes.limits(model, 0), attention_shape(model)
    num_rows, hidden = limits.max_rows, model.hidden_size
    heads, kv_heads, head_dim = model.num_heads, model.num_kv_heads, model.head_dim
    rope_bytes = sizes.max_model_len * (head_dim // 2) * 4
    # A row sees at most its whole table; through a window only the pages that it touches.
    visible = min(limits.table_width, shape.window // PAGE_TOKENS + 2 if shape.window else limits.table_width)
    results, scores = result_bytes(sizes.sampler(model), limits)
    return {
        **{name: 4 * words for name, words in limits.arrays().items()},
        "x": 4 * num_rows * hidden,
        "normed": 2 * num_rows * padded_columns(hidden),
        "qkv": 4 * num_rows * (heads + 2 * kv_heads) * head_dim,
        "q": 2 * num_rows * heads * padded_head_dim(head_dim),
        "attended": 2 * num_rows * padded_columns(heads * head_dim),
        "mlp": 2 * num_rows * padded_columns(model.intermediate_size),
        "head_in": 2 * LOGITS_ROWS * padded_columns(hidden),
        "logits": 4 * LOGITS_ROWS * round_up(model.vocab_size, 4),
        "cos": rope_bytes,
        "sin": rope_bytes,
        "partial": attention.partial_bytes(shape, limits.max_decode_rows * visible),
        "counters": 4 * attention.counter_elements(shape, limits.max_decode_rows),
        "sampler": sizes.sampler(model).num_bytes,
        "updates": 4 * UPDATE_WORDS,
        "results": results,
        "scores": scores,
        "trace": 8 * trace_length(model.num_layers),
    }


def result_bytes(shape: SamplerShape, limits: StepLimits) -> tuple[int, int]:
    """Of "results": slot_errors, then ROW_RESULT of every logits row; of "scores": shape.scores of each."""
    results = slot_errors_bytes(limits) + limits.max_logits_rows * sampler.ROW_RESULT.itemsize
    return results, limits.max_logits_rows * shape.scores.itemsize


def slot_errors_bytes(limits: StepLimits) -> int:
    """slot_errors stand before the results, so that one copy brings both back."""
    return round_up(4 * (limits.max_slots + 1), 16)


class Program:
    """Launches over fixed buffers. `weights`: canonical name (engine/params.py) -> address of the tiled matrix or the
    float32 vector. `buffers`: name -> address, of `workspace()` and "pool"."""

    def __init__(
        self,
        executor: Executor,
        model: ModelConfig,
        sizes: StepSizes,
        num_pages: int,
        weights: Mapping[str, int],
        buffers: Mapping[str, int],
    ) -> None:
        self.executor, self.model = executor, model
        self.limits, self.sampler = sizes.limits(model, num_pages), sizes.sampler(model)
        self.attention = attention_shape(model)
        self.tile_tokens = attention.tile_tokens(self.attention, executor.path)
        self._w, self._b = weights, buffers
        self._max_position = sizes.max_model_len
        self._hidden = model.hidden_size
        self._k_hidden = padded_columns(model.hidden_size)
        self._k_heads = padded_columns(model.num_heads * model.head_dim)
        self._k_inter = padded_columns(model.intermediate_size)
        self._qkv_rows = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        self.ld_logits = round_up(model.vocab_size, 4)

    def prepare(self, num_rows: int, decode_rows: int, num_logits_rows: int) -> Launch:
        b, limits = self._b, self.limits
        return rows.step_prepare(
            b["upload"], b["token_ids"], b["positions"], b["slots"], b["block_tables"], b["tiles"], b["logits_rows"],
            b["descriptors"], b["page_prefix"], b["last_token"],
            num_rows=num_rows, decode_rows=decode_rows, num_logits_rows=num_logits_rows, max_slots=limits.max_slots,
            table_width=limits.table_width, num_pages=limits.num_pages, vocab_size=self.model.vocab_size,
            window=self.attention.window,
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

    def decode_attention(self, layer: int, decode_rows: int) -> Launch:
        b, (k_layer, v_layer) = self._b, self._kv(layer)
        return attention.decode(
            self.executor, self.attention, b["q"], k_layer, v_layer, b["attended"], b["partial"], b["counters"],
            b["page_prefix"], b["positions"], b["slots"], b["block_tables"],
            num_rows=decode_rows, table_width=self.limits.table_width, num_pages=self.limits.num_pages,
            ld_out=self._k_heads, layer=layer,
        )  # fmt: skip

    def prefill_attention(self, layer: int, num_tiles: int) -> Launch:
        b, (k_layer, v_layer) = self._b, self._kv(layer)
        return attention.prefill(
            self.executor, self.attention, b["q"], k_layer, v_layer, b["attended"], b["tiles"], b["positions"],
            b["slots"], b["block_tables"],
            num_tiles=num_tiles, table_width=self.limits.table_width, num_pages=self.limits.num_pages,
            ld_out=self._k_heads, layer=layer,
        )  # fmt: skip

    def sample(self, num_logits_rows: int, first: int = 0, *, greedy_only: bool = False) -> tuple[Launch, ...]:
        """Of the logits that head() made: results and scores first .. + num_logits_rows - 1."""
        b = self._b
        return sampler.sample_launches(
            self.sampler, b["sampler"], logits=b["logits"], ld=self.ld_logits,
            rows=b["descriptors"] + first * sampler.ROW_DESCRIPTOR.itemsize, num_rows=num_logits_rows,
            last_token=b["last_token"],
            results=b["results"] + slot_errors_bytes(self.limits) + first * sampler.ROW_RESULT.itemsize,
            scores=b["scores"] + first * self.sampler.scores.itemsize, greedy_only=greedy_only,
            num_multiprocessors=self.executor.num_multiprocessors,
        )  # fmt: skip

    def update_slots(self, num_updates: int) -> Launch:
        return sampler.update_launch(self.sampler, self._b["sampler"], self._b["updates"], num_updates)

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
