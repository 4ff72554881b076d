"""Small integers packed into words, least significant bits first, as GPTQ and its heirs store them.

Value j of a row occupies bits ``[j·bits, (j+1)·bits)`` of the row's words, counted from the least
significant bit of the first; with 3 bits some values straddle two words. 32 values always fill
``bits`` words exactly. Source: IST-DASLab/gptq ``quant_cuda``; compressed-tensors
``pack_to_int32``.
"""

import numpy as np

from ridgeline.core.arrays import Array
from ridgeline.core.rounding import ceil_div

WORD_BITS = 32


def words_for(count: int, bits: int) -> int:
    """The 32-bit words that ``count`` values take."""
    return ceil_div(count * bits, WORD_BITS)


def unpack_words(words: Array, bits: int, count: int) -> Array:
    """The first ``count`` values, uint8 ``[..., count]``, of int32 words ``[..., W]``."""
    words = np.ascontiguousarray(words).view("<u4")
    if 8 % bits == 0:
        return _split_bytes(words.view(np.uint8), bits)[..., :count]
    groups = ceil_div(count, WORD_BITS)
    missing = max(0, groups * bits - words.shape[-1])
    words = np.pad(words, [(0, 0)] * (words.ndim - 1) + [(0, missing)])
    words = words[..., : groups * bits].reshape(*words.shape[:-1], groups, bits)
    values = np.empty((*words.shape[:-1], WORD_BITS), dtype=np.uint8)
    mask = np.uint32((1 << bits) - 1)
    for index in range(WORD_BITS):
        word, shift = divmod(index * bits, WORD_BITS)
        value = words[..., word] >> np.uint32(shift)
        have = WORD_BITS - shift
        if have < bits:
            value = value | (words[..., word + 1] << np.uint32(have))
        values[..., index] = value & mask
    return values.reshape(*words.shape[:-2], groups * WORD_BITS)[..., :count]


_PACKED_AT_ONCE = 1 << 20  # values, which take eight bytes meanwhile


def pack_rows(values_RC: Array, bits: int) -> Array:
    """`pack_words` of a matrix, some rows at a time."""
    rows = max(1, _PACKED_AT_ONCE // max(values_RC.shape[1], 1))
    starts = range(0, max(len(values_RC), 1), rows)
    return np.concatenate([pack_words(values_RC[s : s + rows], bits) for s in starts])


def pack_words(values: Array, bits: int) -> Array:
    """int32 words ``[..., words_for(count, bits)]`` of values ``[..., count]`` below ``2^bits``."""
    count = values.shape[-1]
    groups = ceil_div(count, WORD_BITS)
    padded = np.zeros((*values.shape[:-1], groups * WORD_BITS), dtype=np.uint64)
    padded[..., :count] = values
    padded = padded.reshape(*values.shape[:-1], groups, WORD_BITS)
    words = np.zeros((*padded.shape[:-1], bits + 1), dtype=np.uint64)
    for index in range(WORD_BITS):
        word, shift = divmod(index * bits, WORD_BITS)
        wide = padded[..., index] << np.uint64(shift)
        words[..., word] |= wide & np.uint64(0xFFFFFFFF)
        words[..., word + 1] |= wide >> np.uint64(WORD_BITS)
    packed = words[..., :bits].reshape(*values.shape[:-1], groups * bits)
    packed = packed[..., : words_for(count, bits)]
    return packed.astype(np.uint32).view(np.int32)


def unpack_nibbles(data: Array, *, high_first: bool = False) -> Array:
    """uint8 values ``[..., 2·B]`` below 16 of bytes ``[..., B]``, the low nibble first."""
    return _split_bytes(data, 4, high_first=high_first)


def _split_bytes(data: Array, bits: int, *, high_first: bool = False) -> Array:
    """The fields of ``bits`` bits of each byte, the lowest or the highest first."""
    count = 8 // bits
    fields = np.empty((*data.shape, count), dtype=np.uint8)
    for index in range(count):
        place = count - 1 - index if high_first else index
        np.right_shift(data, np.uint8(bits * index), out=fields[..., place])
    fields &= np.uint8((1 << bits) - 1)
    return fields.reshape(*data.shape[:-1], data.shape[-1] * count)
