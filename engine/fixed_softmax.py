"""Softmax weights as 64-bit integers: the arithmetic under the sampler.

weight = round(2**44 * exp((logit - max) / temperature)), so the most probable token weighs 2**44 and every sum over the
vocabulary is an exact int64. Integers, because their sums do not depend on the order of addition: numpy, threads of a
CPU and blocks of a GPU get the same bits without agreeing on an order. The exponential is ours for the same reason
(libm and the vector units differ in the last bit): it uses only IEEE double +, -, *, / and round-to-even, each rounded
once (no fused multiply-add), so the weights are the same integers on every machine.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from engine.types import Float32Array, Int64Array

SCALE_BITS = 44
"""The weight of the most probable token is 2**SCALE_BITS."""

MAX_VOCAB = 1 << 19
"""Below this many tokens the sum of all weights stays below 2**63."""

ZERO_BELOW = -32.0
"""A token with (logit - max) / temperature at or below this weighs 0 (exp(-32) * 2**44 = 0.22; the last 1 is at -31.2).
"""

_STEPS = 64  # table steps per factor of two
_STEPS_PER_UNIT = 92.33248261893243  # 64 / ln 2; only selects the table entry, so its rounding cannot matter
_UNIT_PER_STEP = 0.6931471805599453 / 64  # ln 2 / 64: a division by a power of two, exact
_BLOCK = 8192  # doubles; the scratch of a block stays in the L2 cache

_Float64Array = npt.NDArray[np.float64]


def _power_table() -> _Float64Array:
    """table[n] = 2**(SCALE_BITS - n / 64), correctly rounded: built from integer square roots, not from libm."""
    guard_bits = 120
    fractions = []  # 2**(e / 64) for e = 0..63
    for e in range(_STEPS):
        value = 1 << (e + _STEPS * guard_bits)
        for _ in range(6):  # 64th root = six square roots; nested floors stay exact floors
            value = math.isqrt(value)
        fractions.append(math.ldexp(float(value), -guard_bits))
    last = round(-ZERO_BELOW * _STEPS_PER_UNIT)
    table = np.empty(last + 1, np.float64)
    for n in range(last + 1):
        whole, e = divmod(SCALE_BITS * _STEPS - n, _STEPS)
        table[n] = math.ldexp(fractions[e], whole)
    return table


_TABLE = _power_table()
_TAYLOR = (1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)  # exp(r) for |r| <= ln 2 / 128, error 4e-17 relative


def softmax_weights(logits: Float32Array, top: float, temperature: float) -> Int64Array:
    """Integer weights of `logits` (n,), any of which may be -inf; `top` is their finite maximum, `temperature` > 0.

    Definition per token, in double precision, each step rounded once:
    z = max((logit - top) / temperature, -32); n = rint(z * -92.33248261893243); r = z + n * (ln2 / 64);
    p = Horner of 1 + r + r^2/2 + r^3/6 + r^4/24 + r^5/120; weight = rint(2**(44 - n/64) * p).
    Within one unit of 2**44 * exp(z), correctly rounded (tested).
    """
    weights: Int64Array = np.empty(logits.shape[0], np.int64)
    scratch = _Scratch(min(logits.shape[0], _BLOCK))
    for start in range(0, logits.shape[0], _BLOCK):
        _weigh_block(logits[start : start + _BLOCK], top, temperature, scratch, weights[start : start + _BLOCK])
    return weights


class _Scratch:
    __slots__ = ("index", "poly", "step", "z")

    def __init__(self, size: int) -> None:
        self.z, self.step, self.poly = (np.empty(size, np.float64) for _ in range(3))
        self.index = np.empty(size, np.intp)


def _weigh_block(logits: Float32Array, top: float, temperature: float, scratch: _Scratch, out: Int64Array) -> None:
    n = logits.shape[0]
    z, step, poly, index = scratch.z[:n], scratch.step[:n], scratch.poly[:n], scratch.index[:n]
    np.copyto(z, logits)
    z -= top
    if temperature != 1.0:
        z /= temperature
    np.maximum(z, ZERO_BELOW, out=z)
    np.multiply(z, -_STEPS_PER_UNIT, out=step)
    np.rint(step, out=step)
    np.copyto(index, step, casting="unsafe")
    step *= _UNIT_PER_STEP
    z += step  # now the remainder r
    np.multiply(z, _TAYLOR[0], out=poly)
    for coefficient in _TAYLOR[1:-1]:
        poly += coefficient
        poly *= z
    poly += _TAYLOR[-1]
    np.take(_TABLE, index, out=step, mode="clip")  # in range by construction; "clip" spares numpy a buffered copy
    poly *= step
    np.rint(poly, out=poly)
    np.copyto(out, poly, casting="unsafe")


def log_sum_exp(logits: Float32Array, top: float) -> float:
    """log(sum(exp(logits))) of a row (n,) with the finite maximum `top`; exact to about 1e-8, same bits everywhere."""
    scratch = _Scratch(min(logits.shape[0], _BLOCK))
    weights = np.empty(scratch.z.shape[0], np.int64)
    total = 0
    for start in range(0, logits.shape[0], _BLOCK):
        block = logits[start : start + _BLOCK]
        out = weights[: block.shape[0]]
        _weigh_block(block, top, 1.0, scratch, out)
        total += int(out.sum())
    return top + math.log(total / (1 << SCALE_BITS))
