"""Four-bit floats E2M1 and power-of-two scales E8M0 (OCP Microscaling Formats, version 1.0)."""

import numpy as np

from ridgeline.core.arrays import Array

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e2m1_table() -> Array:
    """float32 [16]: what each code means; bit 3 is the sign."""
    return np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=np.float32)


def e8m0_scales(exponents: Array) -> Array:
    """float32 2^(e − 127) of uint8 exponents; 255 is NaN."""
    scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
    return np.where(exponents == 255, np.float32(np.nan), scales)
