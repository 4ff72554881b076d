"""The two ops of a mixture of experts that have weights."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from ridgeline.core import ops
from ridgeline.core.arrays import Array
from ridgeline.kernels import reference as kernels
from ridgeline.kernels.tensors import as_array, as_tensor

if TYPE_CHECKING:
    from ridgeline.kernels.cpu.group import RankGroup


def run_moe(
    op: ops.MoE,
    x_TD: torch.Tensor,
    weight: Callable[[ops.Weight], torch.Tensor],
    group: "RankGroup | None",
    router_TD: torch.Tensor,
) -> tuple[torch.Tensor, Array]:
    """``[T, D]``: each token through its experts, which a router chooses by ``router_TD``; and how
    many went to each, ``[E]``."""

    def optional(ref: ops.Weight | None) -> torch.Tensor | None:
        return None if ref is None else weight(ref)

    # The router decides in full precision: a choice that rounding tips is another function.
    bias = optional(op.router_bias)
    logits_TE = functional.linear(
        kernels.wide(router_TD),
        kernels.wide(weight(op.router)),
        None if bias is None else kernels.wide(bias),
    )
    experts_Tk, weights_Tk = kernels.route(
        logits_TE,
        op.routing,
        correction_E=optional(op.correction_bias),
        scale_E=optional(op.expert_scale),
    )
    parts: dict[str, Any] = {}
    if op.borders:
        assert group is not None
        parts = {
            "first_expert": op.borders[op.rank],
            "exchange": partial(_exchanged, op, experts_Tk, group),
        }
    out_TD = kernels.run_experts(
        x_TD,
        experts_Tk,
        weights_Tk,
        gate_EFD=optional(op.gate),
        up_EFD=weight(op.up),
        down_EDF=weight(op.down),
        gate_bias_EF=optional(op.gate_bias),
        up_bias_EF=optional(op.up_bias),
        down_bias_ED=optional(op.down_bias),
        activation=op.activation,
        scales_inputs=op.routing.scales_inputs,
        **parts,
    )
    counts_E = torch.bincount(experts_Tk.flatten(), minlength=op.router.shape[0])
    return out_TD, as_array(counts_E)


def _exchanged(
    op: ops.MoE, experts_Tk: torch.Tensor, group: "RankGroup", outputs_TkD: torch.Tensor
) -> torch.Tensor:
    """What each expert made of each token, from the ranks that have them."""
    owners = torch.bucketize(experts_Tk.flatten(), torch.tensor(op.borders[1:-1]), right=True)
    rows = group.gather_rows(as_array(outputs_TkD.flatten(0, 1)), owners.int().numpy())
    return as_tensor(rows).view_as(outputs_TkD)


def run_shared(
    op: ops.SharedExpert, x_TD: torch.Tensor, weight: Callable[[ops.Weight], torch.Tensor]
) -> torch.Tensor:
    """``[T, D]``: all tokens through the shared expert."""
    gate = None if op.gate is None else functional.linear(x_TD, weight(op.gate))
    up = functional.linear(x_TD, weight(op.up))
    out = functional.linear(kernels.gated(gate, up, op.activation), weight(op.down))
    if op.output_gate is None:
        return out
    return out * torch.sigmoid(functional.linear(x_TD, weight(op.output_gate)))
