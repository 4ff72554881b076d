"""Which weights of a matrix become zero: patterns, and scores without an update of the others.

Shapes: O outputs and I inputs of a matrix, C some of its columns.
"""

import torch

from ridgeline.compress.pruning.recipe import UNSTRUCTURED, PruneRecipe
from ridgeline.core.errors import UnsupportedModelError


def least_of_groups(scores_OC: torch.Tensor, kept: int, of: int) -> torch.Tensor:
    """True for all but the ``kept`` highest scores of each ``of`` columns in a row.

    Raises:
        UnsupportedModelError: the columns are no whole groups.
    """
    columns = scores_OC.shape[-1]
    if columns % of:
        raise UnsupportedModelError(f"Rows of {columns} weights are no whole groups of {of}.")
    groups = torch.unflatten(scores_OC, -1, (-1, of))
    least = groups.argsort(dim=-1, stable=True)[..., : of - kept]
    return torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, least, True).flatten(-2)


def least_of_rows(scores_OI: torch.Tensor, share: float) -> torch.Tensor:
    """True for that share of the least scores of each row, rounded down."""
    least = scores_OI.argsort(dim=-1, stable=True)[:, : int(share * scores_OI.shape[-1])]
    return torch.zeros_like(scores_OI, dtype=torch.bool).scatter_(-1, least, True)


def least_of_all(scores_OC: torch.Tensor, share: float) -> torch.Tensor:
    """True for that share of the least scores, rounded down."""
    return least_of_rows(scores_OC.reshape(1, -1), share).view_as(scores_OC)


def magnitude_scores(w_OI: torch.Tensor) -> torch.Tensor:
    """|w| (Han et al. 2015, arXiv 1506.02626)."""
    return w_OI.abs()


def wanda_scores(w_OI: torch.Tensor, hessian_II: torch.Tensor) -> torch.Tensor:
    """|w| · ‖x‖ of the weight's input over the calibration (Sun et al. 2023, arXiv 2306.11695)."""
    return w_OI.abs() * hessian_II.diagonal().sqrt()


def mask_of(
    w_OI: torch.Tensor,
    hessian_II: torch.Tensor | None,
    recipe: PruneRecipe,
    generator: torch.Generator,
) -> torch.Tensor:
    """True for weights that become zero, by magnitude, Wanda or at random.

    Unstructured, weights are compared within a matrix by magnitude, and else within a row.
    """
    match recipe.method:
        case "magnitude":
            scores = magnitude_scores(w_OI)
        case "random":
            scores = torch.rand(w_OI.shape, generator=generator)
        case _:
            assert hessian_II is not None, "Wanda is calibrated"
            scores = wanda_scores(w_OI, hessian_II)
    if recipe.pattern != UNSTRUCTURED:
        return least_of_groups(scores, *recipe.group)
    choose = least_of_all if recipe.method == "magnitude" else least_of_rows
    return choose(scores, recipe.sparsity)
