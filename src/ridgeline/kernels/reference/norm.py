"""RMSNorm (Zhang and Sennrich 2019) and LayerNorm (Ba et al. 2016)."""

import torch

from ridgeline.core.spec import NormKind, NormSpec
from ridgeline.kernels.reference.elementwise import wide


def normalise(x: torch.Tensor, weight: torch.Tensor, spec: NormSpec) -> torch.Tensor:
    """Normalise over the last axis and multiply by ``weight`` of that length."""
    values = wide(x)
    if spec.kind is NormKind.LAYER:
        values = values - values.mean(-1, keepdim=True)
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + spec.eps)
    gain = wide(weight) + 1.0 if spec.unit_offset else wide(weight)
    return (values * gain).to(x.dtype)
