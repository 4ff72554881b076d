"""Drafters by the names of the setting ``speculation``."""

from typing import cast

from ridgeline.core.errors import SettingsError
from ridgeline.core.parts import load_part
from ridgeline.core.protocols import Drafter, StepTimePredictor
from ridgeline.decoding.drafters.adaptive import AdaptiveDrafter
from ridgeline.decoding.drafters.first_of import FirstOf
from ridgeline.decoding.drafters.lookahead import LookaheadDrafter
from ridgeline.decoding.drafters.model import ModelDrafter
from ridgeline.decoding.drafters.ngram import NgramDrafter
from ridgeline.decoding.drafters.recycling import RecyclingDrafter
from ridgeline.decoding.drafters.suffix import SuffixDrafter


def make_drafter(
    name: str,
    predictor: StepTimePredictor,
    *,
    max_tokens: int,
    has_model: bool,
    is_tree: bool = False,
) -> Drafter:
    """The drafter of that name. ``has_model``: whether there is a draft model;
    ``is_tree``: whether it proposes trees.

    An installed drafter is a class of the group ``ridgeline.drafters``, or what makes one. It
    proposes what it likes.

    Raises:
        SettingsError: there is none of that name, or it is not ours to shape.
    """
    match name:
        case "ngram":
            return NgramDrafter(is_tree=is_tree)
        case "suffix":
            return SuffixDrafter(is_tree=is_tree)
        case "recycling":
            return RecyclingDrafter(is_tree=is_tree)
        case "lookahead":
            return LookaheadDrafter(max_tokens, is_tree=is_tree)
        case "draft" | "exit" | "eagle3" | "mtp" | "medusa":
            return ModelDrafter(is_tree=is_tree)
        case "combined":
            return FirstOf([NgramDrafter(is_tree=is_tree), ModelDrafter(is_tree=is_tree)])
        case "adaptive":
            return AdaptiveDrafter(
                SuffixDrafter(is_tree=is_tree),
                predictor,
                max_tokens=max_tokens,
                has_model=has_model,
                is_tree=is_tree,
            )
    make = load_part("drafters", name)
    if make is None:
        raise SettingsError(f"There is no drafter {name!r}.")
    if is_tree:
        raise SettingsError(f"draft_shape is not for {name!r}, which shapes its own drafts.")
    return cast(Drafter, make())
