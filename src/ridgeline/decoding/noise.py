"""Philox noise in torch, bit-equal to `ridgeline.core.philox`."""

import torch

from ridgeline.core.philox import KEY_STEPS, MULTIPLIERS, ROUNDS, Stream

_MASK = 0xFFFFFFFF


def random_words(
    token_ids: torch.Tensor,
    *,
    seed: int,
    sample_index: int,
    position: int,
    stream: Stream = Stream.SAMPLE,
) -> torch.Tensor:
    """The 32-bit random word of each token id, in int64, shaped as ``token_ids``."""
    c0 = token_ids // 4
    c1, c2, c3 = (torch.full_like(c0, value) for value in (position, sample_index, int(stream)))
    k0, k1 = seed & _MASK, seed >> 32 & _MASK
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
    words = torch.stack((c0, c1, c2, c3), dim=-1)
    return words.gather(-1, (token_ids % 4)[..., None])[..., 0]


def gumbel(words: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise −log(−log u) in float64, u the uniform of `core.philox.to_uniform`."""
    uniform = ((words >> 9).double() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))
