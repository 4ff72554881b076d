"""Rounding a row to eight bits with one scale, for the ends of kernels that write rows."""

import torch
import triton
import triton.language as tl

from ridgeline.kernels.triton.kv_cache import QUANTIZED


@triton.jit
def scale_of(largest, LARGEST_CODE: tl.constexpr):
    """The scale at which the largest magnitude has the largest code; 1 for a row of zeros."""
    return tl.where(largest > 0, largest / LARGEST_CODE, 1.0)


@triton.jit
def to_codes(values, LARGEST_CODE: tl.constexpr, DTYPE: tl.constexpr):
    """Codes in DTYPE of values that are divided by their scale; int8 rounds half up."""
    values = tl.minimum(tl.maximum(values, -LARGEST_CODE), LARGEST_CODE)
    if DTYPE == tl.int8:
        values = tl.floor(values + 0.5)
    return values.to(DTYPE)


def largest_code(out: torch.Tensor) -> float:
    """The largest code of ``out``.

    Raises:
        ValueError: it is not int8 or float8_e4m3fn.
    """
    if out.dtype not in QUANTIZED:
        raise ValueError(f"{out.dtype} is not int8 or float8_e4m3fn")
    return QUANTIZED[out.dtype]
