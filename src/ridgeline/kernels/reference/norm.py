"""RMSNorm (Zhang and Sennrich 2019) and LayerNorm (Ba et al. 2016)."""

import torch

from ridgeline.core.spec import NormKind, NormScope, NormSpec
from ridgeline.kernels.reference.elementwise import wide


def normalise(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    spec: NormSpec,
    *,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise over the last axis; multiply by ``weight`` and add ``bias``, where there are any.

    Both have the shape of x's last axes.
    """
    values = wide(x)
    if spec.kind is NormKind.LAYER:
        values = values - values.mean(-1, keepdim=True)
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + spec.eps)
    if weight is not None:
        values = values * (wide(weight) + 1.0 if spec.unit_offset else wide(weight))
    if bias is not None:
        values = values + wide(bias)
    return values.to(x.dtype)


def normalise_heads(
    x_THd: torch.Tensor,
    weight: torch.Tensor | None,
    spec: NormSpec,
    scope: NormScope,
    *,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise each head, or all heads of a token together.

    ``weight`` and ``bias`` have the scope's shape.
    """
    if scope is NormScope.PROJECTION:
        return normalise(x_THd.flatten(1), weight, spec, bias=bias).view(x_THd.shape)
    return normalise(x_THd, weight, spec, bias=bias)
