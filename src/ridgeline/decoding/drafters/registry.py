"""Drafters by the names of the setting ``speculation``."""

from typing import cast

from ridgeline.core.errors import SettingsError
from ridgeline.core.parts import load_part
from ridgeline.core.protocols import Drafter, StepPrice
from ridgeline.decoding.drafters.adaptive import AdaptiveDrafter
from ridgeline.decoding.drafters.first_of import FirstOf
from ridgeline.decoding.drafters.model import ModelDrafter
from ridgeline.decoding.drafters.ngram import NgramDrafter
from ridgeline.decoding.drafters.suffix import SuffixDrafter


def make_drafter(
    name: str, price: StepPrice, *, max_tokens: int, has_model: bool
) -> Drafter | None:
    """The drafter of that name; ``None`` for off. ``has_model``: whether there is a draft model.

    An installed drafter is a class of the group ``ridgeline.drafters``, or what makes one.

    Raises:
        SettingsError: there is none of that name.
    """
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
    make = load_part("drafters", name)
    if make is None:
        raise SettingsError(f"There is no drafter {name!r}.")
    return cast(Drafter, make())
