"""Rotary positions of a GGUF file, as a Hugging Face config spells them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ridgeline.core.errors import CorruptFileError, UnsupportedModelError
from ridgeline.core.rope_spec import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeSpec,
    YarnScaling,
)
from ridgeline.models import inverse_frequencies
from ridgeline.models.config import show
from ridgeline.models.rope import yarn_attention_factor
from ridgeline.weights.gguf.keys import Keys

_Floats = npt.NDArray[np.float32]

# Llama 3.1's own values. Only the ratios of the three lengths count, so the first is any.
_CONTEXT = 8192
_BAND = (1.0, 4.0)
_TOLERANCE = 1e-4

ORIGINAL_LENGTH_KEY = "rope.scaling.original_context_length"
_YARN_KEYS = {
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
    "attention_factor": "rope.scaling.yarn_attn_factor",
}


def rope_scaling(
    keys: Keys, factors: _Floats | None, *, head_dim: int, theta: float
) -> dict[str, object] | None:
    """``rope_scaling`` of a config, ``None`` for plain positions.

    ``factors`` are what the file divides each pair's frequency by (``rope_freqs.weight``).

    Raises:
        UnsupportedModelError: the scaling is of an unknown kind.
        CorruptFileError: ``factors`` have the wrong number or are not positive.
    """
    kind = keys.text("rope.scaling.type", default="linear")
    linear = keys.number("rope.scale_linear", default=1.0)  # what old files have instead
    factor = keys.number("rope.scaling.factor", default=linear)
    if kind == "linear" and factor in (0.0, 1.0):
        kind = "none"
    attention_factor = keys.number("rope.scaling.attn_factor", default=1.0)
    usual = yarn_attention_factor(factor) if kind == "yarn" else 1.0
    if attention_factor != 1.0 and not np.isclose(attention_factor, usual, rtol=1e-4):
        raise UnsupportedModelError(
            f"The GGUF file sets {keys.architecture}.rope.scaling.attn_factor, which is not "
            "supported."
        )
    if factors is not None:
        if kind != "none":
            raise UnsupportedModelError(
                f"The GGUF file has both rope_freqs.weight and rope scaling {show(kind)}, which is "
                "not supported."
            )
        return _llama3(factors, head_dim=head_dim, theta=theta)
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn(keys, factor)
    raise UnsupportedModelError(
        f"The GGUF file asks for rope scaling {show(kind)}, which is not supported for "
        f"{keys.architecture}."
    )


def _yarn(keys: Keys, factor: float) -> dict[str, object]:
    scaling: dict[str, object] = {"rope_type": "yarn", "factor": factor}
    if keys.get(ORIGINAL_LENGTH_KEY) is not None:
        name = "original_max_position_embeddings"
        scaling[name] = keys.integer(ORIGINAL_LENGTH_KEY)
    for name, key in _YARN_KEYS.items():
        if keys.get(key) is not None:
            scaling[name] = keys.number(key)
    return scaling


def _llama3(factors: _Floats, *, head_dim: int, theta: float) -> dict[str, object] | None:
    """The parameters of Llama 3.1's scaling that give ``factors``; if none do, the factors.

    For a pair that turns t = L₀ / wavelength times over the original context, the frequency is
    multiplied by ``(1 − s) / factor + s`` with ``s = (t − low) / (high − low)``, clipped to
    [0, 1]: two pairs inside the band give low and high.
    """
    if factors.shape != (head_dim // 2,) or not (np.isfinite(factors) & (factors > 0)).all():
        raise CorruptFileError(
            f"rope_freqs.weight must be {head_dim // 2} positive numbers, one for each pair."
        )
    factor = float(factors.max())
    if factor == 1.0 and factors.min() == 1.0:
        return None
    rope = RopeSpec(theta=theta, rotary_dim=head_dim)
    plain = inverse_frequencies(rope, sequence_length=1).astype(np.float64)
    turns = _CONTEXT * plain / (2 * np.pi)
    for low, high in (_BAND, _fitted_band(factors, factor, turns)):
        if not 0 < low < high:
            continue
        scaling = Llama3Scaling(
            factor=factor,
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position=_CONTEXT,
        )
        scaled = inverse_frequencies(
            RopeSpec(theta=theta, rotary_dim=head_dim, scaling=scaling), sequence_length=1
        )
        if np.allclose(plain / scaled, factors, rtol=_TOLERANCE, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": _CONTEXT,
            }
    listed = [float(str(value)) for value in factors]
    return {
        "rope_type": "longrope",
        "long_factor": listed,
        "short_factor": listed,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": _CONTEXT,
    }


def _fitted_band(
    factors: _Floats, factor: float, turns: npt.NDArray[np.float64]
) -> tuple[float, float]:
    """``low`` and ``high`` from a line through the pairs inside the band; (0, 0) without two."""
    inside = (factors > 1 + 1e-4) & (factors < factor * (1 - 1e-4))
    if inside.sum() < 2:
        return 0.0, 0.0
    share = (1 / factors[inside].astype(np.float64) - 1 / factor) / (1 - 1 / factor)
    slope, start = np.polyfit(turns[inside], share, 1)
    if not slope > 0:
        return 0.0, 0.0
    low = -start / slope
    return float(low), float(low + 1 / slope)


def rope_content(
    rope: RopeSpec, section: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[dict[str, object], dict[str, _Floats]]:
    """Keys and tensors that say how positions are scaled: the inverse of `rope_scaling`.

    ``section`` is ``rope_scaling`` or ``rope_parameters`` of the whole ``config``.

    Raises:
        UnsupportedModelError: GGUF has no word for it.
    """
    match rope.scaling:
        case None:
            return {}, {}
        case LinearScaling(factor=factor):
            return {"rope.scaling.type": "linear", "rope.scaling.factor": float(factor)}, {}
        case YarnScaling() as scaling:
            keys: dict[str, object] = {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": float(scaling.factor),
                ORIGINAL_LENGTH_KEY: scaling.original_max_position,
            }
            given = {
                key: float(section[name])
                for name, key in _YARN_KEYS.items()
                if section.get(name) is not None
            }
            return keys | given, {}
        case Llama3Scaling():
            plain = inverse_frequencies(
                RopeSpec(theta=rope.theta, rotary_dim=rope.rotary_dim), sequence_length=1
            )
            factors = plain / inverse_frequencies(rope, sequence_length=1)
            return {}, {"rope_freqs.weight": factors.astype(np.float32)}
        case LongRopeScaling() as scaling:
            original = config.get("original_max_position_embeddings")
            keys = {"rope.scaling.attn_factor": float(scaling.attention_factor)}
            if original is not None:
                keys[ORIGINAL_LENGTH_KEY] = int(original)
            return keys, {
                f"rope_factors_{kind}.weight": np.array(section[f"{kind}_factor"], np.float32)
                for kind in ("long", "short")
            }
    raise UnsupportedModelError(
        f"GGUF has no word for rotary positions scaled by {type(rope.scaling).__name__}."
    )
