"""GGUF's ternary formats: blocks of 256 elements of −1, 0 and 1 with a scale.

Codes are the elements plus one. In TQ1_0 a byte holds five of them, or four, as a fraction of base
three: byte · 3 / 256 is the first, and what is left of the product the byte of the next. d is
float16.

======  ====================================================================  ===========
format  layout (byte offsets)                                                 value
======  ====================================================================  ===========
TQ1_0   0 qs[32] and 32 qs[16] of five codes, 48 qh[4] of four, 52 d          d · (q − 1)
TQ2_0   0 qs[64] of four codes: of each 32 bytes first all lowest bits, 64 d  d · (q − 1)
======  ====================================================================  ===========

Source: https://github.com/ggml-org/llama.cpp, ``ggml/src/ggml-common.h`` and ``ggml-quants.c``.
"""

from collections.abc import Callable, Mapping

import numpy as np

from ridgeline.quant.gguf_blocks import Bytes, Expand, Floats, half
from ridgeline.quant.gguf_k_blocks import planes

_POWERS = np.array((1, 3, 9, 27, 81), dtype=np.uint8)
_SCALES = {"TQ1_0": 52, "TQ2_0": 64}


def _fractions(packed: Bytes, count: int) -> Bytes:
    """The ``count`` codes of each byte: of all bytes the first, then the second."""
    shifted = packed[:, None] * _POWERS[:count, None]  # what is beyond a byte was taken before
    return ((shifted.astype(np.uint16) * 3) >> 8).astype(np.uint8).reshape(len(packed), -1)


def tq1_0_codes(blocks: Bytes) -> Bytes:
    """Elements plus one, ``[N, 256]``."""
    parts = (blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4)
    return np.concatenate([_fractions(part, count) for part, count in parts], axis=-1)


def tq2_0_codes(blocks: Bytes) -> Bytes:
    """Elements plus one, ``[N, 256]``; 3 is no code of a ternary number, but has a value."""
    return planes(blocks[:, :64], 32, 2)


def scale_of(name: str) -> Callable[[Bytes], Floats]:
    """The scale of each block of a format, ``[N, 1]``."""
    return lambda blocks: half(blocks, _SCALES[name])


def _expand(name: str, codes: Callable[[Bytes], Bytes]) -> Expand:
    scale = scale_of(name)
    return lambda blocks: scale(blocks) * (codes(blocks).astype(np.float32) - 1)


EXPAND: Mapping[str, Expand] = {
    "TQ1_0": _expand("TQ1_0", tq1_0_codes),
    "TQ2_0": _expand("TQ2_0", tq2_0_codes),
}
"""Raw blocks to values, by the name of the format."""
