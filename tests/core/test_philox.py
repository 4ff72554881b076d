import numpy as np
import pytest
import torch

from ridgeline.core.philox import (
    NoiseStream,
    derive_seed,
    philox,
    random_words,
    to_uniform,
    words_of,
)
from ridgeline.executors.cuda.noise import philox_rounds

# Known answers of Random123's kat_vectors for philox4x32-10: counter, key, output.
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter, key, expected):
    words = philox(tuple(np.array([c], dtype=np.uint64) for c in counter), tuple(key))
    assert [int(word[0]) for word in words] == expected


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 12345, 2**64 - 1])
def test_torch_is_bit_equal(seed):
    for position, index in [(0, 0), (7, 3), (2**31, 127)]:
        settings = {"seed": seed, "sample_index": index, "position": position}
        ours = random_words(count=1001, **settings)
        blocks = torch.arange(251)
        counter = (blocks, *(torch.full_like(blocks, each) for each in (position, index, 0)))
        words = torch.stack(philox_rounds(counter, (seed & 0xFFFFFFFF, seed >> 32)), dim=-1)
        assert np.array_equal(words.flatten()[:1001].numpy(), ours)
        shuffled = np.random.default_rng(0).permutation(1001)
        assert np.array_equal(words_of(shuffled, **settings), ours[shuffled])


def test_every_part_of_the_counter_matters():
    base = {"seed": 5, "sample_index": 0, "position": 9, "count": 64}
    words = random_words(**base)
    for change in ({"seed": 6}, {"seed": 5 + 2**32}, {"sample_index": 1}, {"position": 10}):
        assert not np.array_equal(random_words(**{**base, **change}), words)
    assert not np.array_equal(random_words(**base, stream=NoiseStream.SEED), words)


def test_uniforms_are_open_and_even():
    extremes = to_uniform(np.array([0, 2**32 - 1], dtype=np.uint32))
    assert 0.0 < extremes[0] < extremes[1] < 1.0
    values = to_uniform(random_words(seed=3, sample_index=0, position=0, count=100_000))
    counts, _ = np.histogram(values, bins=20, range=(0, 1))
    assert ((counts - 5000) ** 2 / 5000).sum() < 45  # chi-square, 19 degrees: p ≈ 0.0007


def test_derived_seeds_differ():
    seeds = {derive_seed(0, index) for index in range(1000)} | {derive_seed(1, 0)}
    assert len(seeds) == 1001
    assert all(0 <= seed < 2**64 for seed in seeds)
