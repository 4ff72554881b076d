"""Linear attention by the gated delta rule (Yang et al. 2024, arXiv 2412.06464), token by token.

Shapes: S tokens of one sequence, K key heads, G value heads, d and v the widths of a head of keys
and of values.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.nn import functional

_EPS = 1e-6  # of the length of a query or key


class DeltaInputs(NamedTuple):
    """What the rule takes, in at least float32; ``decay_SG`` are factors, ``beta_SG`` in (0, 1)."""

    query_SKd: torch.Tensor
    key_SKd: torch.Tensor
    value_SGv: torch.Tensor
    decay_SG: torch.Tensor
    beta_SG: torch.Tensor


def decay_factors(
    decay_SG: torch.Tensor, decay_log_G: torch.Tensor, bias_G: torch.Tensor
) -> torch.Tensor:
    """How much of its matrix each head keeps at each token, ``[S, G]``."""
    return torch.exp(-decay_log_G.exp() * functional.softplus(decay_SG + bias_G))


def gated_delta(
    inputs: DeltaInputs, state_Gdv: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of each token the output ``[G, v]``, and the state after it."""
    shared = inputs.value_SGv.shape[1] // inputs.key_SKd.shape[1]
    query_SGd, key_SGd = (
        _unit(rows).repeat_interleave(shared, dim=1) for rows in (inputs.query_SKd, inputs.key_SKd)
    )
    query_SGd = query_SGd * query_SGd.shape[-1] ** -0.5
    tokens = zip(query_SGd, key_SGd, inputs.value_SGv, inputs.decay_SG, inputs.beta_SG, strict=True)
    for query_Gd, key_Gd, value_Gv, decay_G, beta_G in tokens:
        state_Gdv = state_Gdv * decay_G[:, None, None]
        read_Gv = torch.einsum("gdv,gd->gv", state_Gdv, key_Gd)
        change_Gv = (value_Gv - read_Gv) * beta_G[:, None]
        state_Gdv = torch.baddbmm(state_Gdv, key_Gd[:, :, None], change_Gv[:, None])
        yield torch.einsum("gdv,gd->gv", state_Gdv, query_Gd), state_Gdv


def _unit(rows: torch.Tensor) -> torch.Tensor:
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + _EPS)
