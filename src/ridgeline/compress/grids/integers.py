"""Integers of 2 to 8 bits in groups of any size, symmetric or with zero points."""

from dataclasses import dataclass

import torch

from ridgeline.compress.grids.base import Steps, best_of, grouped, inverse, rounded

_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Integers:
    """Codes from −2^(bits−1), or from 0 with an integer zero point; scales as ``scale_dtype``.

    The symmetric scale has the sign that gives the largest magnitude the code −2^(bits−1), of which
    there is one more than of positive ones.
    """

    bits: int
    group_size: int
    symmetric: bool = True
    scale_dtype: torch.dtype = torch.float16

    @property
    def name(self) -> str:
        return f"{'' if self.symmetric else 'u'}int{self.bits}-g{self.group_size}"

    def fit(self, w_OI: torch.Tensor, importance_I: torch.Tensor) -> Steps:
        w_OGS = grouped(w_OI, self.group_size)
        importance_GS = grouped(importance_I[None], self.group_size)[0]

        def error(scales_OG: torch.Tensor, offsets_OG: torch.Tensor) -> torch.Tensor:
            scales, offsets = scales_OG[..., None], offsets_OG[..., None]
            found = self.values(self.codes(w_OGS, scales, offsets), scales, offsets)
            return ((w_OGS - found).square() * importance_GS).sum(-1)

        low, high = w_OGS.amin(-1), w_OGS.amax(-1)
        if self.symmetric:
            extreme = torch.where(-low > high, low, high)
            full = -extreme / (1 << (self.bits - 1))
            zero = torch.zeros_like(full)
            scales, _ = best_of(
                ((rounded(full * shrink, self.scale_dtype), zero) for shrink in _SHRINKS), error
            )
            return Steps(scales_OG=scales)
        low, high = low.clamp(max=0), high.clamp(min=0)
        scales, offsets = best_of(
            (self._affine(low * a, high * b) for a in _SHRINKS for b in _SHRINKS), error
        )
        return Steps(scales_OG=scales, offsets_OG=offsets)

    def codes(
        self, w: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None
    ) -> torch.Tensor:
        if offsets is not None:
            w = w - offsets
        low = -(1 << (self.bits - 1)) if self.symmetric else 0
        codes = (w * inverse(scales)).round_().clamp_(low, low + (1 << self.bits) - 1)
        return codes.to(torch.int16)

    def values(
        self, codes: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None
    ) -> torch.Tensor:
        values = codes * scales
        return values if offsets is None else values + offsets

    def _affine(self, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale, and the offset of an integer zero point."""
        most = (1 << self.bits) - 1
        scales = rounded((high - low) / most, self.scale_dtype)
        zeros = (-low * inverse(scales)).round().clamp(0, most)
        return scales, -zeros * scales
