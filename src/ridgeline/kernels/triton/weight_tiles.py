"""Tiles of weights, in the type that they are multiplied in. Formats are `packing.Format`'s."""

import triton
import triton.language as tl

INT4 = tl.constexpr(3)


@triton.jit
def load_codes(
    rows_O, rows_valid_O, columns_K, num_columns, FORMAT: tl.constexpr, EVEN: tl.constexpr
):
    """Codes ``[O, K]`` of the matrix whose rows are at ``rows_O``; zero beyond its columns.

    Without EVEN columns may lie beyond the matrix.
    """
    pointers = rows_O[:, None] + columns_K[None, :]
    inside = rows_valid_O[:, None]
    if not EVEN:
        inside = inside & (columns_K < num_columns)[None, :]
    if (FORMAT == 0) or (FORMAT == 4):
        codes = tl.load(pointers, mask=inside, other=0.0)
    else:
        codes = tl.load(pointers, mask=inside, other=0)
    return codes


@triton.jit
def load_groups(
    groups, rows_O, rows_valid_O, column, num_columns, stride, GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Scales or zero points ``[O, COLUMNS]`` of the columns from one on; zero beyond the last.

    They are read several times over, so that each thread has four bytes at least: asynchronous
    loads are of no less, and others would be waited for.
    """
    ROWS: tl.constexpr = rows_O.shape[0]
    LANES: tl.constexpr = 64 // groups.dtype.element_ty.primitive_bitwidth
    lanes = column + tl.arange(0, LANES) * (COLUMNS // LANES)
    inside = rows_valid_O[:, None] & (lanes < num_columns)[None, :]
    at = rows_O[:, None] + (lanes // GROUP)[None, :] * stride
    lanes_OL = tl.load(groups + at, mask=inside, other=0)
    columns = tl.broadcast_to(lanes_OL[:, :, None], (ROWS, LANES, COLUMNS // LANES))
    return tl.reshape(columns, (ROWS, COLUMNS))


@triton.jit
def load_factors(
    scales, zeros, row_zeros_O, rows_O, rows_valid_O, column, num_columns, stride,
    GROUP: tl.constexpr, COLUMNS: tl.constexpr, HAS_ZEROS: tl.constexpr,
):  # fmt: skip
    """Scales of the columns from one on, where they have any (else zero points), and zero points;
    those of whole rows are ``row_zeros_O``."""
    zeros_OK = row_zeros_O[:, None]
    scales_OK = zeros_OK
    if GROUP > 0:
        scales_OK = load_groups(
            scales, rows_O, rows_valid_O, column, num_columns, stride, GROUP, COLUMNS
        )
        if HAS_ZEROS:
            zeros_OK = load_groups(
                zeros, rows_O, rows_valid_O, column, num_columns, stride, GROUP, COLUMNS
            )
    return scales_OK, zeros_OK


@triton.jit
def expand_codes(
    codes_OW, zeros_OK, FORMAT: tl.constexpr, HAS_ZEROS: tl.constexpr, DTYPE: tl.constexpr
):
    """What codes stand for, without their scale, in DTYPE.

    Those of int4 are to be multiplied by `shrunk`.
    """
    if FORMAT == INT4:
        values = _unit_columns(codes_OW, 0 if HAS_ZEROS else 8, DTYPE)
        if HAS_ZEROS:
            values -= zeros_OK.to(DTYPE) * (1.0 / shrunk(FORMAT, DTYPE))
    else:
        values = numbers(codes_OW, DTYPE)
        if HAS_ZEROS:
            values -= zeros_OK.to(DTYPE)
    return values.to(DTYPE)


@triton.constexpr_function
def shrunk(FORMAT, DTYPE):
    """What `expand_codes` divides by: sums are multiplied by it, or scales are."""
    if FORMAT != INT4:
        return 1.0
    return {"bf16": 64.0, "fp16": 512.0}.get(str(DTYPE), 1.0)


@triton.jit
def _unit_columns(words_OW, MIDDLE: tl.constexpr, DTYPE: tl.constexpr):
    """Columns ``[O, 8 · W]`` of the words of a unit, less the middle or the zero point.

    In the order of `packing.pack_nibbles` no column moves between threads.
    """
    ROWS: tl.constexpr = words_OW.shape[0]
    EACH: tl.constexpr = words_OW.shape[1] // 4  # words of a thread
    low = tl.join(_pairs(words_OW, 0, MIDDLE, DTYPE), _pairs(words_OW, 1, MIDDLE, DTYPE))
    high = tl.join(_pairs(words_OW, 2, MIDDLE, DTYPE), _pairs(words_OW, 3, MIDDLE, DTYPE))
    pairs = tl.reshape(tl.join(low, high), (ROWS, 4, EACH, 2, 2, 2))
    return tl.reshape(tl.permute(pairs, (0, 5, 4, 2, 1, 3)), (ROWS, 32 * EACH))


@triton.jit
def _pairs(words, INDEX: tl.constexpr, MIDDLE: tl.constexpr, DTYPE: tl.constexpr):
    """Pairs INDEX of words as floats ``[..., 2]``.

    The bits of an integer below 256 are those of as many of the least 16-bit float. So a pair takes
    one logical operation, for two of them a shift, and one multiplication with addition, of both
    its numbers and exact, that makes numbers of normal size. Conversions are the slower way.
    """
    if INDEX >= 2:
        words = words >> 8
    if INDEX % 2 == 1:
        pairs = words & 0x00F000F0
    else:
        pairs = words & 0x000F000F
    low = pairs.to(tl.int16)
    high = (pairs >> 16).to(tl.int16)
    SHRUNK: tl.constexpr = shrunk(INT4, DTYPE)
    if SHRUNK == 1:
        low, high = low.to(DTYPE), high.to(DTYPE)
    else:
        low, high = low.to(DTYPE, bitcast=True), high.to(DTYPE, bitcast=True)
    FACTOR: tl.constexpr = _one(DTYPE) / (SHRUNK * 16 ** (INDEX % 2))
    factor = tl.full((1, 1), FACTOR, DTYPE)
    middle = tl.full((1, 1), -MIDDLE / SHRUNK, DTYPE)
    return tl.join(tl.fma(low, factor, middle), tl.fma(high, factor, middle))


@triton.constexpr_function
def _one(DTYPE):
    """How many of the least floats are 1; of float32 1, as it is converted to."""
    return {"bf16": 2.0**133, "fp16": 2.0**24}.get(str(DTYPE), 1.0)


@triton.jit
def numbers(codes, DTYPE: tl.constexpr):
    """Codes of eight bits, or values, in DTYPE. These two conversions, made directly, run at a
    fraction of the rate of other instructions, so that they, and not memory, would be waited for.
    """
    if (codes.dtype == tl.int8) and (DTYPE == tl.float16):
        offset = (codes.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint16)
        result = (offset | 0x6400).to(tl.float16, bitcast=True) - 1152.0
    elif (codes.dtype == tl.float8e4nv) and (DTYPE == tl.bfloat16):
        result = codes.to(tl.float16).to(tl.float32)
    else:
        result = codes
    return result.to(DTYPE)
