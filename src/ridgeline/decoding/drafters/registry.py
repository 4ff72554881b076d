"""Drafters by the names of the setting ``speculation``."""

from ridgeline.core.protocols import Drafter, StepPrice
from ridgeline.core.settings.speculation import Speculation
from ridgeline.decoding.drafters.adaptive import AdaptiveDrafter
from ridgeline.decoding.drafters.first_of import FirstOf
from ridgeline.decoding.drafters.model import ModelDrafter
from ridgeline.decoding.drafters.ngram import NgramDrafter
from ridgeline.decoding.drafters.suffix import SuffixDrafter


def make_drafter(
    name: Speculation, price: StepPrice, *, max_tokens: int, has_model: bool
) -> Drafter | None:
    """The drafter of that name; ``None`` for off. ``has_model``: whether there is a draft model."""
    match name:
        case "off":
            return None
        case "ngram":
            return NgramDrafter()
        case "suffix":
            return SuffixDrafter()
        case "draft":
            return ModelDrafter()
        case "combined":
            return FirstOf([NgramDrafter(), ModelDrafter()])
        case "adaptive":
            return AdaptiveDrafter(
                SuffixDrafter(), price, max_tokens=max_tokens, has_model=has_model
            )
