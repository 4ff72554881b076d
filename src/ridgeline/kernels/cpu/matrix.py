"""Packed matrices: weights in the layout that the CPU kernels stream (csrc/cpu/matrix.h)."""

import ctypes
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ridgeline.core.arrays import Array
from ridgeline.core.rounding import ceil_div, round_up
from ridgeline.kernels.cpu.memory import Allocate, aligned_bytes
from ridgeline.kernels.cpu.pool import Pool
from ridgeline.kernels.cpu.structs import RlFormat, RlMatrix

_FLOATS = {"float32": RlFormat.F32, "float16": RlFormat.F16, "bfloat16": RlFormat.BF16}
_GROUPS = (None, 16, 32, 64, 128)
_COMPARED_ELEMENTS = 1 << 18
TILE_ROWS = 16  # packed together, one tile after the other
_LARGEST_FACTOR = 16
_MOST_BITS_WITH_FACTORS = 4
_LARGEST_SCALE = 2.0**10  # in half precision; scales 2^24 times smaller are still normal


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixFormat:
    """Element format, and for quantized ones the columns that share a scale (``None``: a row).

    With factors each 32 columns of a group have a small integer that multiplies its scale.

    Raises:
        ValueError: the kernels have no groups of so many columns, or no factors beside them.
    """

    format: RlFormat
    group: int | None = None
    has_min: bool = False
    has_factors: bool = False

    def __post_init__(self) -> None:
        if self.group not in _GROUPS:
            raise ValueError(f"The CPU kernels have no groups of {self.group} columns.")
        is_plain = (self.group, self.has_min) == (128, False)
        if self.has_factors and not (is_plain and self.format.bits <= _MOST_BITS_WITH_FACTORS):
            raise ValueError("The CPU kernels have factors for 2 to 4 bits in groups of 128 alone.")

    @property
    def largest_code(self) -> int:
        """What the largest magnitude of a group is divided by, to be its scale."""
        middle = 1 << (self.format.bits - 1)
        return middle * (_LARGEST_FACTOR if self.has_factors else 1)

    def group_of(self, columns: int) -> int:
        if not self.format.is_quantized:
            return 0
        return self.group or round_up(columns, 32)


