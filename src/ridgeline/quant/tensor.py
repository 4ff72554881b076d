"""The one form that every quantized weight takes in memory, whatever its scheme on disk.

Layout. Axes ``[..., out, in]``; leading axes are experts. ``in`` is the reduction axis. One code
per element, unpacked, in ``codes``:

===============  =================  ==================================
codes            beside them        value
===============  =================  ==================================
int8             –                  code · scale
uint8            ``zeros``          (code − zero) · scale
uint8            ``table``          table[code] · scale
float8           –                  code · scale
===============  =================  ==================================

``scales`` and ``zeros`` are ``[..., ⌈out/R⌉, ⌈in/C⌉]`` for blocks of R rows by C columns, which
``format`` gives as ``group_rows`` and ``group_size``. With ``group_of`` (act-order), column i
belongs to column ``group_of[i]`` of the scales, and not to ``i // C``.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ridgeline.core.arrays import Array, empty
from ridgeline.core.formats import NumberFormat
from ridgeline.core.rounding import ceil_div

_CHUNK_ELEMENTS = 1 << 22  # of float32 beside the result while expanding


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedTensor:
    """A quantized weight; the module's docstring says what its tensors mean.

    Attributes:
        format: bits, block shape and the sizes of scales and zero points as stored on disk.
        codes: ``[..., out, in]``, int8, uint8 or a float8 dtype.
        scales: ``[..., ⌈out/R⌉, ⌈in/C⌉]``, float32, float16 or bfloat16.
        zeros: uint8 of the same shape as ``scales``, or ``None``.
        table: float32 ``[2^bits]``, what each code stands for, or ``None``.
        group_of: int64 ``[in]``, the scales' column of each column, or ``None``.
    """

    format: NumberFormat
    codes: Array
    scales: Array
    zeros: Array | None = None
    table: Array | None = None
    group_of: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    @property
    def kind(self) -> Hashable:
        """What the tensors of a stack have in common, but for tables and the order of groups."""
        return self.format, self.codes.dtype, self.scales.dtype, self.zeros is None

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        rows, columns = self.codes.shape[-2:]
        return self.format.group_rows or rows, self.format.group_size or columns

    @property
    def num_bytes(self) -> float:
        """Bytes of the tensor as the scheme packs it, scales and zero points included."""
        return self.format.num_bytes(self.shape)

    def dequantize(self, dtype: str) -> Array:
        """The weight in ``dtype``; computed in float32 (float64 for float64) and rounded once."""
        out = empty(self.shape, dtype)
        self.dequantize_into(out)
        return out

    def dequantize_into(self, out: Array) -> None:
        """Write the weight to ``out``, of the same shape and any floating dtype, row by row."""
        rows, columns = self.codes.shape[-2:]
        if not self.codes.size:
            return
        unit = 1 if self.scales.shape[-2] == 1 else self.block[0]
        step = max(1, _CHUNK_ELEMENTS // (columns * unit)) * unit
        flat_out = out.reshape(-1, rows, columns)
        codes = self.codes.reshape(-1, rows, columns)
        scales = self.scales.reshape(-1, *self.scales.shape[-2:])
        zeros = None if self.zeros is None else self.zeros.reshape(scales.shape)
        work = np.float64 if out.dtype == np.float64 else np.float32
        for index in range(codes.shape[0]):
            for first in range(0, rows, step):
                part = slice(first, first + step)
                blocks = slice(first // unit, ceil_div(first + step, unit))
                if self.scales.shape[-2] == 1:
                    blocks = slice(0, 1)
                value = self._values(codes[index, part], work)
                if zeros is not None:
                    value -= self._spread(zeros[index, blocks].astype(work), value.shape)
                value *= self._spread(scales[index, blocks].astype(work), value.shape)
                flat_out[index, part] = value

    def rows(self, start: int, stop: int) -> "QuantizedTensor":
        """Entries ``[start, stop)`` of the first axis: rows of a matrix, or whole experts."""
        block_rows, form = self.block[0], self.format
        first, last = start, stop

        def take(blocks: Array) -> Array:
            return blocks[first:last]

        if self.codes.ndim == 2:
            if self.scales.shape[0] == 1 and block_rows > 1:
                first, last = 0, 1
            elif start % block_rows == 0:
                first, last = start // block_rows, ceil_div(stop, block_rows)
            else:  # blocks are cut: every row gets scales of its own
                form = replace(form, group_rows=1)

                def take(blocks: Array) -> Array:
                    return np.repeat(blocks, block_rows, axis=0)[start:stop]

        return replace(
            self,
            format=form,
            codes=self.codes[start:stop],
            scales=take(self.scales),
            zeros=None if self.zeros is None else take(self.zeros),
        )

    def entry(self, index: int) -> "QuantizedTensor":
        """One matrix of a stack."""
        return replace(
            self,
            codes=self.codes[index],
            scales=self.scales[index],
            zeros=None if self.zeros is None else self.zeros[index],
        )

    def every_other_row(self, first: int) -> "QuantizedTensor":
        """Rows ``first``, ``first + 2`` and so on, of each expert."""
        block_rows = self.block[0]
        if self.scales.shape[-2] == 1 and block_rows > 1:
            form, scales, zeros = self.format, self.scales, self.zeros
        else:
            form = replace(self.format, group_rows=1)
            index = np.arange(first, self.codes.shape[-2], 2) // block_rows
            scales = self.scales[..., index, :]
            zeros = None if self.zeros is None else self.zeros[..., index, :]
        codes = self.codes[..., first::2, :]
        return replace(self, format=form, codes=codes, scales=scales, zeros=zeros)

    def _values(self, codes: Array, dtype: npt.DTypeLike) -> Array:
        if self.table is None:
            return codes.astype(dtype)
        return self.table.astype(dtype)[codes]

    def _spread(self, blocks: Array, shape: tuple[int, ...]) -> Array:
        """One number per element (or broadcastable to that) from one per block."""
        block_rows, block_columns = self.block
        if self.group_of is not None:
            blocks = blocks[:, self.group_of]
        elif blocks.shape[1] > 1:
            blocks = np.repeat(blocks, block_columns, axis=1)[:, : shape[1]]
        if block_rows > 1 and blocks.shape[0] > 1:
            blocks = np.repeat(blocks, block_rows, axis=0)[: shape[0]]
        return blocks


def stack(parts: Sequence[QuantizedTensor]) -> QuantizedTensor | None:
    """Weights of one kind and shape along a new first axis; ``None`` where they differ in kind."""
    first = parts[0]
    alike = all(
        part.kind == first.kind
        and _same(part.table, first.table)
        and _same(part.group_of, first.group_of)
        for part in parts
    )
    if not alike:
        return None
    return replace(
        first,
        codes=np.stack([part.codes for part in parts]),
        scales=np.stack([part.scales for part in parts]),
        zeros=_stacked([part.zeros for part in parts]),
    )


def _same(one: Array | None, other: Array | None) -> bool:
    if one is None or other is None:
        return one is other
    return np.array_equal(one, other)


def _stacked(tensors: Sequence[Array | None]) -> Array | None:
    found = [tensor for tensor in tensors if tensor is not None]
    return np.stack(found) if found else None
