"""Rounding to a grid: to the nearest, and by GPTQ (Frantar et al. 2022, arXiv 2210.17323).

GPTQ here rounds the columns in the order of their importance, to steps that were chosen before
("static"), so that a file needs no order of groups; and then goes over the codes again, each time
to the best code given all others (coordinate descent on the same error).

Shapes: O outputs and I inputs of a matrix, R some of the outputs, C the columns of a block.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ridgeline.compress.grids import Grid, Steps
from ridgeline.compress.hessian import Curvature

_BLOCK_COLUMNS = 128
_SWEEPS = 2
_LEAST_ROWS, _CHUNK_ELEMENTS = 512, 1 << 20  # that are rounded at once


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedMatrix:
    """A matrix on a grid.

    ``error`` and ``nearest_error`` are Σ dᵀHd of its rows, and of rounding them to the nearest;
    without a curvature Σ d².
    """

    codes_OI: torch.Tensor
    steps: Steps
    values_OI: torch.Tensor
    error: float
    nearest_error: float


def round_nearest(
    w_OI: torch.Tensor,
    grid: Grid,
    curvature: Curvature | None,
    *,
    out_OI: torch.Tensor | None = None,
) -> RoundedMatrix:
    """Each weight to the nearest point, by steps with the least squared error of the weights.

    Values are written to ``out_OI``, which may be ``w_OI``.
    """
    return _by_rows(w_OI, out_OI, lambda w_RI: _nearest(w_RI, grid, curvature))


def round_weighted(
    w_OI: torch.Tensor, grid: Grid, curvature: Curvature, *, out_OI: torch.Tensor | None = None
) -> RoundedMatrix:
    """Each weight to the nearest point, by steps with the least error for inputs of that size;
    rows for which that is no better get those of `round_nearest`."""

    def rows(w_RI: torch.Tensor) -> RoundedMatrix:
        nearest = _nearest(w_RI, grid, curvature)
        weighted = _nearest(w_RI, grid, curvature, curvature.hessian_II.diagonal())
        return _better_rows(
            w_RI, nearest, weighted.codes_OI, weighted.steps, weighted.values_OI, curvature
        )

    return _by_rows(w_OI, out_OI, rows)


def round_gptq(
    w_OI: torch.Tensor,
    grid: Grid,
    curvature: Curvature,
    *,
    out_OI: torch.Tensor | None = None,
    keep_zeros: bool = False,
) -> RoundedMatrix:
    """By GPTQ; rows for which that is no better than the nearest points get those.

    Without a factor of the curvature all rows do. For ``out_OI`` see `round_nearest`. With
    ``keep_zeros`` weights that are zero stay so, on a grid that has a zero.
    """
    return _by_rows(w_OI, out_OI, lambda w_RI: _gptq(w_RI, grid, curvature, keep_zeros))


def rows_at_once(columns: int) -> int:
    """How many rows are rounded at once: enough that H is not read for a few of them."""
    return max(_LEAST_ROWS, _CHUNK_ELEMENTS // columns)


def _by_rows(
    w_OI: torch.Tensor,
    out_OI: torch.Tensor | None,
    round_rows: Callable[[torch.Tensor], RoundedMatrix],
) -> RoundedMatrix:
    """Round some rows at a time; of all of them, codes and steps are kept, and the values."""
    values_OI = torch.empty_like(w_OI) if out_OI is None else out_OI
    codes_OI = torch.empty(w_OI.shape, dtype=torch.int16)
    steps, error, nearest_error = list[Steps](), 0.0, 0.0
    size = rows_at_once(w_OI.shape[1])
    for first in range(0, len(w_OI), size):
        rows = slice(first, first + size)
        found = round_rows(w_OI[rows])
        codes_OI[rows], values_OI[rows] = found.codes_OI, found.values_OI
        steps.append(found.steps)
        error, nearest_error = error + found.error, nearest_error + found.nearest_error
    return RoundedMatrix(
        codes_OI=codes_OI,
        steps=Steps.merged(steps, torch.cat),
        values_OI=values_OI,
        error=error,
        nearest_error=nearest_error,
    )


def _nearest(
    w_RI: torch.Tensor,
    grid: Grid,
    curvature: Curvature | None,
    importance_I: torch.Tensor | None = None,
) -> RoundedMatrix:
    columns = torch.arange(w_RI.shape[1])
    steps = grid.fit(w_RI, torch.ones(len(columns)) if importance_I is None else importance_I)
    spread = steps.spread(columns, grid.group_size)
    codes = grid.codes(w_RI, *spread)
    values = grid.values(codes, *spread)
    difference = w_RI - values
    rows = difference.square().sum(-1) if curvature is None else curvature.error(difference)
    error = float(rows.double().sum())
    return RoundedMatrix(
        codes_OI=codes, steps=steps, values_OI=values, error=error, nearest_error=error
    )


def _gptq(w_RI: torch.Tensor, grid: Grid, curvature: Curvature, keep_zeros: bool) -> RoundedMatrix:
    nearest = _nearest(w_RI, grid, curvature)
    if curvature.factor_II is None:
        return nearest
    order = curvature.order_I
    kept_RI = w_RI != 0 if keep_zeros else None
    steps = grid.fit(w_RI, curvature.hessian_II.diagonal())
    scales, offsets = steps.spread(order, grid.group_size)
    codes = torch.empty(w_RI.shape, dtype=torch.int16)
    codes[:, order] = _compensated(
        w_RI[:, order],
        grid,
        scales,
        offsets,
        curvature.factor_II,
        None if kept_RI is None else kept_RI[:, order],
    )
    columns = torch.arange(w_RI.shape[1])
    spread = steps.spread(columns, grid.group_size)
    values = _swept(w_RI, codes, grid, *spread, curvature.hessian_II, kept_RI)
    return _better_rows(w_RI, nearest, codes, steps, values, curvature)


def _compensated(
    w_RI: torch.Tensor,
    grid: Grid,
    scales_RI: torch.Tensor,
    offsets_RI: torch.Tensor | None,
    factor_II: torch.Tensor,
    kept_RI: torch.Tensor | None = None,
) -> torch.Tensor:
    """Codes, each column's error made good by those behind it; ``w_RI`` is used up."""
    codes = torch.empty(w_RI.shape, dtype=torch.int16)
    for first in range(0, w_RI.shape[1], _BLOCK_COLUMNS):
        stop = min(first + _BLOCK_COLUMNS, w_RI.shape[1])
        block_RC = w_RI[:, first:stop].clone()
        errors_RC = torch.empty_like(block_RC)
        factor_CC = factor_II[first:stop, first:stop]
        for place in range(stop - first):
            column = first + place
            offset = None if offsets_RI is None else offsets_RI[:, column]
            wanted = (
                block_RC[:, place] if kept_RI is None else block_RC[:, place] * kept_RI[:, column]
            )
            code = grid.codes(wanted, scales_RI[:, column], offset)
            value = grid.values(code, scales_RI[:, column], offset)
            error = (block_RC[:, place] - value) / factor_CC[place, place]
            block_RC[:, place:] -= error[:, None] * factor_CC[place, place:]
            codes[:, column], errors_RC[:, place] = code, error
        w_RI[:, stop:] -= errors_RC @ factor_II[first:stop, stop:]
    return codes


