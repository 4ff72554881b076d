"""Quantization-aware training: weights that are seen as the file's own grid rounds them.

The steps are those of a quantized file and stay; what moves are the weights behind the codes, from
the file's values on, by straight-through gradients (Bengio et al. 2013, arXiv 1308.3432). So what
is trained is what is served. Shapes: O outputs and G groups of inputs of a matrix; a stack of
experts has an axis more.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.compress.gptq import RoundedMatrix
from ridgeline.compress.grids import Grid, Steps
from ridgeline.compress.output import MANIFEST_NAME
from ridgeline.compress.recipe import Recipe
from ridgeline.core.errors import UnsupportedModelError
from ridgeline.kernels.tensors import as_tensor
from ridgeline.quant import QuantizedTensor


class FakeQuantized(nn.Module):
    """A matrix, or a stack of them, by the grid and the steps of a quantized one."""

    def __init__(self, quantized: QuantizedTensor, recipe: Recipe) -> None:
        super().__init__()
        columns = quantized.shape[-1]
        grid = recipe.grid(columns)
        assert grid is not None, "its tensor would have been left"
        self.grid: Grid = grid
        scales_OG = as_tensor(quantized.scales).float()
        self.scales_OG = nn.Parameter(scales_OG, requires_grad=False)
        self.offsets_OG: nn.Parameter | None = None
        if not recipe.symmetric and quantized.zeros is not None:
            offsets_OG = -as_tensor(quantized.zeros).float() * scales_OG
            self.offsets_OG = nn.Parameter(offsets_OG, requires_grad=False)
        self._groups = torch.arange(columns) // grid.group_size

    def forward(self, weight: Tensor) -> Tensor:
        with torch.no_grad():
            scales, offsets = self._spread()
            values = self.grid.values(self.grid.codes(weight, scales, offsets), scales, offsets)
        return weight + (values - weight).detach()

    def rounded(self, weight: Tensor, index: int | None) -> RoundedMatrix:
        """A matrix as it is written; ``index`` is its place in a stack."""
        scales, offsets = self._spread()
        codes = self.grid.codes(weight, scales, offsets)
        values = self.grid.values(codes, scales, offsets)
        place = ... if index is None else index
        return RoundedMatrix(
            codes_OI=codes[place],
            steps=Steps(
                scales_OG=self.scales_OG[place],
                offsets_OG=None if self.offsets_OG is None else self.offsets_OG[place],
            ),
            values_OI=values[place],
            error=0.0,
            nearest_error=0.0,
        )

    def _spread(self) -> tuple[Tensor, Tensor | None]:
        offsets = None if self.offsets_OG is None else self.offsets_OG[..., self._groups]
        return self.scales_OG[..., self._groups], offsets


def recipe_of(folder: Path) -> tuple[Recipe, str]:
    """How `ridgeline quantize` made a folder, and the digest of the model that it was made of.

    Raises:
        UnsupportedModelError: something else made it, or did not say how.
    """
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
        recipe, model = Recipe(**manifest["recipe"]), manifest["model"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UnsupportedModelError(
            f"{folder} is quantized, and not by `ridgeline quantize`: only those are trained in "
            "their own grid."
        ) from None
    if recipe.bits_per_weight is not None:
        raise UnsupportedModelError(
            f"{folder} has matrices of several bits; those of one number of bits are trained."
        )
    return recipe, model
