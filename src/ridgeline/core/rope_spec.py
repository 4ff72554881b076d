"""Rotary positions as data: what of them a model's config says (`core.spec`)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Positions divided by ``factor`` (kaiokendev 2023)."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicScaling:
    """NTK-aware base that grows with the sequence beyond ``original_max_position``."""

    factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): interpolation by wavelength, scaled attention.

    ``attention_factor`` multiplies cos and sin; it is resolved, never ``None``.
    """

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's interpolation of low frequencies with a smooth band between the two factors."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753): each pair's wavelength has its own factor.

    Of a model's two lists of ``rotary_dim / 2`` factors, the context decides which one is here
    (docs/decisions/0004-dynamic-rope.md). ``attention_factor`` multiplies cos and sin. A pair whose
    factor is infinite is not rotated (Gemma 4's ``proportional`` rope).
    """

    factors: tuple[float, ...]
    attention_factor: float


RopeScaling = LinearScaling | DynamicScaling | YarnScaling | Llama3Scaling | LongRopeScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary positions (Su et al. 2021) over the first ``rotary_dim`` of each head.

    Halves are rotated against each other (the Hugging Face layout), or if ``interleaved`` each
    element against its neighbour (the paper's, and DeepSeek's).
    """

    theta: float
    rotary_dim: int
    scaling: RopeScaling | None = None
    interleaved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryGrowth:
    """Queries grow with their position p: q · (1 + rate · ln(1 + ⌊(p + offset) / length⌋)).

    Llama 4 calls it temperature tuning; it keeps attention over long contexts from flattening
    (scalable softmax, Nakanishi 2025, arXiv 2501.19399). Below ``length`` it changes nothing.
    """

    rate: float
    length: int
    offset: int = 0
