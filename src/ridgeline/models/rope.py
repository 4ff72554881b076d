"""Frequencies of rotary positions, in float32 as checkpoints are trained with them.

The arithmetic follows transformers' ``modeling_rope_utils.py`` step by step, so that results agree
to float32 rounding.
"""

import math

import numpy as np
import numpy.typing as npt

from ridgeline.core.rope_spec import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeSpec,
    YarnScaling,
)

_Floats = npt.NDArray[np.float32]


def inverse_frequencies(rope: RopeSpec, *, sequence_length: int) -> _Floats:
    """Radians per position of each rotated pair, float32 ``[rotary_dim / 2]``.

    θ^(−2i/d) for pair i (Su et al. 2021, arXiv 2104.09864, §3.2.2), changed by the scaling.
    ``sequence_length`` is what the token sees: the prompt's length for tokens of the prompt, and
    position + 1 for those after it. Only dynamic scaling depends on it.
    """
    match rope.scaling:
        case None:
            return _unscaled(rope, rope.theta)
        case LinearScaling(factor=factor):
            return _unscaled(rope, rope.theta) / np.float32(factor)
        case DynamicScaling() as scaling:
            return _unscaled(rope, _dynamic_theta(rope, scaling, sequence_length))
        case YarnScaling() as scaling:
            return _yarn(rope, scaling)
        case Llama3Scaling() as scaling:
            return _llama3(_unscaled(rope, rope.theta), scaling)
        case LongRopeScaling(factors=factors):
            stretched = np.array(factors, dtype=np.float32) * _powers(rope, rope.theta)
            return np.float32(1.0) / stretched  # ``_compute_longrope_parameters`` of transformers


def rope_attention_factor(rope: RopeSpec) -> float:
    """What cos and sin are multiplied by (YaRN, §3.4: √(1/t); LongRoPE); 1 for other scalings."""
    scaling = rope.scaling
    return scaling.attention_factor if isinstance(scaling, YarnScaling | LongRopeScaling) else 1.0


def yarn_attention_factor(
    factor: float, *, mscale: float = 0.0, mscale_all_dim: float = 0.0
) -> float:
    """YaRN's default, 0.1 ln(factor) + 1 (arXiv 2309.00071, equation 22).

    With both ``mscale`` values (DeepSeek), the ratio of 0.1 · mscale · ln(factor) + 1 of the two.
    """
    if mscale and mscale_all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return yarn_mscale(factor, 1.0)


def longrope_attention_factor(factor: float, *, original_max_position: int) -> float:
    """LongRoPE's default, √(1 + ln(factor) / ln(original length)) (arXiv 2402.13753, §3.2)."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_max_position))


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 · mscale · ln(factor) + 1, and 1 where nothing is stretched (DeepSeek-V2's code)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _powers(rope: RopeSpec, theta: float) -> _Floats:
    """θ^(2i/d)."""
    exponents = np.arange(0, rope.rotary_dim, 2).astype(np.float32) / np.float32(rope.rotary_dim)
    # The power is rounded once, from float64: closest to the several vectorised float32 powers.
    return (np.float64(np.float32(theta)) ** exponents.astype(np.float64)).astype(np.float32)


def _unscaled(rope: RopeSpec, theta: float) -> _Floats:
    return np.float32(1.0) / _powers(rope, theta)


def _dynamic_theta(rope: RopeSpec, scaling: DynamicScaling, sequence_length: int) -> float:
    """θ · (s·L/L₀ − (s−1))^(d/(d−2)): NTK-aware by length (bloc97 and emozilla 2023).

    ``_compute_dynamic_ntk_parameters`` of transformers, where L is a tensor, hence float32.
    """
    if sequence_length <= scaling.original_max_position:
        return rope.theta
    length, original = np.float32(sequence_length), np.float32(scaling.original_max_position)
    stretch = np.float32(scaling.factor) * length / original - np.float32(scaling.factor - 1)
    growth = stretch ** np.float32(rope.rotary_dim / (rope.rotary_dim - 2))
    return float(np.float32(rope.theta) * growth)


def _yarn(rope: RopeSpec, scaling: YarnScaling) -> _Floats:
    """Interpolate slow pairs, keep fast ones (arXiv 2309.00071, §3.2, "NTK-by-parts").

    ``_compute_yarn_parameters`` of transformers.
    """
    dim = rope.rotary_dim

    def correction_dim(rotations: float) -> float:
        """The pair (as a dimension) that turns ``rotations`` times over the original context."""
        turns = scaling.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = correction_dim(scaling.beta_fast), correction_dim(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # as the original does, against division by zero
    pairs = np.arange(dim // 2, dtype=np.float32)
    ramp = np.clip((pairs - np.float32(low)) / np.float32(high - low), 0, 1)
    kept = np.float32(1) - ramp
    powers = _powers(rope, rope.theta)
    interpolated = np.float32(1) / (np.float32(scaling.factor) * powers)
    frequencies: _Floats = interpolated * (np.float32(1) - kept) + np.float32(1) / powers * kept
    return frequencies


def _llama3(frequencies: _Floats, scaling: Llama3Scaling) -> _Floats:
    """Divide slow frequencies by ``factor``, with a smooth band (Llama 3.1, ``apply_scaling``).

    ``_compute_llama3_parameters`` of transformers.
    """
    context, factor = np.float32(scaling.original_max_position), np.float32(scaling.factor)
    low = scaling.original_max_position / scaling.low_freq_factor  # wavelengths, in tokens
    high = scaling.original_max_position / scaling.high_freq_factor
    wavelengths = np.float32(2 * math.pi) * (1 / frequencies)  # PyTorch divides numbers so
    band = np.float32(scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = (context * (1 / wavelengths) - np.float32(scaling.low_freq_factor)) / band
    blended = (np.float32(1) - smooth) * frequencies / factor + smooth * frequencies
    scaled = np.where(wavelengths > np.float32(low), frequencies / factor, frequencies)
    in_band = (wavelengths >= np.float32(high)) & (wavelengths <= np.float32(low))
    return np.where(in_band, blended, scaled).astype(np.float32)
