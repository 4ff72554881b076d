"""Codes and scales into GGUF's blocks: the inverse of `gguf_codes`, layout by layout.

Every function takes codes ``[N, block_elements]``, int8 as the value's formula in `gguf_blocks` and
`gguf_k_blocks` has them (q less its middle), and a `Fit`, and gives uint8 ``[N, block_bytes]``.
"""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from ridgeline.quant.gguf_blocks import Bytes
from ridgeline.quant.gguf_search import Fit

Codes = npt.NDArray[np.int8]
Pack = Callable[[Codes, Fit], Bytes]


def join_planes(fields: Bytes, width: int, bits: int) -> Bytes:
    """The inverse of `gguf_k_blocks.planes`: ``[N, B · 8 / bits]`` gives ``[N, B]``."""
    count = len(fields)
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(1, 1, -1, 1)
    shifted = fields.reshape(count, -1, 8 // bits, width) << shifts
    joined: Bytes = np.bitwise_or.reduce(shifted, axis=2)
    return joined.reshape(count, -1)


def join_scales_and_mins(scales: Bytes, mins: Bytes) -> Bytes:
    """The inverse of `gguf_k_blocks.scales_and_mins`: 6-bit ``[N, 8]`` each give ``[N, 12]``."""
    first = scales[:, :4] | ((scales[:, 4:] & 0x30) << 2)
    second = mins[:, :4] | ((mins[:, 4:] & 0x30) << 2)
    third = (scales[:, 4:] & 0x0F) | ((mins[:, 4:] & 0x0F) << 4)
    return np.concatenate([first, second, third], axis=-1)


def _half(values: npt.NDArray[np.float16]) -> Bytes:
    return np.ascontiguousarray(values, "<f2").view(np.uint8).reshape(len(values), 2)


def _rows(values: npt.NDArray[np.int16] | None) -> npt.NDArray[np.int16]:
    """Integers ``[S, N]`` as ``[N, S]``."""
    assert values is not None
    return np.ascontiguousarray(values.T)


def _offset(codes: Codes, middle: int) -> Bytes:
    return (codes + np.int8(middle)).view(np.uint8)


def _split(q: Bytes, bits: int) -> tuple[Bytes, Bytes]:
    """The lowest ``bits`` bits, and those above them."""
    return q & np.uint8((1 << bits) - 1), q >> np.uint8(bits)


def _in_halves(q: Bytes) -> Bytes:
    """Elements j and j + 16 of 32 in one byte."""
    return q[:, :16] | (q[:, 16:] << np.uint8(4))


def _minimum(fit: Fit) -> Bytes:
    assert fit.d_min is not None
    return _half(fit.d_min)


def _lowest(fit: Fit) -> Bytes:
    """m, which is added."""
    assert fit.d_min is not None
    return _half(-fit.d_min)


def _q4_0(codes: Codes, fit: Fit) -> Bytes:
    q = _offset(codes, 8)
    return np.concatenate([_half(fit.d), _in_halves(q)], axis=1)


def _q4_1(codes: Codes, fit: Fit) -> Bytes:
    q = codes.view(np.uint8)
    return np.concatenate([_half(fit.d), _lowest(fit), _in_halves(q)], axis=1)


def _five_bits(q: Bytes) -> list[Bytes]:
    """The inverse of `gguf_blocks.five_bits`."""
    low, high = _split(q, 4)
    return [np.packbits(high, axis=-1, bitorder="little"), _in_halves(low)]


def _q5_0(codes: Codes, fit: Fit) -> Bytes:
    return np.concatenate([_half(fit.d), *_five_bits(_offset(codes, 16))], axis=1)


def _q5_1(codes: Codes, fit: Fit) -> Bytes:
    parts = _five_bits(codes.view(np.uint8))
    return np.concatenate([_half(fit.d), _lowest(fit), *parts], axis=1)


def _q8_0(codes: Codes, fit: Fit) -> Bytes:
    return np.concatenate([_half(fit.d), codes.view(np.uint8)], axis=1)


def _q2_k(codes: Codes, fit: Fit) -> Bytes:
    scales = (_rows(fit.scales) | (_rows(fit.mins) << 4)).astype(np.uint8)
    q = join_planes(codes.view(np.uint8), 32, 2)
    return np.concatenate([scales, q, _half(fit.d), _minimum(fit)], axis=1)


def _q3_k(codes: Codes, fit: Fit) -> Bytes:
    low, high = _split(_offset(codes, 4), 2)
    scales_low, scales_high = _split((_rows(fit.scales) + 32).astype(np.uint8), 4)
    packed = [join_planes(scales_low, 8, 4), join_planes(scales_high, 4, 2)]
    planes = [join_planes(high, 32, 1), join_planes(low, 32, 2)]
    return np.concatenate([*planes, *packed, _half(fit.d)], axis=1)


def _scales_in_front(fit: Fit) -> list[Bytes]:
    scales, mins = (_rows(part).astype(np.uint8) for part in (fit.scales, fit.mins))
    return [_half(fit.d), _minimum(fit), join_scales_and_mins(scales, mins)]


def _q4_k(codes: Codes, fit: Fit) -> Bytes:
    q = join_planes(codes.view(np.uint8), 32, 4)
    return np.concatenate([*_scales_in_front(fit), q], axis=1)


def _q5_k(codes: Codes, fit: Fit) -> Bytes:
    low, high = _split(codes.view(np.uint8), 4)
    planes = [join_planes(high, 32, 1), join_planes(low, 32, 4)]
    return np.concatenate([*_scales_in_front(fit), *planes], axis=1)


def _q6_k(codes: Codes, fit: Fit) -> Bytes:
    low, high = _split(_offset(codes, 32), 4)
    planes = [join_planes(low, 64, 4), join_planes(high, 32, 2)]
    scales = _rows(fit.scales).astype(np.int8).view(np.uint8)
    return np.concatenate([*planes, scales, _half(fit.d)], axis=1)


PACK: Mapping[str, Pack] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
"""By the name of the format."""
