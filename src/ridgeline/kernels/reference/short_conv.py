"""Causal convolutions along the sequence, of each channel by itself."""

import torch

from ridgeline.kernels.reference.elementwise import wide


def short_conv(
    inputs_SD: torch.Tensor,
    before_MD: torch.Tensor,
    weight_DL: torch.Tensor,
    bias_D: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Σ_j weight[:, j] · u[t − L + 1 + j] + bias of each of the S tokens ``[S, D]``; and u, the
    M = L − 1 inputs ``before`` them and theirs, ``[M + S, D]``, both in at least float32."""
    rows = torch.cat([before_MD, wide(inputs_SD).to(before_MD.dtype)])
    out_SD = (rows.unfold(0, weight_DL.shape[1], 1) * wide(weight_DL)).sum(-1)
    return out_SD if bias_D is None else out_SD + wide(bias_D), rows
