"""Bits by sensitivity: more for the matrices whose rounding changes the model's output most.

What rounding does to the model is predicted to second order. With x the inputs of a matrix, d the
change of one of its rows and g the gradient of log p(y), y drawn from the model itself, by the
row's output, KL(model ‖ rounded) ≈ ½ Σ E[g²] · E[(d·x)²] over the rows: the Fisher information,
with inputs and gradients taken to be independent, as K-FAC does (Martens and Grosse 2015, arXiv
1503.05671), and rows too. One pass up and one down the layers gives all of it, with one layer in
memory at a time. That other experts may be chosen is not in it.

Shapes: T tokens, D hidden width, O outputs and I inputs of a matrix.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ridgeline.compress.block_forward import BlockForward, Key, seeing_inputs
from ridgeline.compress.gptq import round_nearest, rows_at_once
from ridgeline.compress.layers import LayeredModel, Run
from ridgeline.compress.layerwise import Progress
from ridgeline.compress.memory import MOST_MIXING_WINDOWS
from ridgeline.compress.recipe import Recipe
from ridgeline.compress.tensors import TensorPlan
from ridgeline.core.errors import SettingsError
from ridgeline.evaluation import Document


@dataclass(slots=True)
class Unit:
    """Weights that have the same bits, since they are stored as one or read the same rows.

    By bits of a code, ``kl`` is the predicted divergence of a token in nats, and ``bits`` what all
    weights take.
    """

    weights: frozenset[str]
    size: int = 0
    kl: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    bits: Counter[int] = field(default_factory=Counter)


def choose_bits(
    model: LayeredModel,
    plan: TensorPlan,
    recipe: Recipe,
    windows: Sequence[Document],
    progress: Progress | None = None,
) -> dict[str, int]:
    """The bits of each weight that is quantized, ``recipe.bits_per_weight`` on average at the most.

    Raises:
        SettingsError: even the fewest bits are more than that.
    """
    assert recipe.bits_per_weight is not None
    units = sensitivities(model, plan, recipe, windows, progress)
    chosen = allocate(units, recipe.bits_per_weight)
    return {name: bits for unit, bits in zip(units, chosen, strict=True) for name in unit.weights}


def allocate(units: Sequence[Unit], bits_per_weight: float) -> list[int]:
    """For each unit the bits of a code with the least sum of predicted divergences: from the fewest
    on, again and again the step that gains most for a bit, as long as there is room.

    Raises:
        SettingsError: there is no room for the fewest.
    """
    size = sum(unit.size for unit in units)
    chosen = [min(unit.bits) for unit in units]
    used = sum(unit.bits[bits] for unit, bits in zip(units, chosen, strict=True))
    if used > bits_per_weight * size:
        raise SettingsError(
            f"bits_per_weight is {bits_per_weight:g}; the fewest bits here are {used / size:.3f}."
        )
    while True:
        room = bits_per_weight * size - used
        steps = [
            ((unit.kl[now] - unit.kl[more]) / (unit.bits[more] - unit.bits[now]), number, more)
            for number, (unit, now) in enumerate(zip(units, chosen, strict=True))
            for more in unit.bits
            if more > now and unit.bits[more] - unit.bits[now] <= room
        ]
        gain, number, more = max(steps, default=(0.0, 0, 0))
        if gain <= 0.0:
            return chosen
        used += units[number].bits[more] - units[number].bits[chosen[number]]
        chosen[number] = more


def sensitivities(
    model: LayeredModel,
    plan: TensorPlan,
    recipe: Recipe,
    windows: Sequence[Document],
    progress: Progress | None = None,
) -> list[Unit]:
    """All units of a model, with what rounding to the nearest is predicted to do to it."""
    windows = windows[:MOST_MIXING_WINDOWS]
    streams = _streams(model, windows)
    gradients = _behind_head(model, streams.pop(), windows, recipe.seed)
    units: list[Unit] = []
    num_layers = len(model.runs) - 2
    for layer in range(num_layers, 0, -1):
        weights = model.weights(layer)
        seen = _Seen(weights, plan)
        gradients = [
            seen.backward(model.runs[layer], weights, window, x_TD, gradient_TD)
            for window, x_TD, gradient_TD in zip(windows, streams.pop(), gradients, strict=True)
        ]
        units = [*seen.units(recipe), *units]
        if progress is not None:
            progress(num_layers + 1 - layer, num_layers, "which layers need more bits")
    return units


@torch.no_grad()
def _streams(model: LayeredModel, windows: Sequence[Document]) -> list[list[torch.Tensor]]:
    """The residual streams ``[T, D]`` of all windows behind each run but the last."""
    found: list[list[torch.Tensor]] = []
    for run, some_ops in enumerate(model.runs[:-1]):
        weights, before = model.weights(run), found[-1] if found else [None] * len(windows)
        found.append(
            [
                BlockForward(weights, [window], x_TD=x_TD).run(some_ops)
                for window, x_TD in zip(windows, before, strict=True)
            ]
        )
    return found


def _behind_head(
    model: LayeredModel, streams: list[torch.Tensor], windows: Sequence[Document], seed: int
) -> list[torch.Tensor]:
    """Gradients by the last streams of Σ log p of tokens that the model draws."""
    weights = model.weights(len(model.runs) - 1)
    generator = torch.Generator().manual_seed(seed & (1 << 63) - 1)
    found = []
    for window, x_TD in zip(windows, streams, strict=True):
        x_TD = x_TD.requires_grad_()
        forward = BlockForward(weights, [window], x_TD=x_TD)
        forward.run(model.runs[-1])
        log_p = forward.buffers["logits"].log_softmax(-1)
        drawn = torch.multinomial(log_p.detach().exp(), 1, generator=generator)
        (gradient_TD,) = torch.autograd.grad(log_p.gather(1, drawn).sum(), x_TD)
        found.append(gradient_TD)
    return found


class _Seen:
    """What the matrices of a layer multiply, and the squares of their gradients."""

    def __init__(self, weights: Mapping[str, torch.Tensor], plan: TensorPlan) -> None:
        self._plan, self._weights = plan, weights
        self._watched = {name: weights[name] for name in weights if name in plan.quantized}
        self._inputs: dict[Key, list[torch.Tensor]] = {}
        self._squares = {name: torch.zeros(w.shape[:-1]) for name, w in self._watched.items()}
        self._together = [frozenset({name}) for name in self._watched]
        self._num_tokens = 0

    def backward(
        self,
        run: Run,
        weights: Mapping[str, torch.Tensor],
        window: Document,
        x_TD: torch.Tensor,
        gradient_TD: torch.Tensor,
    ) -> torch.Tensor:
        """Note a window's inputs and gradients; the gradient before the layer."""
        rows: dict[int, set[str]] = {}

        def see(key: Key, x_TI: torch.Tensor) -> None:
            self._inputs.setdefault(key, []).append(x_TI.detach())
            rows.setdefault(x_TI.data_ptr(), set()).add(key[0])

        leaves = [x_TD.requires_grad_(), *(w.requires_grad_() for w in self._watched.values())]
        with seeing_inputs(self._watched, see):
            forward = BlockForward(weights, [window], x_TD=leaves[0])
            behind_TD = forward.run(run)
        before_TD, *of_weights = torch.autograd.grad(
            behind_TD, leaves, gradient_TD, allow_unused=True
        )
        for name, gradient in zip(self._watched, of_weights, strict=True):
            if gradient is not None:
                self._squares[name] += gradient.square().sum(-1)
        self._together += [frozenset(names) for names in rows.values()]
        self._num_tokens += len(x_TD)
        return before_TD

    @torch.no_grad()
    def units(self, recipe: Recipe) -> list[Unit]:
        stored = [frozenset(name for name, _ in t.matrices) for t in self._plan.tensors]
        own = [names for names in stored if names & self._watched.keys()]
        units = [Unit(weights=names) for names in _joined([*self._together, *own])]
        for unit in units:
            for name in sorted(unit.weights):
                self._measure(unit, name, recipe)
        return units

    def _measure(self, unit: Unit, name: str, recipe: Recipe) -> None:
        weight = self._watched[name].detach()
        unit.size += weight.numel()
        indices = range(len(weight)) if weight.ndim == 3 else [None]
        for bits in recipe.choices:
            grid = recipe.grid(weight.shape[-1], bits)
            assert grid is not None, "it would have been left"
            unit.bits[bits] += int(recipe.stored_bits(bits) * weight.numel())
            for index in indices:
                if (name, index) not in self._inputs:
                    continue  # no token reached the expert
                w_OI = weight if index is None else weight[index]
                squares_O = self._squares[name] if index is None else self._squares[name][index]
                x_TI = torch.cat(self._inputs[name, index])
                change_OI = round_nearest(w_OI, grid, None).values_OI - w_OI
                errors_O = torch.cat(
                    [
                        (x_TI @ rows.T).square().sum(0)
                        for rows in torch.split(change_OI, rows_at_once(w_OI.shape[1]))
                    ]
                )
                scale = 2 * x_TI.square().sum() * self._num_tokens
                unit.kl[bits] += float((squares_O * errors_O).sum() / scale)


def _joined(sets: Sequence[frozenset[str]]) -> list[frozenset[str]]:
    """Sets that have something in common become one."""
    found: list[frozenset[str]] = []
    for each in sets:
        touched = [other for other in found if other & each]
        found = [other for other in found if not other & each]
        found.append(each.union(*touched))
    return found
