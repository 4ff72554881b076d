"""Moving the size of inputs into the weights that they meet, by scales that are folded into a norm.

A norm's gain is divided by s, and the columns of all matrices that read it are multiplied by s:
the model computes the same, and is rounded otherwise. SmoothQuant (Xiao et al. 2022, arXiv
2211.10438) makes large inputs small enough for 8 bits; AWQ (Lin et al. 2023, arXiv 2306.00978)
gives the columns of large inputs finer steps. Both search one exponent for each norm.

Shapes: T tokens, I inputs, O outputs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ridgeline.compress.block_forward import BlockForward
from ridgeline.compress.grids import Grid
from ridgeline.compress.layers import Run
from ridgeline.core import ops
from ridgeline.evaluation import Document

_ALPHAS = tuple(tenth / 10 for tenth in range(1, 10))
_SAMPLE_ROWS = 1024
_TINY = 1e-6
_ACTIVATION_LIMIT = 127

Windows = Iterable[tuple[torch.Tensor, Document]]
"""Residual streams before a layer, and the tokens that they are of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldableNorm:
    """A norm whose output is read by products alone; ``readers`` are their weights."""

    op: ops.Norm
    ops: Run
    readers: tuple[str, ...]


def foldable_norms(run: Run) -> list[FoldableNorm]:
    """The norms with a gain that something reads, in order."""
    found = []
    for place, op in enumerate(run):
        if not isinstance(op, ops.Norm) or op.weight is None:
            continue
        readers: list[str] = []
        for later in run[place + 1 :]:
            if isinstance(later, ops.Norm) and later.dst == op.dst:
                break
            if getattr(later, "src", None) == op.dst:
                readers += [weight.name for weight in _reading(later)]
            if op.dst == "h" and isinstance(
                later, ops.AttentionOp | ops.MLP | ops.GateUp | ops.MoE
            ):
                break
        if readers:
            norm = FoldableNorm(op=op, ops=run[: place + 1], readers=tuple(readers))
            found.append(norm)
    return found


def _reading(op: ops.Op) -> Iterator[ops.Weight]:
    """The matrices of an op that multiply its source."""
    match op:
        case ops.QKVProject():
            yield from (weight for weight in (op.query, op.key, op.value) if weight is not None)
        case ops.LatentProject():
            yield from (op.query_latent or op.query, op.latent)
        case ops.MLP() | ops.GateUp():
            yield from ((op.up,) if op.gate is None else (op.gate, op.up))
        case ops.MoE():
            routed = () if op.router_src not in (None, op.src) else (op.router,)
            yield from (*routed, op.up, *(() if op.gate is None else (op.gate,)))
        case ops.SharedExpert():
            optional = (op.gate, op.output_gate)
            yield from (op.up, *(weight for weight in optional if weight is not None))
        case _:
            pass


def smooth(
    run: Run,
    weights: Mapping[str, torch.Tensor],
    windows: Callable[[], Windows],
    *,
    grid_of: Callable[[str, int], Grid | None],
    rounds_activations: bool,
    quantized: frozenset[str],
    gain_dtype: Callable[[str], torch.dtype],
) -> dict[str, float]:
    """Fold the best scales into each norm of a layer; changes ``weights``.

    ``gain_dtype`` gives the file's type for a gain, which is rounded to it first, so that nothing
    is lost. Where a reader is not quantized, or the norm has a bias, scales are powers of two, so
    that no type rounds them. Returns the exponent that was chosen, by norm: 0 for
    scales of one.
    """
    chosen: dict[str, float] = {}
    for norm in foldable_norms(run):
        assert norm.op.weight is not None
        rows_TI = _sample(norm, weights, windows())
        matrices = [weights[name].flatten(0, -2) for name in norm.readers if name in quantized]
        if not matrices or not rows_TI.any():
            continue
        is_exact = norm.op.bias is not None or any(n not in quantized for n in norm.readers)
        gain_I = weights[norm.op.weight.name]
        foldable = partial(
            _foldable,
            gain_I=gain_I,
            op=norm.op,
            is_exact=is_exact,
            dtype=gain_dtype(norm.op.weight.name),
        )
        score = _activations_score if rounds_activations else _weights_score
        points = grid_of(next(n for n in norm.readers if n in quantized), gain_I.shape[-1])
        assert points is not None, "what has none is not quantized"
        folds = {0.0: foldable(torch.ones_like(gain_I))}
        for alpha in _ALPHAS:
            folds[alpha] = foldable(_scales(rows_TI, matrices, alpha, rounds_activations))
        errors = {a: score(rows_TI, matrices, fold[0], points) for a, fold in folds.items()}
        best = min(errors, key=errors.__getitem__)
        scales_I, new_gain_I = folds[best]
        gain_I.copy_(new_gain_I)
        if norm.op.bias is not None:
            weights[norm.op.bias.name].div_(scales_I)
        for name in norm.readers:
            weights[name].mul_(scales_I)
        chosen[norm.op.weight.name] = best
    return chosen


