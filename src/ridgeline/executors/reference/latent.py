"""The two ops of latent attention that have weights.

Shapes: T tokens, D hidden size, H heads, R latent elements, n and r the widths of a head's parts
without and with rotary positions.
"""

from collections.abc import Callable

import torch
from torch.nn import functional

from ridgeline.core import ops
from ridgeline.kernels import reference as kernels


def project(
    op: ops.LatentProject, x_TD: torch.Tensor, weight: Callable[[ops.Weight], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """q ``[T, H, n + r]`` and the latent with its rotary part ``[T, 1, R + r]``, unrotated."""
    query_latent = x_TD
    if op.query_latent is not None:
        assert op.query_norm is not None
        bias = None if op.query_latent_bias is None else weight(op.query_latent_bias)
        query_latent = functional.linear(x_TD, weight(op.query_latent), bias)
        query_latent = kernels.normalise(query_latent, weight(op.query_norm), op.norm)
    q = functional.linear(query_latent, weight(op.query))
    bias = None if op.latent_bias is None else weight(op.latent_bias)
    latent = functional.linear(x_TD, weight(op.latent), bias)
    (latent_dim,) = op.latent_norm.shape
    normed = kernels.normalise(latent[:, :latent_dim], weight(op.latent_norm), op.norm)
    k = torch.cat([normed, latent[:, latent_dim:]], dim=-1)
    return q.view(len(q), op.num_heads, -1), k[:, None]


def attend(
    op: ops.LatentAttend,
    q_SHd: torch.Tensor,
    latent_C1W: torch.Tensor,
    visible_SC: torch.Tensor,
    weight: Callable[[ops.Weight], torch.Tensor],
) -> torch.Tensor:
    """Attention output ``[S, H, v]`` in the form that is cheaper for so many tokens and so much
    context."""
    absorbed = kernels.absorbing_is_cheaper(
        num_tokens=len(q_SHd),
        context=len(latent_C1W),
        latent_dim=op.latent_dim,
        nope_dim=op.nope_dim,
        rope_dim=op.rope_dim,
        v_dim=op.v_dim,
    )
    form = kernels.attend_absorbed if absorbed else kernels.attend_plain
    return form(
        q_SHd,
        latent_C1W[:, 0],
        weight(op.expand).view(op.num_heads, -1, op.latent_dim),
        visible_SC,
        rope_dim=op.rope_dim,
        scale=op.scale,
    )
