"""GGUF's blocks taken apart, for kernels that multiply with codes rather than values.

A layout takes raw blocks, uint8 ``[N, block_bytes]``. Its ``codes`` are ``[N, block_elements]``,
its ``scales`` ``[N, groups]`` and mins of that shape or ``None``. A value is scale · code + min, or
scale · (code − 2^(bits−1)). The layouts are in `gguf_blocks`, `gguf_k_blocks` and
`gguf_ternary`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ridgeline.quant.gguf_blocks import Bytes, Floats, five_bits, half, nibbles
from ridgeline.quant.gguf_k_blocks import planes, scales_and_mins
from ridgeline.quant.gguf_tensor import GGUFBlocks
from ridgeline.quant.gguf_ternary import scale_of, tq1_0_codes, tq2_0_codes

_CHUNK_ELEMENTS = 1 << 20
_Scales = tuple[Floats, Floats | None]


@dataclass(frozen=True, slots=True)
class GGUFLayout:
    """How to take blocks of one format apart; the module's docstring says what the parts are."""

    bits: int
    codes: Callable[[Bytes], Bytes]
    scales: Callable[[Bytes], _Scales]
    most: int = 255  # that a code may be


def code_layout(weight: GGUFBlocks) -> GGUFLayout | None:
    """How the weight's blocks are taken apart; ``None`` if its codes index a table."""
    return _LAYOUTS.get(weight.format.name)


def split_codes(weight: GGUFBlocks, layout: GGUFLayout) -> Bytes:
    """The codes of all rows, uint8 ``[rows, columns]``, leading axes flattened."""
    rows, columns = len(weight.data), weight.shape[-1]
    codes = np.empty((rows, columns), dtype=np.uint8)
    step = max(1, _CHUNK_ELEMENTS // columns)
    for first in range(0, rows, step):
        some = slice(first, first + step)
        codes[some] = layout.codes(_blocks(weight, some)).reshape(-1, columns)
    return codes


def split_scales(weight: GGUFBlocks, layout: GGUFLayout) -> _Scales:
    """The scales and mins of all rows, ``[rows, groups]``, leading axes flattened."""
    rows = len(weight.data)
    with np.errstate(all="ignore"):  # scales may be NaN or infinite
        scales, mins = layout.scales(_blocks(weight, slice(0, rows)))
    return scales.reshape(rows, -1), None if mins is None else mins.reshape(rows, -1)


def has_codes(weight: GGUFBlocks, layout: GGUFLayout) -> bool:
    """Whether all codes are such as the layout is for."""
    return layout.most == 255 or int(split_codes(weight, layout).max(initial=0)) <= layout.most


def _blocks(weight: GGUFBlocks, rows: slice) -> Bytes:
    return np.ascontiguousarray(weight.data[rows]).reshape(-1, weight.format.block_bytes)


def _d(blocks: Bytes) -> _Scales:
    return half(blocks, 0), None


def _d_and_min(blocks: Bytes) -> _Scales:
    return half(blocks, 0), half(blocks, 2)


def _q2_k_scales(blocks: Bytes) -> _Scales:
    scales = blocks[:, :16]
    return half(blocks, 80) * (scales & 0x0F), half(blocks, 82) * -(scales >> 4).astype("f4")


def _q3_k_codes(blocks: Bytes) -> Bytes:
    return planes(blocks[:, 32:96], 32, 2) | (planes(blocks[:, :32], 32, 1) << np.uint8(2))


def _q3_k_scales(blocks: Bytes) -> _Scales:
    packed = blocks[:, 96:108]
    scales = planes(packed[:, :8], 8, 4) | (planes(packed[:, 8:], 4, 2) << np.uint8(4))
    return half(blocks, 108) * (scales.astype("f4") - 32), None


def _k_scales(blocks: Bytes) -> _Scales:
    scales, minima = scales_and_mins(blocks[:, 4:16])
    return half(blocks, 0) * scales, half(blocks, 2) * -minima.astype("f4")


def _q5_k_codes(blocks: Bytes) -> Bytes:
    low, high = planes(blocks[:, 48:], 32, 4), planes(blocks[:, 16:48], 32, 1)
    return low | (high << np.uint8(4))


def _q6_k_codes(blocks: Bytes) -> Bytes:
    low, high = planes(blocks[:, :128], 64, 4), planes(blocks[:, 128:192], 32, 2)
    return low | (high << np.uint8(4))


def _q6_k_scales(blocks: Bytes) -> _Scales:
    return half(blocks, 208) * blocks[:, 192:208].view(np.int8), None


def _ternary(name: str, codes: Callable[[Bytes], Bytes]) -> GGUFLayout:
    """Codes of two bits, whose middle is 2; a scale of 256 as two of 128, which kernels have."""
    scale = scale_of(name)
    return GGUFLayout(
        2,
        lambda blocks: codes(blocks) + np.uint8(1),
        lambda blocks: (np.repeat(scale(blocks), 2, axis=1), None),
        most=3,
    )


_LAYOUTS: Mapping[str, GGUFLayout] = {
    "Q4_0": GGUFLayout(4, lambda blocks: nibbles(blocks[:, 2:]), _d),
    "Q4_1": GGUFLayout(4, lambda blocks: nibbles(blocks[:, 4:]), _d_and_min),
    "Q5_0": GGUFLayout(5, lambda blocks: five_bits(blocks[:, 2:6], blocks[:, 6:]), _d),
    "Q5_1": GGUFLayout(5, lambda blocks: five_bits(blocks[:, 4:8], blocks[:, 8:]), _d_and_min),
    "Q8_0": GGUFLayout(8, lambda blocks: blocks[:, 2:] ^ np.uint8(0x80), _d),
    "Q2_K": GGUFLayout(2, lambda blocks: planes(blocks[:, 16:80], 32, 2), _q2_k_scales),
    "Q3_K": GGUFLayout(3, _q3_k_codes, _q3_k_scales),
    "Q4_K": GGUFLayout(4, lambda blocks: planes(blocks[:, 16:], 32, 4), _k_scales),
    "Q5_K": GGUFLayout(5, _q5_k_codes, _k_scales),
    "Q6_K": GGUFLayout(6, _q6_k_codes, _q6_k_scales),
    "TQ1_0": _ternary("TQ1_0", tq1_0_codes),
    "TQ2_0": _ternary("TQ2_0", tq2_0_codes),
}
