"""A mixture of experts: routing, and the experts' feed-forward networks.

Shapes: T tokens, E experts, k experts of a token, G groups of experts, D hidden size, F width.
"""

from collections.abc import Callable

import torch
from torch.nn import functional

from ridgeline.core.spec import (
    Activation,
    ClampedSwiGLU,
    GroupLimit,
    GroupScore,
    RoutingSpec,
    Scoring,
)
from ridgeline.kernels.reference.elementwise import gated, wide

_TINY = 1e-20  # keeps the sum of scores from zero, as DeepSeek-V3's own code does


def route(
    logits_TE: torch.Tensor,
    spec: RoutingSpec,
    *,
    correction_E: torch.Tensor | None = None,
    scale_E: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's experts ``[T, k]`` and their weights ``[T, k]``, in at least float32.

    ``correction_E`` is added to the scores for the choice of experts, and not to their weights,
    which ``scale_E`` multiplies.
    """
    logits = wide(logits_TE)
    scores = logits.softmax(-1) if spec.scoring is Scoring.SOFTMAX else logits.sigmoid()
    ranking = scores if correction_E is None else scores + wide(correction_E)
    if spec.groups is not None:
        ranking = ranking.masked_fill(~_in_best_groups(ranking, spec.groups), float("-inf"))
    experts_Tk = ranking.topk(spec.top_k, dim=-1).indices
    weights_Tk = scores.gather(-1, experts_Tk)
    if spec.normalised:
        weights_Tk = weights_Tk / (weights_Tk.sum(-1, keepdim=True) + _TINY)
    if scale_E is not None:
        weights_Tk = weights_Tk * wide(scale_E)[experts_Tk]
    return experts_Tk, weights_Tk * spec.scale


def run_experts(
    h_TD: torch.Tensor,
    experts_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    *,
    gate_EFD: torch.Tensor | None,
    up_EFD: torch.Tensor,
    down_EDF: torch.Tensor,
    gate_bias_EF: torch.Tensor | None = None,
    up_bias_EF: torch.Tensor | None = None,
    down_bias_ED: torch.Tensor | None = None,
    activation: Activation | ClampedSwiGLU,
    scales_inputs: bool = False,
    first_expert: int = 0,
    exchange: Callable[[torch.Tensor], torch.Tensor] = lambda outputs: outputs,
) -> torch.Tensor:
    """The weighted sum ``[T, D]`` of what each token's experts make of it; or, if
    ``scales_inputs``, the sum of what they make of its products with the weights.

    Tokens are grouped by expert, and experts that no token goes to are not read. The sum runs in
    at least float32, in the order of the experts' numbers, whatever else is in the batch. Experts
    that the stacks lack, which begin with ``first_expert``, are another's: ``exchange`` completes
    what they make of the tokens, ``[T, k, D]``.
    """
    touched = torch.unique(experts_Tk).tolist()
    outputs_TkD = h_TD.new_zeros(*experts_Tk.shape, h_TD.shape[-1])
    for chosen in touched:
        expert = chosen - first_expert
        if not 0 <= expert < len(up_EFD):
            continue
        rows, columns = (experts_Tk == chosen).nonzero(as_tuple=True)
        h = h_TD[rows]
        if scales_inputs:
            h = (wide(h) * weights_Tk[rows, columns, None]).to(h.dtype)
        gate = None
        if gate_EFD is not None:
            gate = functional.linear(h, gate_EFD[expert], _row(gate_bias_EF, expert))
        up = functional.linear(h, up_EFD[expert], _row(up_bias_EF, expert))
        inner = gated(gate, up, activation)
        result = functional.linear(inner, down_EDF[expert], _row(down_bias_ED, expert))
        outputs_TkD[rows, columns] = result
    outputs_TkD = exchange(outputs_TkD)
    out_TD = torch.zeros_like(wide(h_TD))
    for chosen in touched:
        rows, columns = (experts_Tk == chosen).nonzero(as_tuple=True)
        share = 1.0 if scales_inputs else weights_Tk[rows, columns, None]
        out_TD[rows] += wide(outputs_TkD[rows, columns]) * share
    return out_TD.to(h_TD.dtype)


def _in_best_groups(ranking_TE: torch.Tensor, limit: GroupLimit) -> torch.Tensor:
    """Which experts ``[T, E]`` belong to a token's best groups."""
    ranking_TGe = ranking_TE.view(len(ranking_TE), limit.num_groups, -1)
    best = ranking_TGe.topk(1 if limit.score is GroupScore.BEST else 2, dim=-1).values.sum(-1)
    chosen_TG = torch.zeros_like(best, dtype=torch.bool)
    chosen_TG.scatter_(-1, best.topk(limit.top_groups, dim=-1).indices, True)
    return chosen_TG.repeat_interleave(ranking_TGe.shape[-1], dim=-1)


def _row(bias: torch.Tensor | None, expert: int) -> torch.Tensor | None:
    return None if bias is None else bias[expert]
