"""Small integers packed into words, least significant bits first, as GPTQ and its heirs store them.

Value j of a row occupies bits ``[j·bits, (j+1)·bits)`` of the row's words, counted from the least
significant bit of the first; with 3 bits some values straddle two words. 32 values always fill
``bits`` words exactly. Source: IST-DASLab/gptq ``quant_cuda``; compressed-tensors
``pack_to_int32``.
"""

import torch

WORD_BITS = 32


def words_for(count: int, bits: int) -> int:
    """The 32-bit words that ``count`` values take."""
    return -(-count * bits // WORD_BITS)


def unpack_words(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The first ``count`` values, uint8 ``[..., count]``, of int32 words ``[..., W]``."""
    groups = -(-count // WORD_BITS)
    missing = groups * bits - words.shape[-1]
    if missing > 0:
        words = torch.nn.functional.pad(words, (0, missing))
    words = words[..., : groups * bits].reshape(*words.shape[:-1], groups, bits)
    values = torch.empty(*words.shape[:-1], WORD_BITS, dtype=torch.uint8)
    mask = (1 << bits) - 1
    for index in range(WORD_BITS):
        word, shift = divmod(index * bits, WORD_BITS)
        value = (words[..., word] >> shift) & mask
        have = WORD_BITS - shift
        if have < bits:  # the shift is arithmetic: clear what the sign brought in
            value = (value & ((1 << have) - 1)) | ((words[..., word + 1] << have) & mask)
        values[..., index] = value.to(torch.uint8)
    return values.flatten(-2)[..., :count]


_PACKED_AT_ONCE = 1 << 20  # values, which take eight bytes meanwhile


def pack_rows(values_RC: torch.Tensor, bits: int) -> torch.Tensor:
    """`pack_words` of a matrix, some rows at a time."""
    rows = max(1, _PACKED_AT_ONCE // max(values_RC.shape[1], 1))
    return torch.cat([pack_words(part, bits) for part in torch.split(values_RC, rows)])


def pack_words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 words ``[..., words_for(count, bits)]`` of values ``[..., count]`` below ``2^bits``."""
    count = values.shape[-1]
    groups = -(-count // WORD_BITS)
    padded = torch.nn.functional.pad(values.to(torch.int64), (0, groups * WORD_BITS - count))
    padded = padded.reshape(*values.shape[:-1], groups, WORD_BITS)
    words = torch.zeros(*padded.shape[:-1], bits + 1, dtype=torch.int64)
    for index in range(WORD_BITS):
        word, shift = divmod(index * bits, WORD_BITS)
        wide = padded[..., index] << shift
        words[..., word] |= wide & 0xFFFFFFFF
        words[..., word + 1] |= wide >> WORD_BITS
    packed = words[..., :bits].flatten(-2)[..., : words_for(count, bits)]
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def unpack_nibbles(data: torch.Tensor, *, high_first: bool = False) -> torch.Tensor:
    """uint8 values ``[..., 2·B]`` below 16 of bytes ``[..., B]``, the low nibble first."""
    pair = (data >> 4, data & 15) if high_first else (data & 15, data >> 4)
    return torch.stack(pair, dim=-1).flatten(-2)
