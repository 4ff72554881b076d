"""The number formats of GGUF by their number in the file: sizes, names, and how to expand them."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ridgeline.quant import gguf_blocks, gguf_k_blocks, gguf_ternary
from ridgeline.quant.gguf_blocks import Bytes, Expand, Floats

_EXPAND = {**gguf_blocks.EXPAND, **gguf_k_blocks.EXPAND, **gguf_ternary.EXPAND}


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFormat:
    """One of ``ggml_type``.

    Attributes:
        name: as llama.cpp writes it, e.g. ``Q4_K``.
        block_elements: the elements of a row that are stored together.
        block_bytes: the bytes that they take.
        expand: raw blocks ``[N, block_bytes]`` to float32 ``[N, block_elements]``; ``None`` for a
            format that Ridgeline does not read.
    """

    name: str
    block_elements: int
    block_bytes: int
    expand: Expand | None = None

    @property
    def is_plain(self) -> bool:
        """Whether elements are stored one by one, as floating-point numbers."""
        return self.block_elements == 1

    def num_bytes(self, elements: int) -> int:
        """The bytes of ``elements`` elements, a multiple of ``block_elements``."""
        return elements // self.block_elements * self.block_bytes

    def dequantize(self, data: Bytes) -> Floats:
        """The values of whole blocks, flat: uint8 ``[bytes]`` to float32 ``[elements]``.

        Bit for bit what ``gguf.quants.dequantize`` gives.
        """
        assert self.expand is not None
        with np.errstate(all="ignore"):  # scales may be NaN or infinite
            return self.expand(data.reshape(-1, self.block_bytes)).reshape(-1)


def _format(name: str, elements: int, num_bytes: int) -> GGUFFormat:
    return GGUFFormat(
        name=name, block_elements=elements, block_bytes=num_bytes, expand=_EXPAND.get(name)
    )


# Numbers and sizes: ``enum ggml_type`` and the ``block_*`` structures of ggml. Numbers that are
# absent were given up (4, 5, 31–33, 36–38) or are newer than this table.
GGUF_FORMATS: Mapping[int, GGUFFormat] = {
    0: _format("F32", 1, 4),
    1: _format("F16", 1, 2),
    2: _format("Q4_0", 32, 18),
    3: _format("Q4_1", 32, 20),
    6: _format("Q5_0", 32, 22),
    7: _format("Q5_1", 32, 24),
    8: _format("Q8_0", 32, 34),
    9: _format("Q8_1", 32, 40),
    10: _format("Q2_K", 256, 84),
    11: _format("Q3_K", 256, 110),
    12: _format("Q4_K", 256, 144),
    13: _format("Q5_K", 256, 176),
    14: _format("Q6_K", 256, 210),
    15: _format("Q8_K", 256, 292),
    16: _format("IQ2_XXS", 256, 66),
    17: _format("IQ2_XS", 256, 74),
    18: _format("IQ3_XXS", 256, 98),
    19: _format("IQ1_S", 256, 50),
    20: _format("IQ4_NL", 32, 18),
    21: _format("IQ3_S", 256, 110),
    22: _format("IQ2_S", 256, 82),
    23: _format("IQ4_XS", 256, 136),
    24: _format("I8", 1, 1),
    25: _format("I16", 1, 2),
    26: _format("I32", 1, 4),
    27: _format("I64", 1, 8),
    28: _format("F64", 1, 8),
    29: _format("IQ1_M", 256, 56),
    30: _format("BF16", 1, 2),
    34: _format("TQ1_0", 256, 54),
    35: _format("TQ2_0", 256, 66),
    39: _format("MXFP4", 32, 17),
    40: _format("NVFP4", 64, 36),
    41: _format("Q1_0", 128, 18),
}
