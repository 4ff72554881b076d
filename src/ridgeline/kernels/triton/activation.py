"""Activations of feed-forward networks, and their product with the gated branch."""

import torch
import triton
import triton.language as tl

from ridgeline.core.rounding import ceil_div
from ridgeline.core.spec import Activation, ClampedSwiGLU
from ridgeline.kernels.triton.launch import next_power_of_2

CLAMPED = 4
KINDS: dict[Activation, int] = {
    Activation.SILU: 0,
    Activation.GELU: 1,
    Activation.GELU_TANH: 2,
    Activation.RELU: 3,
    Activation.RELU_SQUARED: 5,  # 4 is the clamped one
}


def kind_of(activation: Activation | ClampedSwiGLU) -> tuple[int, float, float]:
    """What a kernel is compiled with: the function's number, and the clamped one's settings."""
    if isinstance(activation, ClampedSwiGLU):
        return CLAMPED, activation.alpha, activation.limit
    return KINDS[activation], 0.0, 0.0


def activate(
    up_TF: torch.Tensor,
    out_TF: torch.Tensor,
    activation: Activation | ClampedSwiGLU,
    *,
    gate_TF: torch.Tensor | None = None,
) -> None:
    """out = act(gate) · up, or act(up) where there is no gate, in the inputs' type.

    Raises:
        ValueError: a clamped activation lacks its gate.
    """
    if gate_TF is None and isinstance(activation, ClampedSwiGLU):
        raise ValueError("the clamped activation has a gate")
    num_rows, width = up_TF.shape
    kind, alpha, limit = kind_of(activation)
    block = min(1024, next_power_of_2(width))
    _activate[(num_rows, ceil_div(width, block))](
        up_TF,
        up_TF if gate_TF is None else gate_TF,
        out_TF,
        up_TF.stride(0),
        0 if gate_TF is None else gate_TF.stride(0),
        out_TF.stride(0),
        width,
        alpha,
        limit,
        KIND=kind,
        GATED=gate_TF is not None,
        BLOCK=block,
        num_warps=max(1, block // 512),
    )


@triton.jit
def activated(x, KIND: tl.constexpr):
    """One of KINDS of x, float32."""
    if KIND == 0:
        result = x / (1 + tl.exp(-x))
    elif KIND == 1:
        result = x * 0.5 * (1 + tl.erf(x * 0.7071067811865476))
    elif KIND == 2:  # x · (1 + tanh(z)) / 2 = x · σ(2 z)
        z = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        result = x / (1 + tl.exp(-2 * z))
    else:
        result = tl.maximum(x, 0.0)
        if KIND == 5:
            result = result * result
    return result


@triton.jit
def gated(gate, up, alpha, limit, KIND: tl.constexpr):
    """act(gate) · up, or gpt-oss's clamped variant of it, float32."""
    if KIND == 4:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        result = (up + 1) * gate / (1 + tl.exp(-alpha * gate))
    else:
        result = activated(gate, KIND) * up
    return result


@triton.jit
def _activate(
    up,
    gate,
    out,
    up_stride,
    gate_stride,
    out_stride,
    width,
    alpha,
    limit,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        gates = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0)
        values = gated(gates.to(tl.float32), values, alpha, limit, KIND)
    else:
        values = activated(values, KIND)
    tl.store(out + row * out_stride + columns, values.to(out.dtype.element_ty), mask=inside)
