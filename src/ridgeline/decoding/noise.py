"""Philox noise in torch, bit-equal to `ridgeline.core.philox`."""

import numpy as np
import torch

from ridgeline.core.philox import KEY_STEPS, MULTIPLIERS, ROUNDS, NoiseStream, words_of

_MASK = 0xFFFFFFFF

Word = int | torch.Tensor


def random_words(
    token_ids: torch.Tensor,
    *,
    seed: int,
    sample_index: int,
    position: int,
    stream: NoiseStream = NoiseStream.SAMPLE,
) -> torch.Tensor:
    """The 32-bit random word of each token id, in int64, shaped as ``token_ids``."""
    words = words_of(
        token_ids.flatten().numpy(),
        seed=seed,
        sample_index=sample_index,
        position=position,
        stream=stream,
    )
    return torch.from_numpy(words.astype(np.int64)).view(token_ids.shape)


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


def uniform(words: torch.Tensor) -> torch.Tensor:
    """Words to numbers in (0, 1), in float64; those of `core.philox.to_uniform`."""
    return ((words >> 9).double() + 0.5) * 2.0**-23


def gumbel(words: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise −log(−log u) in float64."""
    return -torch.log(-torch.log(uniform(words)))
