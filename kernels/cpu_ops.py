"""The CPU ops, one function each; the mathematics and its sources are in reference.py, the code in kernels/cpu/.

Exactness: every output element is computed in one canonical order (kernels/cpu/vec.h) that depends only on its own row,
so the bits do not change with the number of rows, the chunking, the tiles or the threads, and both instruction sets
(AVX2+FMA, plain C) give the same ones.

All arrays are C-contiguous, float32 unless said otherwise; `out` must not share memory with an input. Shapes, dtypes,
contiguity and every index are checked before anything is read or written: TypeError (dtype, contiguity), ValueError
(shape, overlap), IndexError (token id, position, page). The GIL is released, so the caller must not change an argument
from another thread meanwhile. Sizes: T tokens, H hidden, Hq/Hkv heads, D head_dim, P pages, V vocabulary.
"""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kernels import _cpu

if TYPE_CHECKING:
    F32 = npt.NDArray[np.float32]
    I32 = npt.NDArray[np.int32]

MAX_HEAD_DIM = 256
MAX_THREADS = 256  # POOL_MAX_THREADS of cpu/pool.h

atexit.register(_cpu.shutdown)


def rmsnorm(out: F32, x: F32, weight: F32, eps: float, *, residual: F32 | None = None, num_threads: int = 1) -> None:
    """out (T, H) = RMSNorm(x) with weight (H,). With `residual` (T, H), x += residual comes first, in place."""
    _cpu.rmsnorm(out, x, weight, residual, eps, num_threads)


def add(x: F32, residual: F32, *, num_threads: int = 1) -> None:
    """x (T, H) += residual (T, H)."""
    _cpu.add(x, residual, num_threads)


def matmul(out: F32, x: F32, w: npt.NDArray[Any], *, num_threads: int = 1) -> None:
    """out (T, N) = x (T, K) @ w.T with w (N, K) float32, or uint16 bf16 bits (widened exactly, fp32 arithmetic)."""
    _cpu.matmul(out, x, w, num_threads)


def swiglu(out: F32, gate_up: F32, *, num_threads: int = 1) -> None:
    """out (T, I) = silu(gate) * up with gate_up (T, 2 I) = [gate, up]."""
    _cpu.swiglu(out, gate_up, num_threads)


def embed(out: F32, table: npt.NDArray[Any], ids: I32, *, num_threads: int = 1) -> None:
    """out (T, H) = table[ids] with table (V, H) float32 or bf16 bits, ids int32 (T,). IndexError names a bad id."""
    _cpu.embed(out, table, ids, num_threads)


def exp(out: F32, x: F32) -> None:
    """out (n,) = exp(x): the exponential of softmax and SwiGLU, within 1 ulp (2^-149 in the subnormal range)."""
    _cpu.exp(out, x)


def qkv_rope_append(
    q_out: F32,
    qkv: F32,
    cos: F32,
    sin: F32,
    k_pages: F32,
    v_pages: F32,
    positions: I32,
    seq_index: I32,
    block_tables: I32,
    *,
    bias: F32 | None = None,
    q_norm: F32 | None = None,
    k_norm: F32 | None = None,
    eps: float = 0.0,
    num_threads: int = 1,
) -> None:
    """What lies between the QKV product and attention, for a batch laid out as engine.types.StepBatch.

    qkv (T, (Hq + 2 Hkv) D), rows q then k then v: adds `bias`, normalises each q and k head with q_norm/k_norm (D,),
    rotates q and k by cos/sin (max_position, D/2)[position], writes q to q_out (T, Hq, D) and appends k and v to
    k_pages/v_pages (P, Hkv, PAGE_TOKENS, D). Two tokens of a batch must not share a KV slot. IndexError (nothing is
    written) for a position outside the table or block table, a sequence without block table, a page outside the pool.
    """
    _cpu.qkv_rope_append(
        q_out, qkv, bias, q_norm, k_norm, cos, sin,
        k_pages, v_pages, positions, seq_index, block_tables, eps, num_threads,
    )  # fmt: skip


def paged_attention(
    out: F32,
    q: F32,
    k_pages: F32,
    v_pages: F32,
    positions: I32,
    seq_index: I32,
    block_tables: I32,
    *,
    scale: float,
    window: int | None = None,
    num_threads: int = 1,
) -> None:
    """out (T, Hq, D): each token of q (T, Hq, D) attends to positions 0..positions[t] of its sequence in the pool.

    With `window` it sees only the last `window` of them, itself included; pages before that are never looked at and may
    be -1. Query head h reads KV head h // (Hq // Hkv). IndexError for a needed page outside the pool, before any read.
    """
    if window is not None and window < 1:
        raise ValueError(f"paged_attention: window is {window}; wanted None or at least 1")
    _cpu.paged_attention(
        out, q, k_pages, v_pages, positions, seq_index, block_tables, window or 0, scale, num_threads
    )  # fmt: skip


def check_tokens(
    k_pages: F32,
    v_pages: F32,
    positions: I32,
    seq_index: I32,
    block_tables: I32,
    *,
    window: int | None,
    max_position: int,
) -> None:
    """What qkv_rope_append and paged_attention check of a batch (IndexError, ValueError, TypeError), for a whole step
    before its first layer writes. Positions must be below `max_position`."""
    _cpu.check_tokens(k_pages, v_pages, positions, seq_index, block_tables, window or 0, max_position)
