"""Counter-based random bits: Philox4x32-10, one independent draw for every generated token.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). A counter-based generator
has no state to keep, copy or lose: the draw for a token is a pure function of (seed, choice, position), so it is the
same after a preemption, in any batch and on any device. Philox4x32 because a GPU multiplies 32-bit words natively.
"""

from __future__ import annotations

_MASK32 = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85  # golden ratio and sqrt(3) - 1, in 32 bits

STREAM_SAMPLE = 0
"""Third counter word. Another use of random bits gets another number, so that no two uses ever share a draw."""

Words4 = tuple[int, int, int, int]


def philox4x32(counter: Words4, key: tuple[int, int], rounds: int = 10) -> Words4:
    """The Philox4x32 bijection. All words are 32 bits; `key` selects it, `counter` is its input."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        product_0 = _MULTIPLIER_0 * c0
        product_1 = _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (
            (product_1 >> 32) ^ c1 ^ k0,
            product_1 & _MASK32,
            (product_0 >> 32) ^ c3 ^ k1,
            product_0 & _MASK32,
        )
        k0 = (k0 + _WEYL_0) & _MASK32
        k1 = (k1 + _WEYL_1) & _MASK32
    return c0, c1, c2, c3


def token_bits(seed: int, choice: int, position: int) -> int:
    """64 random bits for one token: u = bits / 2**64 is uniform in [0, 1).

    key = (low, high word of seed); counter = (position, choice, STREAM_SAMPLE, 0); bits = out[0] << 32 | out[1].
    `position` is the index of the token among those generated for its choice (0 is the first), `choice` the index of
    the choice (0..n-1). Philox is a bijection of the counter, so two choices or positions never share an input; folding
    the choice into the seed instead (seed + choice) would make choice 1 of seed 7 repeat choice 0 of seed 8.
    Raises ValueError where seed is not in [0, 2**64) or choice or position not in [0, 2**32).
    """
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed must be in [0, 2**64), got {seed}")
    if not (0 <= choice <= _MASK32 and 0 <= position <= _MASK32):
        raise ValueError(f"choice and position must be in [0, 2**32), got {choice} and {position}")
    out = philox4x32((position, choice, STREAM_SAMPLE, 0), (seed & _MASK32, seed >> 32))
    return out[0] << 32 | out[1]
