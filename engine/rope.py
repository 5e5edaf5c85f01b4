"""Rotary position embeddings (RoFormer, arXiv 2104.09864): inverse frequencies and the table of cos and sin.

Frequencies follow transformers' modeling_rope_utils.py for the kinds default, linear, dynamic, llama3 and yarn, with a
rounding to float32 after each operation, as there. That matters: at position p one unit in the last place of an inverse
frequency is worth p times as much in the angle (frequencies rounded once from float64 moved the logits at position
4,200 by 2e-4). Powers, cos and sin are correctly rounded.

Dynamic NTK depends on the sequence length. transformers recomputes all frequencies when a sequence grows past
original_max_position but keeps keys that were rotated with the old ones, so its answer depends on how the prompt was
cut. Here position p always uses the frequencies of a sequence of length p + 1: what transformers computes when it is
given one token at a time, and the same as transformers in any mode up to original_max_position. So a key depends on its
own position only, and batch, chunking, prefix cache and preemption do not change it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine.errors import ConfigError

if TYPE_CHECKING:
    from engine.config import RopeConfig
    from engine.types import Float32Array

_TABLE_ROWS = 4096  # positions per step when the table is filled: bounds the float64 temporaries


def rope_table(config: RopeConfig, head_dim: int, max_position: int) -> tuple[Float32Array, Float32Array]:
    """cos and sin (max_position, head_dim / 2), with yarn's attention scaling multiplied in.

    Raises ConfigError for an odd head_dim or a kind without its parameters.
    """
    if head_dim < 2 or head_dim % 2:
        raise ConfigError(f"head_dim is {head_dim}; rotary embeddings need an even number")
    scaling = np.float32(attention_scaling(config))
    cos = np.empty((max_position, head_dim // 2), np.float32)
    sin = np.empty_like(cos)
    inv_freq = inverse_frequencies(config, head_dim)
    for start in range(0, max_position, _TABLE_ROWS):
        stop = min(start + _TABLE_ROWS, max_position)
        positions = np.arange(start, stop, dtype=np.float32)
        if config.kind == "dynamic" and stop > _original(config):
            inv_freq = np.stack([inverse_frequencies(config, head_dim, seq_len=p + 1) for p in range(start, stop)])
        angles = (positions[:, None] * inv_freq).astype(np.float64)
        cos[start:stop] = _rounded(np.cos, angles) * scaling
        sin[start:stop] = _rounded(np.sin, angles) * scaling
    return cos, sin


def _rounded(function: np.ufunc, angles: npt.NDArray[np.float64]) -> Float32Array:
    """function(angles) rounded correctly to float32, so that the table has the same bits with every numpy and libm:
    where a last-place error in float64 could change the rounding, the value is taken again in long double."""
    values: npt.NDArray[np.float64] = function(angles)
    low: Float32Array = (values * (1 - 2.0**-49)).astype(np.float32)
    high: Float32Array = (values * (1 + 2.0**-49)).astype(np.float32)
    doubtful = low != high
    low[doubtful] = function(angles[doubtful].astype(np.longdouble)).astype(np.float32)
    return low


def inverse_frequencies(config: RopeConfig, head_dim: int, *, seq_len: int | None = None) -> Float32Array:
    """Inverse frequencies (head_dim / 2,) float32. `seq_len` matters to dynamic only (module docstring)."""
    if config.kind == "dynamic":
        return _reciprocal(_powers(_dynamic_theta(config, head_dim, seq_len), head_dim))
    powers = _powers(config.theta, head_dim)
    if config.kind == "default":
        return _reciprocal(powers)
    if config.kind == "linear":
        return _reciprocal(powers) / np.float32(config.factor)
    if config.kind == "llama3":
        return _llama3(config, _reciprocal(powers))
    if config.kind == "yarn":
        return _yarn(config, powers, head_dim)
    raise ConfigError(f"rope kind {config.kind!r} is not supported")


def _powers(theta: float, head_dim: int) -> Float32Array:
    """theta^(2i/D) (head_dim / 2,), both the exponent and the power rounded to float32."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    powers: Float32Array = (np.longdouble(theta) ** exponents.astype(np.longdouble)).astype(np.float32)
    return powers


def _reciprocal(powers: Float32Array) -> Float32Array:
    return np.float32(1) / powers


def attention_scaling(config: RopeConfig) -> float:
    """The factor on cos and sin: yarn's mscale (arXiv 2309.00071, section 3.4; DeepSeek's mscale / mscale_all_dim)."""
    if config.kind != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return _mscale(config.factor, config.mscale) / _mscale(config.factor, config.mscale_all_dim)
    return _mscale(config.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _original(config: RopeConfig) -> int:
    if not config.original_max_position:
        raise ConfigError(f"rope kind {config.kind!r} needs original_max_position_embeddings")
    return config.original_max_position


def _dynamic_theta(config: RopeConfig, head_dim: int, seq_len: int | None) -> float:
    """Dynamic NTK: the base grows so that the slowest frequency is stretched by the length over the original one."""
    original = _original(config)
    if head_dim <= 2:
        raise ConfigError("rope kind 'dynamic' needs head_dim > 2")
    if seq_len is None or seq_len <= original:
        return config.theta
    f32 = np.float32
    stretch = f32(f32(config.factor) * f32(seq_len)) / f32(original) - f32(config.factor - 1)
    return float(f32(config.theta) * f32(float(stretch) ** (head_dim / (head_dim - 2))))


def _llama3(config: RopeConfig, plain: Float32Array) -> Float32Array:
    """Llama 3.1: long wavelengths are divided by factor, short ones kept, those between blended linearly."""
    f32, original = np.float32, _original(config)
    low, high = config.low_freq_factor, config.high_freq_factor
    wavelength = f32(2 * math.pi) / plain
    divided = plain / f32(config.factor)
    smooth = (f32(original) / wavelength - f32(low)) / f32(high - low) if high != low else np.ones_like(plain)
    blended = (f32(1) - smooth) * plain / f32(config.factor) + smooth * plain
    kept_or_divided = np.where(wavelength > f32(original / low), divided, plain)
    between = (wavelength >= f32(original / high)) & (wavelength <= f32(original / low))
    return np.where(between, blended, kept_or_divided)


def _yarn(config: RopeConfig, powers: Float32Array, head_dim: int) -> Float32Array:
    """YaRN (arXiv 2309.00071): a linear ramp over the dimensions from kept (fast) to divided by factor (slow)."""

    def dimension(rotations: float) -> float:  # the dimension that makes that many turns within the original context
        return head_dim * math.log(_original(config) / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as transformers does: a step instead of a division by zero
    f32, one = np.float32, np.float32(1)
    ramp = np.clip((np.arange(head_dim // 2, dtype=f32) - f32(low)) / f32(high - low), f32(0), one)
    kept = one - ramp
    blended: Float32Array = one / (f32(config.factor) * powers) * (one - kept) + one / powers * kept
    return blended
