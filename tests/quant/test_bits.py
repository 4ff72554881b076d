"""Packing of small integers: round trips over all widths and odd lengths, and known words."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.quant.bits import pack_words, unpack_nibbles, unpack_words, words_for


@settings(deadline=None, max_examples=60)
@given(
    bits=st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8]),
    count=st.integers(1, 133),
    rows=st.integers(0, 5),
    seed=st.integers(0, 2**31),
)
def test_what_is_packed_comes_back(bits: int, count: int, rows: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    values = generator.integers(0, 1 << bits, (rows, count), dtype=np.uint8)
    words = pack_words(values, bits)
    assert words.dtype == np.int32
    assert words.shape == (rows, words_for(count, bits))
    assert np.array_equal(unpack_words(words, bits, count), values)


@settings(deadline=None, max_examples=40)
@given(bits=st.sampled_from([2, 3, 4, 8]), words=st.lists(st.integers(0, 2**32 - 1), min_size=8))
def test_values_are_bits_of_one_long_number(bits: int, words: list[int]) -> None:
    number = sum(word << (32 * index) for index, word in enumerate(words))
    count = len(words) * 32 // bits
    signed = np.array([word - (word >> 31 << 32) for word in words], dtype=np.int32)
    expected = [(number >> (index * bits)) & ((1 << bits) - 1) for index in range(count)]
    assert unpack_words(signed[None], bits, count)[0].tolist() == expected


@pytest.mark.parametrize(("bits", "words"), [(4, 2), (3, 2), (8, 3), (2, 1)])
def test_words_are_rounded_up(bits: int, words: int) -> None:
    assert words_for(9 if bits != 3 else 11, bits) == words


def test_nibbles_come_low_first_or_high_first() -> None:
    data = np.array([[0x21, 0x43]], dtype=np.uint8)
    assert unpack_nibbles(data).tolist() == [[1, 2, 3, 4]]
    assert unpack_nibbles(data, high_first=True).tolist() == [[2, 1, 4, 3]]
