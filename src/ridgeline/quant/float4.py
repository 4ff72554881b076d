"""Four-bit floats E2M1 and power-of-two scales E8M0 (OCP Microscaling Formats, version 1.0)."""

import torch

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e2m1_table() -> torch.Tensor:
    """float32 [16]: what each code means; bit 3 is the sign."""
    return torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)])


def e8m0_scales(exponents: torch.Tensor) -> torch.Tensor:
    """float32 2^(e − 127) of uint8 exponents; 255 is NaN."""
    scales = torch.ldexp(torch.ones(exponents.shape), exponents.to(torch.int32) - 127)
    return torch.where(exponents == 255, torch.nan, scales)
