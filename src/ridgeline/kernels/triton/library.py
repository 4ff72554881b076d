"""Products by the vendor's libraries, for large batches.

Shapes: T tokens, I inputs, O outputs.
"""

import torch
import triton
import triton.language as tl

from ridgeline.core.rounding import ceil_div
from ridgeline.kernels.triton.packing import DeviceMatrix, Format
from ridgeline.kernels.triton.weight_tiles import (
    INT4,
    expand_codes,
    load_codes,
    load_groups,
)


def matmul(
    x_TI: torch.Tensor,
    matrix: DeviceMatrix,
    out_TO: torch.Tensor,
    *,
    scratch: torch.Tensor | None = None,
    bias_O: torch.Tensor | None = None,
) -> None:
    """out = x · Wᵀ + bias by cuBLAS; a quantized matrix is first expanded into ``scratch``.

    ``scratch`` has x's type and room for the matrix.

    Raises:
        ValueError: the matrix is quantized and there is no room for it.
    """
    weight_OI = matrix.codes
    if matrix.format is not Format.PLAIN:
        rows, columns = matrix.shape
        if scratch is None or scratch.numel() < rows * columns or scratch.dtype != x_TI.dtype:
            raise ValueError(f"a matrix {list(matrix.shape)} does not fit the scratch memory")
        weight_OI = scratch.view(-1)[: rows * columns].view(rows, columns)
        dequantize(matrix, weight_OI)
    if bias_O is None:
        torch.mm(x_TI, weight_OI.t(), out=out_TO)
    else:
        torch.addmm(bias_O, x_TI, weight_OI.t(), out=out_TO)


def scaled_matmul(
    x_TI: torch.Tensor,
    x_scales_T: torch.Tensor,
    matrix: DeviceMatrix,
    out_TO: torch.Tensor,
    *,
    bias_O: torch.Tensor | None = None,
) -> None:
    """out = (x · scale) · (W · scale)ᵀ + bias of float8_e4m3fn operands, by cuBLASLt.

    x has a scale for each token and W for each row; ``out`` is bfloat16.

    Raises:
        ValueError: an operand is not float8_e4m3fn with float32 scales by rows.
    """
    scales = matrix.scales
    if scales is None or not _is_scaled_by_rows(matrix):
        raise ValueError("scaled_matmul takes float8_e4m3fn, with a float32 scale for each row")
    if x_TI.dtype != torch.float8_e4m3fn:
        raise ValueError(f"scaled_matmul takes float8_e4m3fn, not {x_TI.dtype}")
    torch._scaled_mm(
        x_TI,
        matrix.codes.t(),
        scale_a=x_scales_T[:, None],
        scale_b=scales,
        bias=bias_O,
        out_dtype=out_TO.dtype,
        out=out_TO,
    )


def multiplies_scaled(matrix: DeviceMatrix, dtype: torch.dtype) -> bool:
    """Whether `scaled_matmul` can multiply this matrix, into outputs of ``dtype``.

    cuBLASLt wants whole groups of 16 rows and columns, and scales by rows a bfloat16 output.
    """
    rows, columns = matrix.shape[-2:]
    fits = rows % 16 == columns % 16 == 0
    return _is_scaled_by_rows(matrix) and dtype == torch.bfloat16 and fits


def _is_scaled_by_rows(matrix: DeviceMatrix) -> bool:
    """Whether a matrix is what cuBLASLt takes: float8_e4m3fn with float32 scales of whole rows."""
    is_fp8 = matrix.format is Format.FP8 and matrix.group == 0
    return is_fp8 and matrix.scales is not None and matrix.scales.dtype == torch.float32


def dequantize(matrix: DeviceMatrix, out_OI: torch.Tensor) -> None:
    """Expand a quantized matrix; products in float32, rounded once."""
    rows, columns = matrix.shape
    scales, zeros = matrix.scales, matrix.zeros
    assert scales is not None
    step = min(128, matrix.unit or matrix.group or 128)
    _dequantize[(ceil_div(rows, 32), ceil_div(columns, step))](
        matrix.codes,
        scales,
        scales if zeros is None else zeros,
        out_OI,
        rows,
        columns,
        matrix.codes.stride(0),
        scales.stride(0),
        out_OI.stride(0),
        FORMAT=int(matrix.format),
        GROUP=matrix.group,
        HAS_ZEROS=zeros is not None,
        STEP=step,
        BLOCK_O=32,
        num_warps=4,
    )


@triton.jit
def _dequantize(
    codes,
    scales,
    zeros,
    out,
    num_outputs,
    num_columns,
    code_stride,
    scale_stride,
    out_stride,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    PER_CODE: tl.constexpr = 8 if FORMAT == INT4 else 1
    rows = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    valid = rows < num_outputs
    column = tl.program_id(1) * STEP
    tile = load_codes(
        codes + rows.to(tl.int64) * code_stride, valid,
        column // PER_CODE + tl.arange(0, STEP // PER_CODE), num_columns // PER_CODE, FORMAT, False,
    )  # fmt: skip
    # A whole row is a group that is longer than any.
    EACH: tl.constexpr = GROUP if GROUP > 0 else 1 << 30
    scales_OK = load_groups(scales, rows, valid, column, num_columns, scale_stride, EACH, STEP)
    zeros_OK = rows[:, None]
    if HAS_ZEROS:
        zeros_OK = load_groups(zeros, rows, valid, column, num_columns, scale_stride, EACH, STEP)
    values = expand_codes(tile, zeros_OK, FORMAT, HAS_ZEROS, tl.float32) * scales_OK.to(tl.float32)
    at = column + tl.arange(0, STEP)
    target = out + rows.to(tl.int64)[:, None] * out_stride + at[None, :]
    inside = valid[:, None] & (at < num_columns)[None, :]
    tl.store(target, values.to(out.dtype.element_ty), mask=inside)
