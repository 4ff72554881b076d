"""GGUF's blocks taken apart, for kernels that multiply with codes rather than values.

Every function in `_SPLIT` takes raw blocks, uint8 ``[N, block_bytes]``, and gives codes
``[N, block_elements]``, scales ``[N, groups]`` and mins of that shape or ``None``. A value is
scale · code + min, or scale · (code − 2^(bits−1)). The layouts are in `gguf_blocks` and
`gguf_k_blocks`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ridgeline.quant.gguf_blocks import Bytes, Floats, five_bits, half, nibbles
from ridgeline.quant.gguf_k_blocks import planes, scales_and_mins
from ridgeline.quant.gguf_tensor import GGUFBlocks

_CHUNK_ELEMENTS = 1 << 20
_Parts = tuple[Bytes, Floats, Floats | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFCodes:
    """Rows taken apart: codes ``[rows, columns]``, scales and mins ``[rows, groups]``."""

    bits: int
    codes: Bytes
    scales: Floats
    mins: Floats | None


def split_blocks(weight: GGUFBlocks) -> GGUFCodes | None:
    """All rows of a weight, leading axes flattened; ``None`` if its codes index a table."""
    found = _SPLIT.get(weight.format.name)
    if found is None:
        return None
    bits, split = found
    rows, columns = len(weight.data), weight.shape[-1]
    codes = np.empty((rows, columns), dtype=np.uint8)
    scales, mins = [], []
    step = max(1, _CHUNK_ELEMENTS // columns)
    with np.errstate(all="ignore"):  # scales may be NaN or infinite
        for first in range(0, rows, step):
            data = np.ascontiguousarray(weight.data[first : first + step])
            part, scale, minimum = split(data.reshape(-1, weight.format.block_bytes))
            codes[first : first + step] = part.reshape(-1, columns)
            scales.append(scale.reshape(len(data), -1))
            if minimum is not None:
                mins.append(minimum.reshape(len(data), -1))
    return GGUFCodes(
        bits=bits,
        codes=codes,
        scales=np.concatenate(scales),
        mins=np.concatenate(mins) if mins else None,
    )


def _q4_0(blocks: Bytes) -> _Parts:
    return nibbles(blocks[:, 2:]), half(blocks, 0), None


def _q4_1(blocks: Bytes) -> _Parts:
    return nibbles(blocks[:, 4:]), half(blocks, 0), half(blocks, 2)


def _q5_0(blocks: Bytes) -> _Parts:
    return five_bits(blocks[:, 2:6], blocks[:, 6:]), half(blocks, 0), None


def _q5_1(blocks: Bytes) -> _Parts:
    return five_bits(blocks[:, 4:8], blocks[:, 8:]), half(blocks, 0), half(blocks, 2)


def _q8_0(blocks: Bytes) -> _Parts:
    return blocks[:, 2:] ^ np.uint8(0x80), half(blocks, 0), None


def _q2_k(blocks: Bytes) -> _Parts:
    scales = blocks[:, :16]
    codes = planes(blocks[:, 16:80], 32, 2)
    return codes, half(blocks, 80) * (scales & 0x0F), half(blocks, 82) * -(scales >> 4).astype("f4")


def _q3_k(blocks: Bytes) -> _Parts:
    packed = blocks[:, 96:108]
    scales = planes(packed[:, :8], 8, 4) | (planes(packed[:, 8:], 4, 2) << np.uint8(4))
    codes = planes(blocks[:, 32:96], 32, 2) | (planes(blocks[:, :32], 32, 1) << np.uint8(2))
    # Of three bits, from 0 for −4; as codes of four bits, whose middle is 8.
    return codes + np.uint8(4), half(blocks, 108) * (scales.astype("f4") - 32), None


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    scales, minima = scales_and_mins(blocks[:, 4:16])
    return half(blocks, 0) * scales, half(blocks, 2) * -minima.astype("f4")


def _q4_k(blocks: Bytes) -> _Parts:
    return planes(blocks[:, 16:], 32, 4), *_k_scales(blocks)


def _q5_k(blocks: Bytes) -> _Parts:
    low, high = planes(blocks[:, 48:], 32, 4), planes(blocks[:, 16:48], 32, 1)
    return low | (high << np.uint8(4)), *_k_scales(blocks)


def _q6_k(blocks: Bytes) -> _Parts:
    low, high = planes(blocks[:, :128], 64, 4), planes(blocks[:, 128:192], 32, 2)
    scales = half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    return low | (high << np.uint8(4)), scales, None


_SPLIT: Mapping[str, tuple[int, Callable[[Bytes], _Parts]]] = {
    "Q4_0": (4, _q4_0),
    "Q4_1": (4, _q4_1),
    "Q5_0": (5, _q5_0),
    "Q5_1": (5, _q5_1),
    "Q8_0": (8, _q8_0),
    "Q2_K": (4, _q2_k),
    "Q3_K": (4, _q3_k),
    "Q4_K": (4, _q4_k),
    "Q5_K": (5, _q5_k),
    "Q6_K": (6, _q6_k),
}
