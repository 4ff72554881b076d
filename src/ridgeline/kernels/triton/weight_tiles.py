"""Tiles of weights, in the type that they are multiplied in. Formats are `packing.Format`'s."""

import triton
import triton.language as tl

INT8 = tl.constexpr(1)
INT4 = tl.constexpr(3)
FP8 = tl.constexpr(4)


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
def expand_codes(
    codes,
    zeros_O,
    HALF: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """What codes stand for, without their scale, in DTYPE; of int4 the low or the high half."""
    if FORMAT == INT4:
        if HALF == 1:
            values = _small_integers(codes >> 4, DTYPE)
        else:
            values = _small_integers(codes & 15, DTYPE)
        if HAS_ZEROS:
            values -= _small_integers(zeros_O, DTYPE)[:, None]
        elif DTYPE == tl.float16:
            values -= 1032.0
        elif DTYPE == tl.bfloat16:
            values -= 136.0
        else:
            values -= 8.0
    else:
        values = _numbers(codes, FORMAT, DTYPE)
        if HAS_ZEROS:
            values -= zeros_O.to(DTYPE)[:, None]
    return values.to(DTYPE)


@triton.jit
def _small_integers(codes, DTYPE: tl.constexpr):
    """0 to 15 plus 1024 in float16, plus 128 in bfloat16: codes become the mantissa's low bits, and
    what is added cancels in the difference to a zero point. Conversions are the slower way."""
    if DTYPE == tl.float16:
        result = (codes.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)
    elif DTYPE == tl.bfloat16:
        result = (codes.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)
    else:
        result = codes.to(DTYPE)
    return result


@triton.jit
def _numbers(codes, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Codes of eight bits, or values, in DTYPE. These two conversions, made directly, run at a
    fraction of the rate of other instructions, so that they, and not memory, would be waited for.
    """
    if (FORMAT == INT8) and (DTYPE == tl.float16):
        offset = (codes.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint16)
        result = (offset | 0x6400).to(tl.float16, bitcast=True) - 1152.0
    elif (FORMAT == FP8) and (DTYPE == tl.bfloat16):
        result = codes.to(tl.float16).to(tl.float32)
    else:
        result = codes.to(DTYPE)
    return result
