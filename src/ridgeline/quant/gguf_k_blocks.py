"""GGUF's K formats: super-blocks of 256 elements whose groups have quantized scales.

Every function in `EXPAND` takes raw blocks, uint8 ``[N, block_bytes]``, and gives float32
``[N, 256]``, bit for bit as ``gguf.quants`` does. d and dmin are float16.

======  ======  =====================================================  =================
format  groups  layout (byte offsets)                                  value
======  ======  =====================================================  =================
Q2_K    16×16   0 sc[16] (low half scale, high half min), 16 qs[64],   d·sc·q − dmin·m
                80 d, 82 dmin
Q3_K    16×16   0 hmask[32], 32 qs[64], 96 sc[12] (6 bits), 108 d      d·(sc−32)·(q−4·¬h)
Q4_K    8×32    0 d, 2 dmin, 4 sc[12] (6 bits), 16 qs[128]             d·sc·q − dmin·m
Q5_K    8×32    0 d, 2 dmin, 4 sc[12], 16 qh[32], 48 qs[128]           d·sc·q − dmin·m
Q6_K    16×16   0 ql[128], 128 qh[64], 192 sc[16] (signed), 208 d      d·sc·(q − 32)
IQ4_XS  8×32    0 d, 2 sc_h (uint16, 2 bits), 4 sc_l[4] (4 bits),      d·(sc−32)·table[q]
                8 qs[128] (16 bytes for each group, as IQ4_NL)
======  ======  =====================================================  =================

Source: https://github.com/ggml-org/llama.cpp, ``ggml/src/ggml-common.h`` and ``ggml-quants.c``.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ridgeline.quant.gguf_blocks import IQ4_NL_VALUES, Bytes, Expand, Floats, half

BLOCK_ELEMENTS = 256


def planes(packed: Bytes, width: int, bits: int) -> Bytes:
    """Fields of ``bits`` bits: of each run of ``width`` bytes first all lowest fields, and so on.

    ``[N, B]`` gives ``[N, B · 8 / bits]``.
    """
    count = len(packed)
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(1, 1, -1, 1)
    fields = packed.reshape(count, -1, 1, width) >> shifts
    return (fields & np.uint8((1 << bits) - 1)).reshape(count, -1)


def scales_and_mins(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Eight 6-bit scales and eight 6-bit minima out of 12 bytes.

    Bytes 0–3 hold scales 0–3, bytes 4–7 minima 0–3, each in the low six bits; bytes 8–11 hold the
    low four bits of scales 4–7 and, in their high halves, of minima 4–7, whose upper two bits are
    the top bits of bytes 0–3 and 4–7.
    """
    scale, minimum, low = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = [scale & 0x3F, (low & 0x0F) | ((scale >> 2) & 0x30)]
    minima = [minimum & 0x3F, (low >> 4) | ((minimum >> 2) & 0x30)]
    return np.concatenate(scales, axis=-1), np.concatenate(minima, axis=-1)


def _grouped(values: npt.NDArray[np.generic], groups: int) -> Floats:
    return values.reshape(len(values), groups, -1).astype(np.float32)


def _scaled(d: Floats, scales: npt.NDArray[np.generic]) -> Floats:
    """A factor for each group, ``[N, groups, 1]``."""
    factors: Floats = d * scales.astype(np.float32)
    return factors[:, :, None]


def _flat(values: Floats) -> Floats:
    return values.reshape(len(values), BLOCK_ELEMENTS)


def _q2_k(blocks: Bytes) -> Floats:
    scales = blocks[:, :16]
    factor = _scaled(half(blocks, 80), scales & 0x0F)
    offset = _scaled(half(blocks, 82), scales >> 4)
    q = _grouped(planes(blocks[:, 16:80], 32, 2), 16)
    return _flat(factor * q - offset)


def _q3_k(blocks: Bytes) -> Floats:
    packed = blocks[:, 96:108]
    low = planes(packed[:, :8], 8, 4)
    high = planes(packed[:, 8:], 4, 2)
    scales = (low | (high << np.uint8(4))).astype(np.int8) - np.int8(32)
    q = planes(blocks[:, 32:96], 32, 2).astype(np.int8)
    missing = planes(blocks[:, :32], 32, 1) ^ np.uint8(1)
    q -= (missing << np.uint8(2)).astype(np.int8)
    return _flat(_scaled(half(blocks, 108), scales) * _grouped(q, 16))


def _q4_k(blocks: Bytes) -> Floats:
    scales, minima = scales_and_mins(blocks[:, 4:16])
    factor, offset = _scaled(half(blocks, 0), scales), _scaled(half(blocks, 2), minima)
    q = _grouped(planes(blocks[:, 16:], 32, 4), 8)
    return _flat(factor * q - offset)


def _q5_k(blocks: Bytes) -> Floats:
    scales, minima = scales_and_mins(blocks[:, 4:16])
    factor, offset = _scaled(half(blocks, 0), scales), _scaled(half(blocks, 2), minima)
    low, high = planes(blocks[:, 48:], 32, 4), planes(blocks[:, 16:48], 32, 1)
    q = _grouped(low | (high << np.uint8(4)), 8)
    return _flat(factor * q - offset)


def _q6_k(blocks: Bytes) -> Floats:
    factor = _scaled(half(blocks, 208), blocks[:, 192:208].view(np.int8))
    low, high = planes(blocks[:, :128], 64, 4), planes(blocks[:, 128:192], 32, 2)
    q = (low | (high << np.uint8(4))).astype(np.int8) - np.int8(32)
    return _flat(factor * _grouped(q, 16))


def _iq4_xs(blocks: Bytes) -> Floats:
    low = planes(blocks[:, 4:8], 1, 4)
    high = planes(blocks[:, 2:4], 1, 2)
    scales = (low | (high << np.uint8(4))).astype(np.int8) - np.int8(32)
    values = IQ4_NL_VALUES[planes(blocks[:, 8:], 16, 4)]
    return _flat(_scaled(half(blocks, 0), scales) * _grouped(values, 8))


EXPAND: Mapping[str, Expand] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_XS": _iq4_xs,
}
"""Raw blocks to values, by the name of the format."""
