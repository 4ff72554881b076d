"""SparseGPT (Frantar and Alistarh 2023, arXiv 2301.00774): weights go, those behind make good.

Shapes: O outputs and I inputs of a matrix, C the columns of a block.
"""

import torch

from ridgeline.compress.hessian import Curvature
from ridgeline.compress.pruning.masks import least_of_all, least_of_groups
from ridgeline.compress.pruning.recipe import UNSTRUCTURED, PruneRecipe

_BLOCK_COLUMNS = 128


def prune_sparsegpt(w_OI: torch.Tensor, curvature: Curvature, recipe: PruneRecipe) -> torch.Tensor:
    """Change ``w_OI`` in place; true for the weights that are zero now.

    Of each block of 128 columns the share with the least w² / [H⁻¹]² of the columns before is
    taken, or of each M columns all but N.
    """
    factor_II = curvature.factor_II
    assert factor_II is not None, "H has an inverse"
    mask_OI = torch.zeros(w_OI.shape, dtype=torch.bool)
    kept, of = (0, 1) if recipe.pattern == UNSTRUCTURED else recipe.group
    width = _BLOCK_COLUMNS // of * of or of
    for first in range(0, w_OI.shape[1], width):
        stop = min(first + width, w_OI.shape[1])
        block_OC, factor_CC = w_OI[:, first:stop], factor_II[first:stop, first:stop]
        errors_OC = torch.empty_like(block_OC)
        scale_C = factor_CC.diagonal()
        if recipe.pattern == UNSTRUCTURED:
            mask_OI[:, first:stop] = least_of_all((block_OC / scale_C).square(), recipe.sparsity)
        for place in range(stop - first):
            if recipe.pattern != UNSTRUCTURED and place % of == 0:
                group = slice(place, place + of)
                scores = (block_OC[:, group] / scale_C[group]).square()
                mask_OI[:, first + place : first + place + of] = least_of_groups(scores, kept, of)
            error = block_OC[:, place] * mask_OI[:, first + place] / scale_C[place]
            block_OC[:, place:] -= error[:, None] * factor_CC[place, place:]
            errors_OC[:, place] = error
        w_OI[:, stop:] -= errors_OC @ factor_II[first:stop, stop:]
    w_OI[mask_OI] = 0.0  # as they are but for rounding
    return mask_OI
