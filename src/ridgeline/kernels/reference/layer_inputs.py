"""Per-layer embeddings, mixed as ``Gemma4TextModel.project_per_layer_inputs`` does."""

import torch
from torch.nn import functional

from ridgeline.core.spec import NormSpec
from ridgeline.kernels.reference.norm import normalise


def mix_layer_inputs(
    projected_TE: torch.Tensor,
    rows_TE: torch.Tensor,
    gain_p: torch.Tensor,
    norm: NormSpec,
    *,
    hidden_size: int,
) -> torch.Tensor:
    """``[T, E]`` for E = L · p: what the embedding is projected to, and rows of the table, whose
    numbers are scaled in their own format."""
    width = len(gain_p)
    scale = torch.full((), width**0.5, dtype=rows_TE.dtype, device=rows_TE.device)
    projected = torch.unflatten(projected_TE * hidden_size**-0.5, -1, (-1, width))
    mixed = normalise(projected, gain_p, norm).flatten(1) + (rows_TE * scale).to(projected_TE)
    return mixed * 2**-0.5


def known_rows(ids_T: torch.Tensor, table_VE: torch.Tensor) -> torch.Tensor:
    """Rows ``[T, E]`` of tokens; the first for tokens that the table lacks."""
    return functional.embedding(ids_T * (ids_T < len(table_VE)), table_VE)
