"""Counter-based random numbers: Philox4x32-10 (Salmon et al., SC'11) in numpy.

The noise of a token is a function of (seed, sample index, position, token id) alone, so a seed
gives the same text whatever else is in the batch. Every backend computes the same bits:

* key = (seed low 32 bits, seed high 32 bits);
* counter = (token id // 4, position, sample index, stream), whose four output words belong to
  token ids 4c, 4c+1, 4c+2, 4c+3;
* uniform = ((word >> 9) + 0.5) · 2⁻²³, in (0, 1), exact in float32.
"""

from enum import IntEnum

import numpy as np
import numpy.typing as npt

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
_MASK = 0xFFFFFFFF

Words = npt.NDArray[np.uint64]


class NoiseStream(IntEnum):
    """Independent sequences of noise for one token."""

    SAMPLE = 0
    SEED = 1
    ACCEPT = 2
    RESIDUAL = 3
    DRAFT = 4


def philox(
    counter: tuple[Words, Words, Words, Words], key: tuple[int, int]
) -> tuple[Words, Words, Words, Words]:
    """Ten rounds over arrays of 32-bit words, held in uint64 so that products do not overflow."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0 = c0 * np.uint64(MULTIPLIERS[0])
        p1 = c2 * np.uint64(MULTIPLIERS[1])
        c0, c1, c2, c3 = (
            (p1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            p1 & np.uint64(_MASK),
            (p0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            p0 & np.uint64(_MASK),
        )
        k0 = (k0 + KEY_STEPS[0]) & _MASK
        k1 = (k1 + KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def random_words(
    *,
    seed: int,
    sample_index: int,
    position: int,
    count: int,
    stream: NoiseStream = NoiseStream.SAMPLE,
) -> npt.NDArray[np.uint32]:
    """``count`` random 32-bit words, word i belonging to token id i."""
    blocks = np.arange((count + 3) // 4, dtype=np.uint64)
    return _blocks(blocks, seed, sample_index, position, stream).T.reshape(-1)[:count]


def words_of(
    token_ids: npt.NDArray[np.int64],
    *,
    seed: int,
    sample_index: int,
    position: int,
    stream: NoiseStream = NoiseStream.SAMPLE,
) -> npt.NDArray[np.uint32]:
    """The random words of some token ids ``[N]``."""
    blocks = _blocks((token_ids // 4).astype(np.uint64), seed, sample_index, position, stream)
    return blocks[token_ids % 4, np.arange(len(token_ids))]


def _blocks(
    blocks: Words, seed: int, sample_index: int, position: int, stream: NoiseStream
) -> npt.NDArray[np.uint32]:
    """The four words of each block, ``[4, N]``."""
    same = np.ones_like(blocks)
    counter = (
        blocks,
        same * np.uint64(position),
        same * np.uint64(sample_index),
        same * np.uint64(stream),
    )
    return np.stack(philox(counter, (seed & _MASK, seed >> 32 & _MASK))).astype(np.uint32)


def to_uniform(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.float32]:
    """Words to numbers in the open interval (0, 1), exact in float32."""
    return ((words >> np.uint32(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)


def derive_seed(seed: int, index: int) -> int:
    """The 64-bit seed of request number ``index`` of an engine whose seed is ``seed``."""
    low, high = random_words(
        seed=seed,
        sample_index=index >> 32,
        position=index & _MASK,
        count=2,
        stream=NoiseStream.SEED,
    )
    return int(high) << 32 | int(low)
