"""How tokens are spread over the experts of a model."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ridgeline.core.arrays import Array
from ridgeline.core.parallel_layout import borders


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad:
    """What `expert_tokens` of an executor come to.

    Attributes:
        routed_tokens: tokens × experts of each, over all layers.
        skew: tokens of the most loaded expert ÷ those of the mean one, over all layers: the sum of
            the largest ÷ the sum of the means. 1.0 is even.
        worst_skew: that of the layer where it is the largest.
        worst_router: that layer, by its router's weight.
        rank_skew: as ``skew``, of the ranks that share the experts; 1.0 for one.
    """

    routed_tokens: int
    skew: float
    worst_skew: float
    worst_router: str
    rank_skew: float

    def __str__(self) -> str:
        ranks = f", of ranks {self.rank_skew:.2f}" if self.rank_skew > 1.0 else ""
        return (
            f"experts: the most loaded has {self.skew:.2f} times the mean's tokens "
            f"({self.worst_skew:.2f} in {self.worst_router}){ranks}"
        )


def plain_load(load: ExpertLoad | None, tokens: Mapping[str, Array]) -> dict[str, Any] | None:
    """In plain values, with the tokens of each expert of each layer."""
    if load is None:
        return None
    counts = {router: each.tolist() for router, each in tokens.items()}
    return asdict(load) | {"text": str(load), "tokens": counts}


def expert_load(tokens: Mapping[str, Array], num_ranks: int = 1) -> ExpertLoad | None:
    """The load of experts that ``num_ranks`` share, as equally by number as can be.

    Args:
        tokens: by the router of their layer, tokens that went to each expert, ``[experts]``.

    Returns:
        ``None`` if no token went to any.
    """
    largest, means, ranks = dict[str, float](), dict[str, float](), 0.0
    for router, counts in tokens.items():
        if total := float(counts.sum()):
            largest[router], means[router] = float(counts.max()), total / len(counts)
            parts = np.add.reduceat(counts, borders(len(counts), num_ranks)[:-1])
            ranks += float(parts.max()) * num_ranks / total * means[router]
    if not means:
        return None
    worst = max(means, key=lambda router: largest[router] / means[router])
    whole = sum(means.values())
    return ExpertLoad(
        routed_tokens=int(sum(counts.sum() for counts in tokens.values())),
        skew=sum(largest.values()) / whole,
        worst_skew=largest[worst] / means[worst],
        worst_router=worst,
        rank_skew=ranks / whole,
    )
