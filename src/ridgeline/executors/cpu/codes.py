"""Quantized weights as the codes, scales and minimums that the CPU kernels multiply with."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ridgeline.core.arrays import Array, is_float
from ridgeline.core.rounding import ceil_div
from ridgeline.executors.cpu.roles import FACTOR_COLUMNS, FACTORED, takes_factors
from ridgeline.kernels.cpu.matrix import (
    TILE_ROWS,
    MatrixFormat,
    PackedMatrix,
    empty_matrix,
    largest_scale,
    matrix_struct,
    put_codes,
    scale_multiplier,
)
from ridgeline.kernels.cpu.memory import Allocate, aligned_bytes
from ridgeline.kernels.cpu.pool import Pool
from ridgeline.kernels.cpu.structs import RlFormat
from ridgeline.quant import GGUFBlocks, QuantizedTensor
from ridgeline.quant.gguf_codes import code_layout, has_codes, split_codes, split_scales

Floats = npt.NDArray[np.float32]
Factors = npt.NDArray[np.int8]
Rows = tuple[npt.NDArray[np.uint8], Floats, Floats | None, Factors | None]

_GROUPS = (128, 64, 32, 16)  # that the kernels have beside whole rows
_FACTORS = 4  # of a scale
_LARGEST_FACTOR = 16
_HALF_UNITS = 2.0**24  # of the smallest number of float16, in one
_CHUNK_ELEMENTS = 1 << 20  # that are taken apart at once, beside the weight and what is packed


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixCodes:
    """A matrix ``shape`` of codes, taken apart some rows at a time.

    Attributes:
        largest_scale: of all rows, as `kernels.cpu.largest_scale`.
        rows: codes ``[rows, columns]``, scales and mins ``[rows, groups]`` and factors ``[rows,
            ⌈columns/32⌉]`` of a range of rows.
    """

    shape: tuple[int, int]
    form: MatrixFormat
    largest_scale: float
    rows: Callable[[slice], Rows]


def matrix_codes(weight: QuantizedTensor | GGUFBlocks) -> MatrixCodes | None:
    """The codes of a matrix ``[rows, columns]``.

    ``None`` stands for what has no such form: codes into a table, floats, columns whose groups are
    not in order (act-order) or not of 16, scales that are not finite, and codes beyond ternary
    ones.
    """
    assert len(weight.shape) == 2, "stacks come one matrix at a time"
    return _of_blocks(weight) if isinstance(weight, GGUFBlocks) else _of_tensor(weight)


def pack_matrix_codes(
    pool: Pool, matrix: MatrixCodes, allocate: Allocate = aligned_bytes
) -> PackedMatrix:
    """Pack all rows, some at a time."""
    multiplier = scale_multiplier(matrix.largest_scale)
    packed = empty_matrix(pool, matrix_struct(*matrix.shape, matrix.form, multiplier), allocate)
    for rows in row_ranges(matrix.shape):
        put_codes(pool, packed, rows.start, *matrix.rows(rows))
    return packed


def row_ranges(shape: tuple[int, int]) -> Iterator[slice]:
    """All rows of a matrix, in runs of whole tiles that are about a million elements."""
    rows, columns = shape
    step = max(1, _CHUNK_ELEMENTS // (TILE_ROWS * max(columns, 1))) * TILE_ROWS
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


def _of_tensor(weight: QuantizedTensor) -> MatrixCodes | None:
    bits = next((bits for bits in (2, 3, 4, 5, 6, 8) if weight.format.bits <= bits), None)
    if weight.table is not None or weight.group_of is not None or bits is None:
        return None
    rows, columns = weight.codes.shape
    block_rows, size = weight.block
    group = None if size >= columns else next((g for g in _GROUPS if size % g == 0), 0)
    if group == 0 or is_float(weight.codes):
        return None
    groups, repeats = (1, 1) if group is None else (ceil_div(columns, group), size // group)
    factored = factored_scales(weight, bits) if bits in FACTORED else None
    if factored is not None:
        return _with_factors(weight, bits, *factored)
    scales = _by_group(weight.scales, rows, block_rows, repeats)[:, :groups]
    middle, mins = 1 << (bits - 1), None
    if weight.zeros is not None and bool((weight.zeros != middle).any()):
        mins = -_by_group(weight.zeros, rows, block_rows, repeats)[:, :groups] * scales
    if not _is_finite(scales, mins):
        return None

    def of_rows(part: slice) -> Rows:
        codes = weight.codes[part].view(np.uint8)
        if weight.zeros is None:
            codes = codes + np.uint8(middle)  # signed ones wrap around
        return codes, scales[part], None if mins is None else mins[part], None

    return MatrixCodes(
        shape=(rows, columns),
        form=MatrixFormat(format=RlFormat.of_bits(bits), group=group, has_min=mins is not None),
        largest_scale=largest_scale(scales, mins),
        rows=of_rows,
    )


def factored_scales(weight: QuantizedTensor, bits: int) -> tuple[Floats, Factors] | None:
    """Scales of 128 columns ``[rows, ⌈columns/128⌉]`` and factors ``[rows, ⌈columns/32⌉]`` whose
    products are the weight's scales of 32 columns, which are held so in less memory.

    ``None`` where there are none, as in almost all files but those that `ridgeline quantize`
    writes. The common scale is the greatest common divisor, in units of float16's smallest number,
    of four that float16 holds; a factor is from −15 to 16.
    """
    columns = weight.codes.shape[1]
    is_plain = weight.zeros is None and weight.scales.dtype.name in ("float16", "float32")
    if weight.block != (1, FACTOR_COLUMNS) or not (is_plain and takes_factors(bits, columns)):
        return None
    units = weight.scales.astype(np.float64) * _HALF_UNITS
    whole = np.rint(units)
    if not np.isfinite(units).all() or (whole != units).any() or (abs(whole) >= 2.0**41).any():
        return None
    missing = -whole.shape[1] % _FACTORS
    wide = np.pad(whole, ((0, 0), (0, missing))).astype(np.int64).reshape(len(whole), -1, _FACTORS)
    common = np.gcd.reduce(wide, axis=-1)
    factors = wide // np.maximum(common, 1)[..., None]
    flipped = factors.min(-1) == -_LARGEST_FACTOR
    common, factors = (
        np.where(flipped, -common, common),
        np.where(flipped[..., None], -factors, factors),
    )
    if factors.min(initial=0) <= -_LARGEST_FACTOR or factors.max(initial=0) > _LARGEST_FACTOR:
        return None
    scales = (common / _HALF_UNITS).astype(np.float32)
    multiplier = np.float32(scale_multiplier(largest_scale(scales, None)))
    if ((scales / multiplier).astype(np.float16) * multiplier != scales).any():
        return None
    flat = factors.reshape(len(whole), -1)[:, : whole.shape[1]]
    return scales, np.ascontiguousarray(flat, dtype=np.int8)


def _with_factors(
    weight: QuantizedTensor, bits: int, scales: Floats, factors: Factors
) -> MatrixCodes:
    def of_rows(part: slice) -> Rows:
        codes = weight.codes[part].view(np.uint8) + np.uint8(1 << (bits - 1))  # wraps around
        return codes, scales[part], None, factors[part]

    rows, columns = weight.codes.shape
    return MatrixCodes(
        shape=(rows, columns),
        form=FACTORED[bits],
        largest_scale=largest_scale(scales, None),
        rows=of_rows,
    )


def _by_group(blocks: Array, rows: int, block_rows: int, repeats: int) -> Floats:
    """One number for each row and group of columns, from one for each block."""
    values = blocks.astype(np.float32)
    if len(values) != rows:
        values = np.repeat(values, block_rows, axis=0)[:rows]
    return np.repeat(values, repeats, axis=1)


def _of_blocks(weight: GGUFBlocks) -> MatrixCodes | None:
    layout = code_layout(weight)
    if layout is None:
        return None
    rows, columns = weight.shape
    largest, form = 0.0, None
    for part in row_ranges((rows, columns)):
        some = weight.rows(part.start, part.stop)
        scales, mins = split_scales(some, layout)
        if not (_is_finite(scales, mins) and has_codes(some, layout)):
            return None
        largest = max(largest, largest_scale(scales, mins))
        form = form or MatrixFormat(
            format=RlFormat.of_bits(layout.bits),
            group=columns // scales.shape[1],
            has_min=mins is not None,
        )
    assert form is not None, "no tensor of a GGUF file is empty"

    def of_rows(part: slice) -> Rows:
        some = weight.rows(part.start, part.stop)
        return split_codes(some, layout), *split_scales(some, layout), None

    return MatrixCodes(shape=(rows, columns), form=form, largest_scale=largest, rows=of_rows)


def _is_finite(scales: Floats, mins: Floats | None) -> bool:
    return bool(np.isfinite(scales).all() and (mins is None or np.isfinite(mins).all()))
