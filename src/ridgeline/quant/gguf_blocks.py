"""GGUF's blocks of 32: a shared scale (and minimum), and packed integers.

Every function in `EXPAND` takes raw blocks, uint8 ``[N, block_bytes]``, and gives float32
``[N, 32]`` (plain formats: ``[N, 1]``). The arithmetic follows ``gguf.quants`` operation by
operation, so that values agree bit for bit, NaN and infinite scales included.

Layouts (byte offsets in a block; d and m are float16 in little-endian order; a byte of ``qs`` holds
element j in its low four bits and element j + 16 in its high four):

=======  ============================================  =====================
format   layout                                        value
=======  ============================================  =====================
Q4_0     0 d, 2 qs[16]                                 d · (q − 8)
Q4_1     0 d, 2 m, 4 qs[16]                            d · q + m
Q5_0     0 d, 2 qh[4], 6 qs[16]; bit j of qh is the    d · (q − 16)
         fifth bit of element j
Q5_1     0 d, 2 m, 4 qh[4], 8 qs[16]                   d · q + m
Q8_0     0 d, 2 q[32] (signed bytes)                   q · d
IQ4_NL   0 d, 2 qs[16]; codes into a table             d · table[q]
MXFP4    0 e (E8M0 exponent), 1 qs[16]; E2M1 codes     2^(e−128) · 2·E2M1[q]
=======  ============================================  =====================

Source: https://github.com/ggml-org/llama.cpp, ``ggml/src/ggml-common.h``; MXFP4: OCP Microscaling
Formats, version 1.0.
"""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Expand = Callable[[Bytes], Floats]

IQ4_NL_VALUES = np.array(
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), dtype=np.float32
)
# Twice the values of E2M1, as ggml keeps them; the scale is halved in return.
_TWICE_E2M1 = np.array((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), dtype=np.float32)


def half(blocks: Bytes, offset: int) -> Floats:
    """The float16 at ``offset`` of each block, as ``[N, 1]``."""
    data = np.ascontiguousarray(blocks[:, offset : offset + 2])
    return data.view("<f2").astype(np.float32)


def nibbles(packed: Bytes) -> Bytes:
    """Low halves of all bytes of the last axis, then their high halves."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=-1)


def _float32(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view("<f4")


def _float16(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view("<f2").astype(np.float32)


def _bfloat16(blocks: Bytes) -> Floats:
    return (np.ascontiguousarray(blocks).view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: Bytes) -> Floats:
    q = nibbles(blocks[:, 2:]).astype(np.int8) - np.int8(8)
    return half(blocks, 0) * q.astype(np.float32)


def _q4_1(blocks: Bytes) -> Floats:
    return half(blocks, 0) * nibbles(blocks[:, 4:]).astype(np.float32) + half(blocks, 2)


def five_bits(high: Bytes, packed: Bytes) -> Bytes:
    """`nibbles`, each with a fifth bit of ``high``."""
    bits = np.unpackbits(high, axis=-1, bitorder="little")
    return nibbles(packed) | (bits << np.uint8(4))


def _q5_0(blocks: Bytes) -> Floats:
    q = five_bits(blocks[:, 2:6], blocks[:, 6:]).astype(np.int8) - np.int8(16)
    return half(blocks, 0) * q.astype(np.float32)


def _q5_1(blocks: Bytes) -> Floats:
    q = five_bits(blocks[:, 4:8], blocks[:, 8:]).astype(np.float32)
    return half(blocks, 0) * q + half(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    return blocks[:, 2:].view(np.int8).astype(np.float32) * half(blocks, 0)


def _iq4_nl(blocks: Bytes) -> Floats:
    return half(blocks, 0) * IQ4_NL_VALUES[nibbles(blocks[:, 2:])]


def _mxfp4(blocks: Bytes) -> Floats:
    exponent = blocks[:, :1].astype(np.uint32)
    # Half of 2^(e−127): below e = 2 a denormal, above the exponent field less one.
    denormal = np.uint32(0x00200000) << np.minimum(exponent, 1)
    normal = (np.maximum(exponent, 1) - 1) << np.uint32(23)
    scale = np.where(exponent < 2, denormal, normal).view(np.float32)
    return scale * _TWICE_E2M1[nibbles(blocks[:, 1:])]


EXPAND: Mapping[str, Expand] = {
    "F32": _float32,
    "F16": _float16,
    "BF16": _bfloat16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "IQ4_NL": _iq4_nl,
    "MXFP4": _mxfp4,
}
"""Raw blocks to values, by the name of the format."""
