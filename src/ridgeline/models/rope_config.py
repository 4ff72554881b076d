"""Rotary positions as configs spell them.

Two spellings: ``rope_theta`` with ``rope_scaling`` (whose kind is under ``rope_type`` or ``type``),
and since transformers 5 ``rope_parameters``, which holds both, once or for each kind of layer.
"""

import math
from collections.abc import Iterable

from ridgeline.core.errors import CorruptFileError, UnsupportedModelError
from ridgeline.core.rope_spec import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    RopeSpec,
    YarnScaling,
)
from ridgeline.models.config import ConfigReader, show
from ridgeline.models.fields import FULL, SLIDING
from ridgeline.models.rope import longrope_attention_factor, yarn_attention_factor

_MAX_FACTOR = 1e6
_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


def read_rope(
    config: ConfigReader,
    *,
    head_dim: int,
    max_position: int,
    theta: float = 10_000.0,
    partial: float | None = None,
    original: int | None = None,
) -> RopeSpec:
    """The rope that all layers share; ``theta`` is the family's default.

    ``partial`` is the default of ``partial_rotary_factor``, the part of each head that is rotated,
    in families that have it; they name that key in `Family.computes`. ``original`` is the length
    before scaling where only ``original_max_position_embeddings`` outside of the scaling counts,
    and that is absent.
    """
    section = rope_section(config)
    theta = config.number("rope_theta", minimum=2.0, default=theta)
    if partial is None:
        section.refuse("partial_rotary_factor", unless=(1, 1.0))
    else:
        head_dim = _rotary_dim(config, section, head_dim, partial)
    return _rope(
        config,
        section,
        head_dim=head_dim,
        max_position=max_position,
        theta=theta,
        original=original,
    )


def _rotary_dim(config: ConfigReader, section: ConfigReader, head_dim: int, default: float) -> int:
    """How much of a head is rotated; the factor of the section has priority."""
    name = "partial_rotary_factor"
    outer = config.number(name, minimum=0.0, maximum=1.0, default=default)
    factor = section.number(name, minimum=0.0, maximum=1.0, default=outer)
    width = int(head_dim * factor)
    if width % 2 or not width:
        raise UnsupportedModelError(
            f"config.json gives {name} as {factor:g}: of {head_dim} elements a head, {width} would "
            "be rotated, and rotary positions need an even number."
        )
    return width


def read_ropes(
    config: ConfigReader, *, head_dim: int, max_position: int, theta: float = 10_000.0
) -> dict[str, RopeSpec]:
    """The rope of each kind of layer, where ``rope_parameters`` may be nested by kind."""
    if not nested_by_kind(config):
        shared = read_rope(config, head_dim=head_dim, max_position=max_position, theta=theta)
        return {FULL: shared, SLIDING: shared}
    thetas = dict.fromkeys((FULL, SLIDING), config.number("rope_theta", minimum=2, default=theta))
    return read_nested_ropes(config, head_dim=head_dim, max_position=max_position, thetas=thetas)


def nested_by_kind(config: ConfigReader) -> bool:
    """Whether ``rope_parameters`` has an entry for each kind of layer."""
    section = config.section("rope_parameters")
    return FULL in section or SLIDING in section


def read_nested_ropes(
    config: ConfigReader, *, head_dim: int, max_position: int, thetas: dict[str, float]
) -> dict[str, RopeSpec]:
    """The entries of nested ``rope_parameters``; ``thetas`` are the defaults by kind."""
    section = rope_section(config)
    for kind in thetas:
        section.section(kind).refuse("partial_rotary_factor", unless=(1, 1.0))
    return {
        kind: _rope(
            config, section.section(kind), head_dim=head_dim, max_position=max_position, theta=theta
        )
        for kind, theta in thetas.items()
    }


