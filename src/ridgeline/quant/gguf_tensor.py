"""A weight in a GGUF format, as its blocks lie in the file."""

from collections.abc import Hashable
from dataclasses import dataclass, replace

import numpy as np

from ridgeline.core.arrays import Array, empty
from ridgeline.quant.gguf_blocks import Bytes
from ridgeline.quant.gguf_formats import GGUFFormat

_CHUNK_ELEMENTS = 1 << 20  # of float32 beside the result while expanding


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFBlocks:
    """Raw blocks, for executors that compute with them.

    Attributes:
        format: how a block is laid out.
        shape: of the weight, ``[..., out, in]``; blocks lie along ``in``.
        data: uint8 ``[rows, row_bytes]``, the leading axes of ``shape`` flattened into rows.
    """

    format: GGUFFormat
    shape: tuple[int, ...]
    data: Bytes

    @property
    def kind(self) -> Hashable:
        """What the tensors of a stack have in common."""
        return self.format.name

    def rows(self, start: int, stop: int) -> "GGUFBlocks":
        """Entries ``[start, stop)`` of the first axis: rows of a matrix, or whole experts."""
        per_entry = len(self.data) // max(self.shape[0], 1)
        return GGUFBlocks(
            format=self.format,
            shape=(stop - start, *self.shape[1:]),
            data=self.data[start * per_entry : stop * per_entry],
        )

    def entry(self, index: int) -> "GGUFBlocks":
        """One matrix of a stack."""
        return replace(self.rows(index, index + 1), shape=self.shape[1:])

    def dequantize(self, dtype: str) -> Array:
        """The weight in ``dtype``, rounded once from float32."""
        out = empty(self.shape, dtype)
        expand_rows(self.format, self.data, out.reshape(len(self.data), -1))
        return out


def expand_rows(fmt: GGUFFormat, data: Bytes, out_RC: Array) -> None:
    """Write the values of ``data``, uint8 ``[R, row_bytes]``, to ``out_RC`` of any float dtype."""
    rows, columns = out_RC.shape
    step = max(1, _CHUNK_ELEMENTS // max(columns, 1))
    for first in range(0, rows, step):
        values = fmt.dequantize(np.ascontiguousarray(data[first : first + step]).reshape(-1))
        out_RC[first : first + step] = values.reshape(-1, columns)