class PackedMatrix:
    """A matrix ``[rows, columns]`` and the memory that holds it."""

    def __init__(self, struct: RlMatrix, data: npt.NDArray[np.uint8]) -> None:
        assert data.ctypes.data % 64 == 0, "tiles are read as whole lines"
        self.struct = struct
        self.data = data
        struct.data = data.ctypes.data

    @property
    def shape(self) -> tuple[int, int]:
        return self.struct.rows, self.struct.columns

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes

    def matmul(self, pool: Pool, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """x ``[T, columns]`` times the transpose: ``[T, rows]``."""
        library, out = pool.library, np.empty((len(x), self.struct.rows), dtype=np.float32)
        x = np.ascontiguousarray(x, dtype=np.float32)
        size = library.rl_matmul_scratch_bytes(ctypes.byref(self.struct), len(x))
        scratch = aligned_bytes(size)
        library.rl_matmul(
            pool.handle, ctypes.byref(self.struct), None, x.ctypes.data, x.shape[1],
            out.ctypes.data, out.shape[1], len(x), scratch.ctypes.data,
        )  # fmt: skip
        return out

    def unpack(self, pool: Pool, rows: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """Some rows as floats."""
        out = np.empty((len(rows), self.struct.columns), dtype=np.float32)
        rows = np.ascontiguousarray(rows, dtype=np.int32)
        pool.library.rl_unpack_rows(
            pool.handle, ctypes.byref(self.struct), rows.ctypes.data, len(rows), out.ctypes.data
        )
        return out


def matrix_struct(rows: int, columns: int, form: MatrixFormat, multiplier: float = 1.0) -> RlMatrix:
    """The description of a matrix, without memory."""
    return RlMatrix(
        format=form.format,
        rows=rows,
        columns=columns,
        group=form.group_of(columns),
        has_min=form.has_min,
        has_factors=form.has_factors,
        multiplier=multiplier,
    )


def plain_format(dtype: str) -> MatrixFormat:
    """That of elements of a floating-point type, which no scale belongs to."""
    return MatrixFormat(format=_FLOATS[dtype])


def pack(
    pool: Pool,
    weight: Array,
    form: MatrixFormat | None = None,
    allocate: Allocate = aligned_bytes,
) -> PackedMatrix:
    """Pack a float matrix ``[rows, columns]``, in its own format unless another is given."""
    if weight.dtype.name not in _FLOATS:
        weight = weight.astype(np.float32)
    weight = np.ascontiguousarray(weight)
    form = form or plain_format(weight.dtype.name)
    rows, columns = weight.shape
    multiplier = 1.0
    if form.format.is_quantized:
        multiplier = scale_multiplier(_largest_finite(weight) / form.largest_code)
    packed = empty_matrix(pool, matrix_struct(rows, columns, form, multiplier), allocate)
    put_rows(pool, packed, 0, weight)
    return packed


def pack_codes(
    pool: Pool,
    codes: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.float32],
    mins: npt.NDArray[np.float32] | None,
    form: MatrixFormat,
    factors: npt.NDArray[np.int8] | None = None,
) -> PackedMatrix:
    """Pack codes ``[rows, columns]`` that are quantized already.

    ``scales`` and ``mins`` are ``[rows, groups]``, ``factors`` ``[rows, ⌈columns/32⌉]``. The value
    of a code is (code − 2^(bits−1)) · scale, times the factor if there are any, or code · scale +
    min.
    """
    multiplier = scale_multiplier(largest_scale(scales, mins))
    rows, columns = codes.shape
    packed = empty_matrix(pool, matrix_struct(rows, columns, form, multiplier))
    put_codes(pool, packed, 0, codes, scales, mins, factors)
    return packed


def largest_scale(scales: npt.NDArray[np.float32], mins: npt.NDArray[np.float32] | None) -> float:
    """What `scale_multiplier` takes for codes with these scales and mins; of a part, or of all."""
    largest = float(np.abs(scales).max(initial=0.0))
    return largest if mins is None else max(largest, float(np.abs(mins).max(initial=0.0)) / 16)


def _largest_finite(weight: Array) -> float:
    """The largest magnitude; what is not finite concerns its own group alone.

    Magnitudes are compared by their bits, whose order is the same, some at a time.
    """
    flat = weight.reshape(-1)
    bits = flat.view(f"u{flat.itemsize}")
    sign = bits.dtype.type(1 << (8 * flat.itemsize - 1))
    infinity = np.array(np.inf, dtype=flat.dtype).view(bits.dtype)
    largest = bits.dtype.type(0)
    for first in range(0, len(bits), _COMPARED_ELEMENTS):
        some = bits[first : first + _COMPARED_ELEMENTS] & ~sign
        most = some.max()
        if most >= infinity:
            most = some[some < infinity].max(initial=0)
        largest = max(largest, most)
    return float(largest.reshape(1).view(flat.dtype)[0])


def matrix_bytes(pool: Pool, struct: RlMatrix) -> int:
    """What the packed matrix takes."""
    size: int = pool.library.rl_matrix_bytes(ctypes.byref(struct))
    return size


def empty_matrix(pool: Pool, struct: RlMatrix, allocate: Allocate = aligned_bytes) -> PackedMatrix:
    """A packed matrix whose memory `put_rows` or `put_codes` is to fill."""
    return PackedMatrix(struct, allocate(matrix_bytes(pool, struct)))


def put_rows(pool: Pool, matrix: PackedMatrix, first_row: int, weight: Array) -> None:
    """Pack rows of floats ``[rows, columns]``, from row ``first_row`` on, which begins a tile.

    All but the last rows of the matrix come in multiples of `TILE_ROWS`.
    """
    assert first_row % TILE_ROWS == 0
    assert weight.flags.c_contiguous
    source = _FLOATS[weight.dtype.name]
    with pool.lock:  # another engine of this process may be running
        pool.library.rl_pack(
            pool.handle, ctypes.byref(matrix.struct), weight.ctypes.data, source, first_row,
            len(weight),
        )  # fmt: skip


def put_codes(
    pool: Pool,
    matrix: PackedMatrix,
    first_row: int,
    codes: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.float32],
    mins: npt.NDArray[np.float32] | None,
    factors: npt.NDArray[np.int8] | None = None,
) -> None:
    """Pack rows of codes, from row ``first_row`` on; see `pack_codes` and `put_rows`."""
    assert first_row % TILE_ROWS == 0
    assert codes.shape[1] == matrix.struct.columns
    part = RlMatrix.from_buffer_copy(matrix.struct)
    part.rows = first_row
    part.data = matrix.data.ctypes.data + matrix_bytes(pool, part)
    part.rows = len(codes)
    codes = np.ascontiguousarray(codes)
    scales = np.ascontiguousarray(scales, dtype=np.float32)
    mins = None if mins is None else np.ascontiguousarray(mins, dtype=np.float32)
    factors = None if factors is None else np.ascontiguousarray(factors, dtype=np.int8)
    assert scales.shape == (len(codes), ceil_div(part.columns, part.group))
    assert (factors is not None) == bool(part.has_factors)
    with pool.lock:
        pool.library.rl_pack_codes(
            pool.handle, ctypes.byref(part), codes.ctypes.data, scales.ctypes.data,
            None if mins is None else mins.ctypes.data,
            None if factors is None else factors.ctypes.data,
        )  # fmt: skip


def scale_multiplier(largest_scale: float) -> float:
    """The power of two that brings the largest scale to about 2^10 in half precision."""
    if not 0 < largest_scale < math.inf:
        return 1.0
    exponent = math.floor(math.log2(largest_scale / _LARGEST_SCALE))
    return 2.0 ** min(max(exponent, -126), 126)