def proportional_rope(
    section: ConfigReader, *, head_dim: int, theta: float, part: float
) -> RopeSpec:
    """Frequencies of the whole head, of which only the first ``part`` turn (transformers'
    ``proportional``); ``theta`` and ``part`` are defaults."""
    factor = section.number("factor", minimum=1e-3, maximum=_MAX_FACTOR, default=1.0)
    part = section.number("partial_rotary_factor", minimum=0.0, maximum=1.0, default=part)
    turning = int(part * head_dim // 2)
    return RopeSpec(
        theta=section.number("rope_theta", minimum=2.0, default=theta),
        rotary_dim=head_dim,
        scaling=LongRopeScaling(
            factors=(factor,) * turning + (math.inf,) * (head_dim // 2 - turning),
            attention_factor=1.0,
        ),
    )


def rope_section(config: ConfigReader) -> ConfigReader:
    """``rope_parameters`` or ``rope_scaling``, whichever is there; both are an error.

    transformers would take the second and forget the θ of the first.
    """
    parameters, scaling = config.section("rope_parameters"), config.section("rope_scaling")
    if not parameters.is_empty() and not scaling.is_empty():
        raise UnsupportedModelError(
            "config.json has both rope_parameters and rope_scaling; keep one of them."
        )
    return parameters if scaling.is_empty() else scaling


def plain_rope(*, head_dim: int, theta: float) -> RopeSpec:
    """Rotary positions over the whole head, without scaling."""
    return RopeSpec(theta=theta, rotary_dim=head_dim)


def extended_context(max_position: int, ropes: Iterable[RopeSpec]) -> int:
    """The longest context, in tokens, once scaling is counted in.

    By the convention of transformers ``max_position_embeddings`` stays what it was before linear,
    dynamic and YaRN scaling; where it was raised already, YaRN's own original length shows it.
    """
    longest = max_position
    for rope in ropes:
        match rope.scaling:
            case LinearScaling(factor=factor):
                longest = max(longest, int(max_position * factor))
            case DynamicScaling(factor=factor, original_max_position=original):
                longest = max(longest, int(original * factor))
            case YarnScaling(factor=factor, original_max_position=original):
                longest = max(longest, int(original * factor))
            case _:
                pass
    return longest


def _rope(
    config: ConfigReader,
    section: ConfigReader,
    *,
    head_dim: int,
    max_position: int,
    theta: float,
    original: int | None = None,
) -> RopeSpec:
    return RopeSpec(
        theta=section.number("rope_theta", minimum=2.0, default=theta),
        rotary_dim=head_dim,
        scaling=_scaling(
            config, section, head_dim=head_dim, max_position=max_position, original=original
        ),
    )


def _scaling(
    config: ConfigReader,
    section: ConfigReader,
    *,
    head_dim: int,
    max_position: int,
    original: int | None,
) -> RopeScaling | None:
    kind = section.text("rope_type", default=section.text("type", default="default"))
    if kind == "su" or (kind == "yarn" and "short_factor" in section):
        kind = "longrope"  # as early configs of Phi-3 call it
    if kind in ("default", "mrope"):  # Qwen-VL's, of text alone (`vision`)
        for name in ("mrope_section", "mrope_interleaved"):
            section.ignore(name)
        return None
    if kind not in _TYPES:
        raise UnsupportedModelError(
            f"config.json asks for rope_type {show(kind)}; supported are {', '.join(_TYPES)}."
        )
    original = _original_max_position(config, section, max_position, original)
    if kind == "yarn":
        return _yarn(section, original=original, max_position=max_position)
    if kind == "longrope":
        context = config.context or max_position
        return _longrope(
            section, original, rotary_dim=head_dim, max_position=max_position, context=context
        )
    factor = section.number("factor", minimum=1e-3, maximum=_MAX_FACTOR)
    if kind == "linear":
        return LinearScaling(factor=factor)
    if kind == "dynamic":
        if head_dim <= 2:  # the exponent d/(d−2)
            raise UnsupportedModelError(
                f"rope_type dynamic needs a head_dim above 2, not {head_dim}."
            )
        return DynamicScaling(factor=factor, original_max_position=max_position)
    low = section.number("low_freq_factor", minimum=1e-3, maximum=_MAX_FACTOR)
    high = section.number("high_freq_factor", minimum=1e-3, maximum=_MAX_FACTOR)
    if high <= low:
        raise UnsupportedModelError(
            f"config.json gives high_freq_factor {high:g}, which is not above low_freq_factor "
            f"{low:g}."
        )
    return Llama3Scaling(
        factor=factor, low_freq_factor=low, high_freq_factor=high, original_max_position=original
    )


def _original_max_position(
    config: ConfigReader, section: ConfigReader, max_position: int, default: int | None
) -> int:
    """The length before scaling; a value outside the section has priority, as in transformers."""
    name = "original_max_position_embeddings"
    inner = section.integer(name, default=max_position)
    return config.integer(name, default=inner if default is None else default)


def _yarn(section: ConfigReader, *, original: int, max_position: int) -> YarnScaling:
    factor = section.number(
        "factor", minimum=1e-3, maximum=_MAX_FACTOR, default=max_position / original
    )
    mscale = section.number("mscale", minimum=0.0, maximum=1e3, default=0.0)
    mscale_all_dim = section.number("mscale_all_dim", minimum=0.0, maximum=1e3, default=0.0)
    default = yarn_attention_factor(factor, mscale=mscale, mscale_all_dim=mscale_all_dim)
    return YarnScaling(
        factor=factor,
        original_max_position=original,
        # Zero counts as unset, as in transformers.
        beta_fast=section.number("beta_fast", minimum=0.0, maximum=1e6, default=32.0) or 32.0,
        beta_slow=section.number("beta_slow", minimum=0.0, maximum=1e6, default=1.0) or 1.0,
        attention_factor=section.number(
            "attention_factor", minimum=1e-3, maximum=1e3, default=default
        ),
        truncate=section.boolean("truncate", default=True),
    )


def _longrope(
    section: ConfigReader, original: int, *, rotary_dim: int, max_position: int, context: int
) -> LongRopeScaling:
    """The long factors where a context of ``context`` tokens is beyond the original, else short."""
    default = section.number(
        "factor", minimum=1e-3, maximum=_MAX_FACTOR, default=max_position / original
    )
    if original < 2:  # the default of attention_factor divides by its logarithm
        raise UnsupportedModelError("rope_type longrope needs an original length above 1.")
    short, long = (
        _pair_factors(section, name, rotary_dim // 2) for name in ("short_factor", "long_factor")
    )
    return LongRopeScaling(
        factors=long if context > original else short,
        attention_factor=section.number(
            "attention_factor",
            minimum=1e-3,
            maximum=1e3,
            default=longrope_attention_factor(default, original_max_position=original),
        ),
    )


def _pair_factors(section: ConfigReader, name: str, pairs: int) -> tuple[float, ...]:
    factors = section.numbers(name, minimum=1e-3, maximum=_MAX_FACTOR) or ()
    if len(factors) != pairs:
        raise CorruptFileError(
            f"config.json gives {len(factors)} numbers as {name}, for {pairs} rotated pairs."
        )
    return factors
