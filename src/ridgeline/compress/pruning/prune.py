"""Pruning a model folder, layer by layer, into a new one.

Each layer is pruned on what the layers before it, pruned already, give it; and within a layer each
matrix on what those before it do (`layerwise`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import ridgeline
from ridgeline.compress.block_forward import Key, layer_ops
from ridgeline.compress.calibration import CalibrationText
from ridgeline.compress.hessian import Curvature
from ridgeline.compress.layers import LayeredModel, input_groups
from ridgeline.compress.layerwise import (
    LayerInputs,
    Progress,
    check_finite,
    outside_layers,
    write_layers,
)
from ridgeline.compress.memory import MemoryNeed, memory_need
from ridgeline.compress.output import OutputFolder
from ridgeline.compress.pruning.masks import mask_of
from ridgeline.compress.pruning.recipe import PruneRecipe
from ridgeline.compress.pruning.sparsegpt import prune_sparsegpt
from ridgeline.compress.pruning.structure import (
    Structure,
    cut,
    group_errors,
    least_layers,
    refit,
    renamed,
    smaller_config,
)
from ridgeline.compress.quantize import check_source
from ridgeline.compress.tensors import products
from ridgeline.core import ops
from ridgeline.core.arrays import Array
from ridgeline.core.cache_groups import shares_kv
from ridgeline.core.errors import SettingsError, UnsupportedModelError
from ridgeline.core.spec import AttentionSpec, MLPSpec
from ridgeline.evaluation import Document
from ridgeline.kernels.tensors import as_array
from ridgeline.models import lower, read_config
from ridgeline.weights import Checkpoint, stored_tensors
from ridgeline.weights.digest import content_digest

_PRIME = 100_003  # so that layers and seeds have random numbers of their own
Notes = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport:
    """What was done.

    Attributes:
        notes: of each changed matrix, by canonical name: ``zeros``, the share of them, and
            ``fallback`` where its inputs had no inverse and it was pruned by Wanda's scores; or
            ``error``, what its cut inputs took of its outputs' square.
        removed_layers: by their old numbers.
        weights_bytes: of all tensors that were written.
    """

    path: Path
    notes: Mapping[str, Notes]
    removed_layers: tuple[int, ...]
    weights_bytes: int

    @property
    def sparsity(self) -> float:
        """The mean share of zeros."""
        shares: list[float] = [note["zeros"] for note in self.notes.values() if "zeros" in note]
        return sum(shares) / max(1, len(shares))


def prune(
    model: LayeredModel,
    out: Path,
    recipe: PruneRecipe,
    text: CalibrationText | None,
    *,
    resume: bool = False,
    progress: Progress | None = None,
    announce: Callable[[MemoryNeed], None] | None = None,
) -> PruneReport:
    """Prune ``model`` into the new folder ``out``.

    ``announce`` is told of the memory that it takes before it starts. ``text`` is needed by methods
    that are calibrated. With ``resume``, what an earlier run with the same model, text and recipe
    has done is kept, and the bytes are those of one run.

    Raises:
        SettingsError: ``out`` exists; or is to be gone on with, and is from something else; or
            nothing would be left.
        UnsupportedModelError: the model is quantized, or its config cannot say what would be left.
        CorruptFileError: a weight is not finite.
        OutOfMemoryError: it does not fit into memory.
        DiskError: a file cannot be read or written.
    """
    check_source(model)
    if shares_kv(model.loaded.definition.spec):
        raise UnsupportedModelError(
            "Layers of this model read K and V of others: it is not pruned; prune the model that "
            "it was made of."
        )
    windows = text.windows if text is not None and recipe.is_calibrated else ()
    matrices = [products(run) for run in model.runs]
    need = memory_need(model, matrices, windows, is_calibrated=recipe.is_calibrated)
    if announce is not None:
        announce(need)
    need.check("method magnitude")
    identity = {
        "ridgeline": ridgeline.__version__,
        "prune": asdict(recipe),
        "model": content_digest([model.stored.path]),
        "calibration": text.digest if text is not None and recipe.is_calibrated else None,
    }
    folder = OutputFolder(out, identity, resume=resume)
    removed: tuple[int, ...] = ()
    if recipe.remove_layers:
        num_layers = len(model.runs) - 2
        if recipe.remove_layers >= num_layers:
            raise SettingsError(f"remove_layers must be below {num_layers}, the layers here.")
        removed = tuple(sorted(_layers_to_remove(model, recipe, windows)))
    if not folder.is_complete:
        with Checkpoint(model.stored.path) as checkpoint:
            _Pruning(model, checkpoint, recipe, windows, folder, progress, removed).run()
    return PruneReport(
        path=out,
        notes={name: note for notes in folder.notes for name, note in notes.items()},
        removed_layers=removed,
        weights_bytes=folder.weights_bytes,
    )


def _layers_to_remove(
    model: LayeredModel, recipe: PruneRecipe, windows: Sequence[Document]
) -> list[int]:
    if recipe.method == "random":
        generator = torch.Generator().manual_seed(recipe.seed)
        order = torch.randperm(len(model.runs) - 2, generator=generator)
        return [int(layer) for layer in order[: recipe.remove_layers]]
    return least_layers(model, windows, recipe.remove_layers)


class _Pruning:
    """One run over the layers that stay, from the first that is not done."""

    def __init__(
        self,
        model: LayeredModel,
        checkpoint: Checkpoint,
        recipe: PruneRecipe,
        windows: Sequence[Document],
        folder: OutputFolder,
        progress: Progress | None,
        removed: tuple[int, ...],
    ) -> None:
        spec = model.loaded.definition.spec
        every = range(len(spec.layers))
        self._kept = [layer for layer in every if layer not in removed]
        structure = Structure.of(spec, recipe, self._kept)
        config = read_config(model.stored.path)
        self._config, self._definition = smaller_config(config, spec, structure)
        # Every layer's ops once it is cut, under its old number.
        same = replace(structure, layers=tuple(every)).spec(spec)
        self._cut_runs = layer_ops(lower(same))
        self._model = replace(
            model, runs=tuple(model.runs[i] for i in (0, *(k + 1 for k in self._kept), -1))
        )
        self._source, self._checkpoint, self._recipe = model, checkpoint, recipe
        self._structure, self._folder, self._progress = structure, folder, progress
        self._inputs = LayerInputs(self._model, windows, folder)

    @torch.no_grad()
    def run(self) -> None:
        outside = outside_layers(self._source, self._checkpoint)
        write_layers(self._inputs, self._folder, self._layer, outside, self._progress)
        self._folder.finish(self._source.stored.path, self._config)

    def _layer(self, layer: int) -> tuple[dict[str, Array], dict[str, Notes]]:
        """Prune a layer that stays, and write the streams behind it; its tensors."""
        old = self._kept[layer - 1]
        run, weights = self._model.runs[layer], self._model.weights(layer)
        for name, values in weights.items():
            check_finite(name, as_array(values))
        if self._recipe.is_structured:
            notes, behind = self._cut(layer, weights), self._cut_runs[old + 1]
        else:
            notes, behind = self._mask(layer, weights), run
        self._inputs.write_behind(layer, weights, behind)
        arrays = {
            name: as_array(values) for name, values in renamed(weights, old, layer - 1).items()
        }
        return stored_tensors(arrays, self._definition.sources, self._checkpoint), notes

    def _mask(self, layer: int, weights: dict[str, torch.Tensor]) -> dict[str, Notes]:
        """Make weights of a layer zero, in place."""
        run, recipe, notes = self._model.runs[layer], self._recipe, dict[str, Notes]()
        generator = torch.Generator().manual_seed(recipe.seed * _PRIME + layer)
        wanted = products(run)

        def change(key: Key, curvature: Curvature | None) -> None:
            name, index = key
            weight = weights[name] if index is None else weights[name][index]
            label = name if index is None else f"{name}[{index}]"
            if curvature is not None and curvature.factor_II is not None:
                mask = prune_sparsegpt(weight, curvature, recipe)
            else:
                hessian = None if curvature is None else curvature.hessian_II
                mask = mask_of(weight, hessian, recipe, generator)
                weight[mask] = 0.0
            notes[label] = {"zeros": float(mask.float().mean())}
            if recipe.method == "sparsegpt" and (curvature is None or curvature.factor_II is None):
                notes[label]["fallback"] = True

        if not self._inputs.windows:
            for name, places in wanted.items():
                for index in places:
                    change((name, index), None)
            return notes
        for group in input_groups(run, weights, *self._inputs.first(layer)):
            names = [name for name in group.names if name in wanted]
            if names:
                for index, curvature, _ in self._inputs.curvatures(
                    layer, group.ops, weights, names[0], self._curvature
                ):
                    for name in names:
                        change((name, index), curvature)
        return notes

    def _curvature(self, hessian_II: torch.Tensor) -> Curvature:
        if self._recipe.method == "wanda":
            return Curvature.plain(hessian_II)
        return Curvature.of(hessian_II, by_diagonal=False)

    def _cut(self, layer: int, weights: dict[str, torch.Tensor]) -> dict[str, Notes]:
        """Take heads and then channels of a layer away; weights of what is left replace those."""
        old = self._kept[layer - 1]
        spec = self._source.loaded.definition.spec.layers[old]
        notes, current = dict[str, Notes](), list(self._model.runs[layer])
        if self._structure.kv_heads is not None:
            assert isinstance(spec.attention, AttentionSpec)
            heads = spec.attention.num_kv_heads, self._structure.kv_heads
            notes |= self._cut_groups(layer, weights, current, ops.OutProject, *heads)
        if self._structure.ffn_width is not None:
            assert isinstance(spec.mlp, MLPSpec)
            widths = spec.mlp.width, self._structure.ffn_width
            notes |= self._cut_groups(layer, weights, current, ops.MLP, *widths)
        return notes

    def _cut_groups(
        self,
        layer: int,
        weights: dict[str, torch.Tensor],
        current: list[ops.Op],
        reader: type[ops.MLP] | type[ops.OutProject],
        num_groups: int,
        num_kept: int,
    ) -> dict[str, Notes]:
        """Keep some groups of inputs of the matrix that ``reader`` multiplies with last.

        Changes the weights, and ``current`` to the ops on those.
        """
        (op,) = (each for each in current if isinstance(each, reader))
        name = op.down.name if isinstance(op, ops.MLP) else op.weight.name
        ((_, curvature, _),) = self._inputs.curvatures(
            layer, tuple(current), weights, name, Curvature.plain
        )
        w_OI, hessian_II = weights[name], curvature.hessian_II
        if self._recipe.method == "random":
            generator = torch.Generator().manual_seed(self._recipe.seed * _PRIME + layer)
            errors_G = torch.rand(num_groups, generator=generator)
        else:
            errors_G = group_errors(w_OI, hessian_II, num_groups)
        kept_G = errors_G.argsort(descending=True, stable=True)[:num_kept].sort().values
        kept_I = torch.arange(w_OI.shape[1]).view(num_groups, -1)[kept_G].flatten()
        found_OK = refit(w_OI, hessian_II, kept_I)
        lost_OI = w_OI.clone()
        lost_OI[:, kept_I] -= found_OK
        squares = [((each @ hessian_II) * each).sum() for each in (lost_OI, w_OI)]
        of_ffn = reader is ops.MLP
        cut_run = self._cut_runs[self._kept[layer - 1] + 1]
        places = [i for i, each in enumerate(current) if isinstance(each, ops.MLP) is of_ffn]
        cut(weights, [(current[i], cut_run[i]) for i in places], kept_G, num_groups)
        for i in places:
            current[i] = cut_run[i]
        weights[name] = found_OK
        return {name: {"error": float(squares[0] / squares[1])}}
