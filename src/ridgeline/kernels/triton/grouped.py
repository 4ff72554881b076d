"""Products of tokens with the matrices of their experts.

Shapes: T tokens, P = T · k pairs (token, expert), E experts, I inputs, O outputs, D hidden size.
"""

import torch
import triton
import triton.language as tl

from ridgeline.core.rounding import ceil_div
from ridgeline.core.spec import Activation, ClampedSwiGLU
from ridgeline.kernels.triton.launch import next_power_of_2
from ridgeline.kernels.triton.linear import LinearConfig, guess, launch
from ridgeline.kernels.triton.packing import DeviceMatrix
from ridgeline.kernels.triton.routing import ExpertOrder


def grouped_linear(
    x: torch.Tensor,
    matrix: DeviceMatrix,
    out_PO: torch.Tensor,
    order: ExpertOrder,
    *,
    pairs_per_row: int,
    bias_EO: torch.Tensor | None = None,
    activation: Activation | ClampedSwiGLU | None = None,
    weights_P: torch.Tensor | None = None,
    config: LinearConfig | None = None,
) -> None:
    """out[p] = act(x[p // pairs_per_row] · W_eᵀ + bias_e) · weights[p], e the expert of pair p.

    ``matrix`` is a stack ``[E, O, I]``; with an activation, which is gated, its rows are the gate's
    and then the other branch's, and ``out`` has half as many columns. Only experts with pairs are
    read, once for each block of their pairs.

    Raises:
        ValueError: shapes do not fit.
    """
    num_experts, rows, columns = matrix.shape
    num_outputs = rows // 2 if activation is not None else rows
    if x.shape != (order.num_pairs // pairs_per_row, columns) or num_experts != order.num_experts:
        raise ValueError(f"x {list(x.shape)} does not fit experts {list(matrix.shape)}")
    if out_PO.shape != (order.num_pairs, num_outputs):
        raise ValueError(f"out {list(out_PO.shape)} is not [{order.num_pairs}, {num_outputs}]")
    block_t = order.block_pairs
    chosen = config or guess(matrix, block_t, num_outputs, x, block_t=block_t)
    launch(
        (ceil_div(num_outputs, chosen.block_o), order.most_blocks, 1),
        (x, matrix, out_PO),
        chosen,
        block_t=block_t,
        num_tokens=order.num_pairs,
        columns_each=columns,
        bias=bias_EO,
        activation=activation,
        gated_pair=activation is not None,
        pairs=(order.pairs, order.block_experts, order.num_blocks),
        pairs_per_row=pairs_per_row,
        pair_weights=weights_P,
    )


def combine(pairs_TkD: torch.Tensor, out_TD: torch.Tensor) -> None:
    """out = Σ over a token's pairs, in order and in float32."""
    num_tokens, top_k, width = pairs_TkD.shape
    block = min(1024, next_power_of_2(width))
    _combine[(num_tokens, ceil_div(width, block))](
        pairs_TkD,
        out_TD,
        pairs_TkD.stride(0),
        pairs_TkD.stride(1),
        out_TD.stride(0),
        width,
        TOP_K=top_k,
        BLOCK=block,
        num_warps=4,
    )


@triton.jit
def _combine(
    pairs,
    out,
    token_stride,
    pair_stride,
    out_stride,
    width,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    for pair in tl.static_range(TOP_K):
        at = pairs + token * token_stride + pair * pair_stride + columns
        total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * out_stride + columns, total.to(out.dtype.element_ty), mask=inside)