def changed_weights(run: Run) -> frozenset[str]:
    """The weights that `smooth` may change."""
    names: set[str] = set()
    for norm in foldable_norms(run):
        names.update(norm.readers)
        names.update(each.name for each in (norm.op.weight, norm.op.bias) if each is not None)
    return frozenset(names)


def _sample(
    norm: FoldableNorm, weights: Mapping[str, torch.Tensor], windows: Windows
) -> torch.Tensor:
    """Rows ``[T, I]`` that the norm gives, of the first windows."""
    parts: list[torch.Tensor] = []
    for x_TD, window in windows:
        forward = BlockForward(weights, [window], x_TD=x_TD)
        forward.run(norm.ops)
        parts.append(forward.buffers[norm.op.dst])
        if sum(map(len, parts)) >= _SAMPLE_ROWS:
            break
    return torch.cat(parts)[:_SAMPLE_ROWS]


def _scales(
    rows_TI: torch.Tensor, matrices: Sequence[torch.Tensor], alpha: float, is_smooth: bool
) -> torch.Tensor:
    """Wanted scales: of SmoothQuant max|x|^α / max|w|^(1−α), of AWQ mean|x|^α; about one."""
    if is_smooth:
        largest = torch.stack([matrix.abs().amax(0) for matrix in matrices]).amax(0)
        inputs = rows_TI.abs().amax(0).clamp(min=_TINY)
        scales = inputs**alpha / largest.clamp(min=_TINY) ** (1 - alpha)
    else:
        scales = rows_TI.abs().mean(0).clamp(min=_TINY) ** alpha
    normal: torch.Tensor = scales / (scales.amax() * scales.amin()).sqrt()
    return normal


def _foldable(
    wanted_I: torch.Tensor,
    *,
    gain_I: torch.Tensor,
    op: ops.Norm,
    is_exact: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales that the gain can take, and the new gain as ``dtype`` holds it."""
    if is_exact:
        wanted_I = torch.exp2(wanted_I.log2().round())
    offset = 1.0 if op.spec.unit_offset else 0.0
    whole_I = gain_I + offset
    new_I = (whole_I / wanted_I - offset).to(dtype).float()
    ratio = whole_I / (new_I + offset)
    is_fine = ratio.isfinite() & (ratio > 0)
    return torch.where(is_fine, ratio, 1.0), torch.where(is_fine, new_I, gain_I)


def _weights_score(
    rows_TI: torch.Tensor, matrices: Sequence[torch.Tensor], scales_I: torch.Tensor, grid: Grid
) -> float:
    """Squared error of the outputs if scaled weights are rounded as `round_weighted` does."""
    total, importance_I = 0.0, (rows_TI / scales_I).square().mean(0)
    for matrix in matrices:
        difference = matrix - _rounded(matrix * scales_I, grid, importance_I) / scales_I
        total += float((rows_TI @ difference.T).double().square().sum())
    return total


def _activations_score(
    rows_TI: torch.Tensor, matrices: Sequence[torch.Tensor], scales_I: torch.Tensor, grid: Grid
) -> float:
    """The same with inputs rounded to 8 bits, a scale for each token."""
    scaled_TI = rows_TI / scales_I
    step_T1 = scaled_TI.abs().amax(-1, keepdim=True).clamp(min=_TINY) / _ACTIVATION_LIMIT
    rounded_TI = (scaled_TI / step_T1).round() * step_T1
    total = 0.0
    for matrix in matrices:
        found = rounded_TI @ _rounded(matrix * scales_I, grid, torch.ones_like(scales_I)).T
        total += float((found - rows_TI @ matrix.T).double().square().sum())
    return total


def _rounded(w_OI: torch.Tensor, grid: Grid, importance_I: torch.Tensor) -> torch.Tensor:
    steps = grid.fit(w_OI, importance_I)
    spread = steps.spread(torch.arange(w_OI.shape[1]), grid.group_size)
    return grid.values(grid.codes(w_OI, *spread), *spread)
