"""The classical verification of drafts: rejection sampling (Leviathan et al., Chen et al. 2023).

A draft x, drawn from q, is accepted with probability min(1, p(x) / q(x)); if it is rejected, the
token is drawn from the distribution proportional to max(p − q, 0). The token is then distributed as
p. Unlike the rule of `verification`, it is not the token that a run without drafts would draw.
"""

import torch


def accept_or_redraw(
    p_NV: torch.Tensor,
    q_NV: torch.Tensor,
    drafts_N: torch.Tensor,
    uniform_N: torch.Tensor,
    gumbel_NV: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens ``[N]`` and which of them are the accepted drafts.

    ``p_NV`` and ``q_NV`` are the target's and the drafter's probabilities as they are sampled
    (after penalties, temperature, truncation and mask); a drafter without a distribution has a one
    at its draft. ``uniform_N`` in (0, 1) and the standard Gumbel noise ``gumbel_NV`` must be
    independent of what the drafts were drawn with. Rows whose draft has no probability under q
    cannot occur.
    """
    rows = torch.arange(len(drafts_N))
    accepted = uniform_N * q_NV[rows, drafts_N] < p_NV[rows, drafts_N]
    residual = (p_NV - q_NV).clamp_min(0.0)
    # Where p equals q there is no residual, and nothing is rejected but by rounding.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_NV)
    redrawn = (residual.log() + gumbel_NV).argmax(-1)
    return torch.where(accepted, drafts_N, redrawn), accepted