def _swept(
    w_RI: torch.Tensor,
    codes_RI: torch.Tensor,
    grid: Grid,
    scales_RI: torch.Tensor,
    offsets_RI: torch.Tensor | None,
    hessian_II: torch.Tensor,
    kept_RI: torch.Tensor | None,
) -> torch.Tensor:
    """Each code in turn to the best one given the others; changes codes, and gives the values."""
    values_RI = grid.values(codes_RI, scales_RI, offsets_RI)
    for _ in range(_SWEEPS):
        slope_RI = (w_RI - values_RI) @ hessian_II
        for first in range(0, w_RI.shape[1], _BLOCK_COLUMNS):
            stop = min(first + _BLOCK_COLUMNS, w_RI.shape[1])
            hessian_CC = hessian_II[first:stop, first:stop]
            slope_RC = slope_RI[:, first:stop].clone()
            before_RC = values_RI[:, first:stop].clone()
            for place in range(stop - first):
                column = first + place
                offset = None if offsets_RI is None else offsets_RI[:, column]
                wanted = values_RI[:, column] + slope_RC[:, place] / hessian_CC[place, place]
                wanted = wanted if kept_RI is None else wanted * kept_RI[:, column]
                code = grid.codes(wanted, scales_RI[:, column], offset)
                value = grid.values(code, scales_RI[:, column], offset)
                change = value - values_RI[:, column]
                slope_RC -= change[:, None] * hessian_CC[place]
                codes_RI[:, column], values_RI[:, column] = code, value
            slope_RI -= (values_RI[:, first:stop] - before_RC) @ hessian_II[first:stop]
    return values_RI


def _better_rows(
    w_RI: torch.Tensor,
    nearest: RoundedMatrix,
    codes_RI: torch.Tensor,
    steps: Steps,
    values_RI: torch.Tensor,
    curvature: Curvature,
) -> RoundedMatrix:
    plain, found = (
        curvature.error(w_RI - each).double() for each in (nearest.values_OI, values_RI)
    )
    better = found < plain

    def choose(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        return torch.where(better[:, None], new, old)

    return RoundedMatrix(
        codes_OI=choose(codes_RI, nearest.codes_OI),
        steps=Steps.merged([steps, nearest.steps], lambda pair: choose(*pair)),
        values_OI=choose(values_RI, nearest.values_OI),
        error=float(torch.minimum(found, plain).sum()),
        nearest_error=float(plain.sum()),
    )
