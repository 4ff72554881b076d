"""Points that are no integers: MXFP4."""

from dataclasses import dataclass, field

import torch

from ridgeline.compress.grids.base import Steps, best_of, grouped, inverse
from ridgeline.kernels.tensors import as_tensor
from ridgeline.quant.float4 import e2m1_table

_SHRINKS = (1.0, 0.95, 0.9, 0.85)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Points by code. Scales are float32, or powers of two if ``power_of_two``."""

    name: str
    group_size: int
    points: torch.Tensor
    power_of_two: bool = False
    _order: torch.Tensor = field(init=False)
    _edges: torch.Tensor = field(init=False)  # between neighbouring points

    def __post_init__(self) -> None:
        values, order = self.points.sort(stable=True)
        object.__setattr__(self, "_order", order)
        object.__setattr__(self, "_edges", (values[1:] + values[:-1]) / 2)

    @property
    def bits(self) -> int:
        return (len(self.points) - 1).bit_length()

    def fit(self, w_OI: torch.Tensor, importance_I: torch.Tensor) -> Steps:
        w_OGS = grouped(w_OI, self.group_size)
        importance_GS = grouped(importance_I[None], self.group_size)[0]

        def error(scales_OG: torch.Tensor) -> torch.Tensor:
            scales = scales_OG[..., None]
            found = self.values(self.codes(w_OGS, scales, None), scales, None)
            return ((w_OGS - found).square() * importance_GS).sum(-1)

        full = w_OGS.abs().amax(-1) / self.points.abs().max()
        if self.power_of_two:
            exponent = torch.frexp(full)[1]  # of the next power above
            one = torch.ones_like(full)
            tried = [(torch.ldexp(one, (exponent - down).clamp(-127, 127)),) for down in (0, 1)]
        else:
            tried = [(full * shrink,) for shrink in _SHRINKS]
        return Steps(scales_OG=best_of(tried, error)[0])

    def codes(
        self, w: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None
    ) -> torch.Tensor:
        places = torch.bucketize((w * inverse(scales)).contiguous(), self._edges)
        return self._order[places].to(torch.int16)

    def values(
        self, codes: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None
    ) -> torch.Tensor:
        return self.points[codes.long()] * scales


def mxfp4() -> Table:
    """E2M1 with a power of two for 32 (OCP Microscaling Formats 1.0)."""
    return Table(name="mxfp4", group_size=32, points=as_tensor(e2m1_table()), power_of_two=True)
