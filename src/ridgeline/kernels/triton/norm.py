"""RMSNorm and LayerNorm, and rows as codes of eight bits."""

import torch
import triton
import triton.language as tl

from ridgeline.core.spec import NormKind, NormSpec
from ridgeline.kernels.triton.launch import next_power_of_2
from ridgeline.kernels.triton.quantized_rows import largest_code, scale_of, to_codes


def normalise(
    x_TD: torch.Tensor,
    out_TD: torch.Tensor,
    spec: NormSpec,
    *,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    """out = norm(x) · weight + bias over rows. ``out`` has x's type, and may be x."""
    num_rows, width = x_TD.shape
    block = next_power_of_2(width)
    _normalise[(num_rows,)](
        x_TD,
        out_TD,
        x_TD if weight is None else weight,
        x_TD if bias is None else bias,
        x_TD.stride(0),
        out_TD.stride(0),
        width,
        spec.eps,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        CENTRED=spec.kind is NormKind.LAYER,
        OFFSET=1.0 if spec.unit_offset else 0.0,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )


def quantize_rows(x_TD: torch.Tensor, out_TD: torch.Tensor, scales_T: torch.Tensor) -> None:
    """Codes of each row in int8 or float8_e4m3fn, and its scale (float32).

    Raises:
        ValueError: ``out`` is of another type.
    """
    num_rows, width = x_TD.shape
    block = next_power_of_2(width)
    _quantize[(num_rows,)](
        x_TD,
        out_TD,
        scales_T,
        x_TD.stride(0),
        out_TD.stride(0),
        width,
        LARGEST_CODE=largest_code(out_TD),
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )


@triton.jit
def _normalise(
    x,
    out,
    weight,
    bias,
    x_stride,
    out_stride,
    width,
    eps,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CENTRED: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        values = tl.where(inside, values - tl.sum(values, 0) / width, 0.0)
    values *= 1 / tl.sqrt(tl.sum(values * values, 0) / width + eps)
    if HAS_WEIGHT:
        values *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) + OFFSET
    if HAS_BIAS:
        values += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _quantize(
    x,
    out,
    scales,
    x_stride,
    out_stride,
    width,
    LARGEST_CODE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale = scale_of(tl.max(tl.where(inside, tl.abs(values), 0.0), 0), LARGEST_CODE)
    tl.store(scales + row, scale)
    codes = to_codes(values / scale, LARGEST_CODE, out.dtype.element_ty)
    tl.store(out + row * out_stride + columns, codes, mask=inside)
