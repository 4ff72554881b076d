"""Philox noise in torch, bit-equal to `ridgeline.core.philox`."""

import torch

from ridgeline.core.philox import KEY_STEPS, MULTIPLIERS, ROUNDS

_MASK = 0xFFFFFFFF

Word = int | torch.Tensor


def philox_rounds(
    counter: tuple[torch.Tensor, ...], key: tuple[Word, Word]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ten rounds over four words of counters and two of keys, 32 bits each, held in int64."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(ROUNDS):
        # Products wrap modulo 2^64; masking after the arithmetic shift recovers the high word.
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (p1 >> 32 & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            (p0 >> 32 & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + KEY_STEPS[0]) & _MASK, (k1 + KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def gumbel(words: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise in float64, as `ridgeline.decoding.noise` has it."""
    uniform = ((words >> 9).double() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))
