"""Tuning the codes of a layer together, so that it gives what it gave before anything was rounded.

After SignRound (Cheng et al. 2023, arXiv 2309.05516): the weights behind the codes move by the sign
of straight-through gradients, by steps whose length falls to zero. They begin at the codes that
GPTQ chose, each on the side of its point where the unrounded weight lies; and the layer is to give
what the unrounded model gives there, so that it makes good for layers before it.

Shapes: T tokens, D hidden width, O outputs and I inputs of a matrix.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch

from ridgeline.compress.block_forward import BlockForward, Key
from ridgeline.compress.gptq import RoundedMatrix
from ridgeline.compress.grids import Grid
from ridgeline.compress.layers import Run
from ridgeline.compress.layerwise import Example

_STEP_TOKENS = 1024
_NEAR_EDGE = 0.49  # of a step: how far from its point a weight begins at most


class LatentMatrix:
    """The weights behind the codes of a matrix; ``values_OI``, which the layer multiplies with,
    are those of the codes."""

    def __init__(
        self, w_OI: torch.Tensor, values_OI: torch.Tensor, rounded: RoundedMatrix, grid: Grid
    ) -> None:
        self._rounded, self._grid, self._values_OI = rounded, grid, values_OI
        self._spread = rounded.steps.spread(torch.arange(w_OI.shape[1]), grid.group_size)
        reach_OI = _NEAR_EDGE * self._spread[0].abs()
        self._w_OI = w_OI.clamp_(values_OI - reach_OI, values_OI + reach_OI)

    def move(self, gradient_OI: torch.Tensor, rate: float) -> None:
        """By ``rate`` steps of the grid against the gradient's sign."""
        self._w_OI -= rate * self._spread[0].abs() * gradient_OI.sign()
        self._values_OI.copy_(self._grid.values(self._codes(), *self._spread))

    def undo(self) -> None:
        """Everything as it was rounded."""
        self._w_OI = self._grid.values(self._rounded.codes_OI, *self._spread)
        self._values_OI.copy_(self._w_OI)

    def rounded(self) -> RoundedMatrix:
        """As it is now."""
        return replace(self._rounded, codes_OI=self._codes(), values_OI=self._values_OI)

    def _codes(self) -> torch.Tensor:
        return self._grid.codes(self._w_OI, *self._spread)


def tune(
    run: Run,
    weights: Mapping[str, torch.Tensor],
    latents: Mapping[Key, LatentMatrix],
    lengths: list[int],
    example: Callable[[int], Example],
    *,
    steps: int,
    random: np.random.Generator,
) -> float:
    """Move the codes of a layer's matrices; changes ``weights``.

    ``lengths`` are of the examples. Returns the squared error of the layer's outputs over that
    before; 1 where it did not become less, and all is as it was.
    """
    leaves = {name: weights[name] for name, _ in latents}
    at_once = max(1, round(_STEP_TOKENS * len(lengths) / sum(lengths)))
    before = _error(run, weights, lengths, example)
    for step in range(steps):
        gradients = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
        for number in random.choice(len(lengths), min(at_once, len(lengths)), replace=False):
            x_TD, wanted_TD, window = example(int(number))
            with torch.enable_grad():
                for leaf in leaves.values():
                    leaf.requires_grad_()
                found_TD = BlockForward(weights, [window], x_TD=x_TD).run(run)
                error = (found_TD - wanted_TD).square().sum()
                parts = torch.autograd.grad(error, list(leaves.values()), allow_unused=True)
            for leaf, total, part in zip(leaves.values(), gradients.values(), parts, strict=True):
                leaf.requires_grad_(False)
                if part is not None:
                    total += part
        for (name, index), latent in latents.items():
            gradient = gradients[name] if index is None else gradients[name][index]
            latent.move(gradient, (1 - step / steps) / steps)
    after = _error(run, weights, lengths, example)
    if after < before:
        return after / before
    for latent in latents.values():
        latent.undo()
    return 1.0


def _error(
    run: Run,
    weights: Mapping[str, torch.Tensor],
    lengths: list[int],
    example: Callable[[int], Example],
) -> float:
    """The squared error of a layer's outputs, of all examples."""
    total = 0.0
    for number in range(len(lengths)):
        x_TD, wanted_TD, window = example(number)
        found_TD = BlockForward(weights, [window], x_TD=x_TD).run(run)
        total += float((found_TD - wanted_TD).double().square().sum())
    return total
