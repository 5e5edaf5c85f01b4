"""Every op in plain numpy: the oracle of the CPU ops (kernels/cpu/) and of the CUDA kernels.

`dtype` chooses the precision of the arithmetic: np.float32, or np.float64 for error bounds. Inputs are float32, or
uint16 bf16 bits for matrices. Results have that dtype. Nothing here is fast, and the order of sums is numpy's, so a
kernel is compared with a tolerance; `ordered_dot` states the CPU backend's order exactly.

Sizes: T tokens, H hidden, Hq/Hkv query and KV heads, D head_dim, P pages, N/K matrix sides.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

PAGE_TOKENS = 128

Array = npt.NDArray[Any]


def widen(matrix: Array) -> Array:
    """uint16 bf16 bits to float32: bf16 is the upper half of a float32, so this is exact. float32 passes through."""
    if matrix.dtype == np.uint16:
        return (matrix.astype(np.uint32) << 16).view(np.float32)
    return matrix


def rmsnorm(x: Array, weight: Array, eps: float, dtype: Any = np.float32) -> Array:
    """x (T, H) / sqrt(mean(x^2) + eps) * weight (H,). Zhang and Sennrich 2019, arXiv 1910.07467."""
    x = x.astype(dtype)
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    normed: Array = x / np.sqrt(mean_square + dtype(eps)) * weight.astype(dtype)
    return normed


def matmul(x: Array, w: Array, dtype: Any = np.float32) -> Array:
    """x (T, K) @ w (N, K)^T."""
    product: Array = x.astype(dtype) @ widen(w).astype(dtype).T
    return product


def ordered_dot(x: Array, w: Array) -> np.float32:
    """x (K,) . w (K,) with the CPU backend's bits: lane l sums k = l, l+8, ... ascending by fused multiply-add, then
    ((l0+l1)+(l2+l3)) + ((l4+l5)+(l6+l7)). IEEE 754 fusedMultiplyAdd: one rounding of the exact a*b + c."""
    lanes = np.zeros(8, np.float32)
    for k in range(len(x)):
        lanes[k % 8] = fma32(x[k], w[k], lanes[k % 8])
    pairs = lanes[0::2] + lanes[1::2]
    quads = pairs[0::2] + pairs[1::2]
    return np.float32(quads[0] + quads[1])


def fma32(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    """Correctly rounded a*b + c for finite values: exact as a ratio of integers, then rounded to nearest even."""
    from fractions import Fraction

    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    near = np.float32(float(exact))  # rounded twice, so off by one step at most: choose among the neighbours
    candidates = [near, np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf))]

    def badness(value: np.float32) -> tuple[Fraction, int]:
        return abs(Fraction(float(value)) - exact), int(np.asarray(value).view(np.uint32) & 1)

    return np.float32(min(candidates, key=badness))


def swiglu(gate_up: Array, dtype: Any = np.float32) -> Array:
    """silu(gate) * up of gate_up (T, 2 I) = [gate, up], silu(g) = g / (1 + e^-g). Shazeer 2020, arXiv 2002.05202."""
    gate, up = np.split(gate_up.astype(dtype), 2, axis=-1)
    with np.errstate(over="ignore"):  # e^-g = inf gives -0, the right limit
        gated: Array = gate / (1 + np.exp(-gate)) * up
    return gated


def embed(table: Array, ids: Array, dtype: Any = np.float32) -> Array:
    """table (V, H)[ids (T,)]."""
    return widen(table)[ids].astype(dtype)


def rope(x: Array, cos: Array, sin: Array, dtype: Any = np.float32) -> Array:
    """Rotates pairs (i, i + D/2) of x (T, heads, D) by cos, sin (T, D/2). Su et al. 2021, arXiv 2104.09864, in the
    half-split layout of Hugging Face checkpoints ("rotate_half")."""
    x, cos, sin = x.astype(dtype), cos.astype(dtype)[:, None, :], sin.astype(dtype)[:, None, :]
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def qkv_rope_append(
    qkv: Array,
    cos: Array,
    sin: Array,
    k_pages: Array,
    v_pages: Array,
    positions: Array,
    seq_index: Array,
    block_tables: Array,
    *,
    bias: Array | None = None,
    q_norm: Array | None = None,
    k_norm: Array | None = None,
    eps: float = 0.0,
    dtype: Any = np.float32,
) -> Array:
    """Bias (Qwen2), per-head RMSNorm of q and k (Qwen3, arXiv 2505.09388), rope, and k, v into their slots of the pages
    (P, Hkv, PAGE_TOKENS, D), which are changed in place. qkv (T, (Hq + 2 Hkv) D); returns q (T, Hq, D)."""
    kv_heads, head_dim = k_pages.shape[1], k_pages.shape[3]
    x = qkv.astype(dtype) if bias is None else qkv.astype(dtype) + bias.astype(dtype)
    x = x.reshape(len(x), -1, head_dim)
    q, k, v = x[:, : -2 * kv_heads], x[:, -2 * kv_heads : -kv_heads], x[:, -kv_heads:]
    if q_norm is not None:
        q = rmsnorm(q, q_norm, eps, dtype)
    if k_norm is not None:
        k = rmsnorm(k, k_norm, eps, dtype)
    q, k = (rope(part, cos[positions], sin[positions], dtype) for part in (q, k))
    for t, position in enumerate(positions):
        page = block_tables[seq_index[t], position // PAGE_TOKENS]
        k_pages[page, :, position % PAGE_TOKENS] = k[t]
        v_pages[page, :, position % PAGE_TOKENS] = v[t]
    return q


def paged_attention(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    positions: Array,
    seq_index: Array,
    block_tables: Array,
    *,
    scale: float,
    window: int | None = None,
    dtype: Any = np.float32,
) -> Array:
    """softmax(q k^T scale) v over the visible positions max(0, p - window + 1)..p of each token. q (T, Hq, D).

    Vaswani et al. 2017, arXiv 1706.03762; grouped heads (h reads KV head h // (Hq // Hkv)): Ainslie et al. 2023, arXiv
    2305.13245; sliding window: Mistral 7B, arXiv 2310.06825; pages: Kwon et al. 2023, arXiv 2309.06180."""
    heads, kv_heads = q.shape[1], k_pages.shape[1]
    out = np.empty(q.shape, dtype)
    for t, p in enumerate(positions):
        first = 0 if window is None else max(0, int(p) - window + 1)
        visible = np.arange(first, p + 1)
        pages = block_tables[seq_index[t], visible // PAGE_TOKENS]
        k = k_pages[pages, :, visible % PAGE_TOKENS].astype(dtype)  # (visible, Hkv, D)
        v = v_pages[pages, :, visible % PAGE_TOKENS].astype(dtype)
        for h in range(heads):
            kv_head = h // (heads // kv_heads)
            scores = (k[:, kv_head] @ q[t, h].astype(dtype)) * dtype(scale)
            with np.errstate(invalid="ignore"):  # inf - inf: the row is NaN, as it should be
                weights = np.exp(scores - scores.max())
                out[t, h] = (weights @ v[:, kv_head]) / weights.sum()
    return out
