"""Integers in groups of 32 whose scales are small integer multiples of one for 128 columns.

A file holds them as ordinary float16 scales of 32 columns: the common scale has 7 significant bits
and a factor 5, so that their products are exact, and who knows of them finds both again. The cpu
executor's int4 is this format (`executors.cpu.codes`).
"""

from dataclasses import dataclass

import torch

from ridgeline.compress.grids.base import Steps, best_of, grouped, inverse, rounded
from ridgeline.core.rounding import ceil_div

_WIDE_COLUMNS = 128
_LEAST_FACTOR, _LARGEST_FACTOR = -15, 16
_SCALE_BITS = 7
_DIVISORS = tuple(16 - half / 2 for half in range(7))  # of the largest step, to be the scale
_NUDGES = (0, 1, -1, -2)


@dataclass(frozen=True, slots=True, kw_only=True)
class FactoredIntegers:
    """Codes from −2^(bits−1)."""

    bits: int
    group_size: int = 32

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    def fit(self, w_OI: torch.Tensor, importance_I: torch.Tensor) -> Steps:
        shape = (_WIDE_COLUMNS // self.group_size, self.group_size)
        w_OGBS = torch.unflatten(grouped(w_OI, _WIDE_COLUMNS), -1, shape)
        importance_GBS = torch.unflatten(grouped(importance_I[None], _WIDE_COLUMNS)[0], -1, shape)
        low, high = w_OGBS.amin(-1), w_OGBS.amax(-1)
        wanted_OGB = torch.where(-low > high, low, high) / -(1 << (self.bits - 1))
        largest_OG1 = wanted_OGB.gather(-1, wanted_OGB.abs().argmax(-1, keepdim=True))

        def error(steps_OGB: torch.Tensor) -> torch.Tensor:
            scales = steps_OGB[..., None]
            found = self.values(self.codes(w_OGBS, scales, None), scales, None)
            errors: torch.Tensor = (w_OGBS - found).square() * importance_GBS
            return errors.sum(-1)

        def steps_of(divisor: float) -> torch.Tensor:
            """The best of the factors beside the nearest, for one common scale."""
            scale = _shorten(largest_OG1 / divisor)
            nearest = (wanted_OGB * inverse(scale)).round()
            tried = (
                (rounded(scale * _bounded(nearest + nudge), torch.float16),) for nudge in _NUDGES
            )
            return best_of(tried, error)[0]

        (steps,) = best_of(
            ((steps_of(divisor),) for divisor in _DIVISORS),
            lambda steps_OGB: error(steps_OGB).sum(-1, keepdim=True),
        )
        groups = ceil_div(w_OI.shape[-1], self.group_size)
        return Steps(scales_OG=steps.flatten(1)[:, :groups].contiguous())

    def codes(
        self, w: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None
    ) -> torch.Tensor:
        half = 1 << (self.bits - 1)
        return (w * inverse(scales)).round_().clamp_(-half, half - 1).to(torch.int16)

    def values(
        self, codes: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None
    ) -> torch.Tensor:
        return codes * scales


def _bounded(factors: torch.Tensor) -> torch.Tensor:
    return factors.clamp(_LEAST_FACTOR, _LARGEST_FACTOR)


def _shorten(scales: torch.Tensor) -> torch.Tensor:
    """The nearest numbers of 7 significant bits; exact in float16 where they are normal there."""
    mantissa, exponent = torch.frexp(scales)
    unit = float(1 << _SCALE_BITS)
    return rounded(torch.ldexp((mantissa * unit).round() / unit, exponent), torch.float16)
