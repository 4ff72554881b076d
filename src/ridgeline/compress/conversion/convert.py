"""Converting the attention of a model folder, layer by layer, into a new one.

Each layer is converted on what the layers before it, converted already, give it (`layerwise`).
Nothing is trained: `distill` heals what this writes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

import ridgeline
from ridgeline.compress.block_forward import BlockForward, layer_ops, single_layers
from ridgeline.compress.calibration import CalibrationText
from ridgeline.compress.conversion.configs import converted_config
from ridgeline.compress.conversion.heads import (
    Moments,
    Part,
    key_parts,
    merged,
    mix,
    read_from,
    value_parts,
)
from ridgeline.compress.conversion.merging import groups_of_heads, likeness_of
from ridgeline.compress.conversion.recipe import ConversionRecipe
from ridgeline.compress.layers import LayeredModel, Run
from ridgeline.compress.layerwise import (
    LayerInputs,
    Progress,
    check_finite,
    outside_layers,
    write_layers,
)
from ridgeline.compress.memory import MemoryNeed, memory_need
from ridgeline.compress.output import OutputFolder
from ridgeline.compress.quantize import check_source
from ridgeline.core import ops
from ridgeline.core.arrays import Array
from ridgeline.core.cache_groups import kv_groups
from ridgeline.core.spec import AttentionSpec
from ridgeline.evaluation import Document
from ridgeline.kernels.tensors import as_array
from ridgeline.models import lower, read_config
from ridgeline.weights import Checkpoint, stored_tensors
from ridgeline.weights.digest import content_digest

_Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionReport:
    """What was done. Elements of K and V are those of a token in all layers."""

    path: Path
    kv_elements_before: int
    kv_elements: int
    weights_bytes: int


def convert(
    model: LayeredModel,
    out: Path,
    recipe: ConversionRecipe,
    text: CalibrationText | None,
    *,
    resume: bool = False,
    progress: Progress | None = None,
    announce: Callable[[MemoryNeed], None] | None = None,
) -> ConversionReport:
    """Convert the attention of ``model`` into the new folder ``out``.

    ``text`` is needed where K and V change. With ``resume``, what an earlier run with the same
    model, text and recipe has done is kept, and the bytes are those of one run.

    Raises:
        SettingsError: ``out`` exists; or is to be gone on with, and is from something else; or
            heads are no whole groups.
        UnsupportedModelError: the model is quantized, its attention is of another kind, or no
            config can say what would be made.
        CorruptFileError: a weight is not finite.
        OutOfMemoryError: it does not fit into memory.
        DiskError: a file cannot be read or written.
    """
    check_source(model)
    spec = model.loaded.definition.spec
    config, definition = converted_config(read_config(model.stored.path), spec, recipe)
    windows = text.windows if text is not None and recipe.is_calibrated else ()
    new_ops = lower(definition.spec)
    together = replace(model, runs=_together(model, new_ops))
    need = memory_need(together, [{} for _ in together.runs], windows, is_calibrated=bool(windows))
    if announce is not None:
        announce(need)
    need.check("share 1")
    identity = {
        "ridgeline": ridgeline.__version__,
        "convert": asdict(recipe),
        "model": content_digest([model.stored.path]),
        "calibration": text.digest if text is not None and windows else None,
    }
    folder = OutputFolder(out, identity, resume=resume)
    if not folder.is_complete:
        with Checkpoint(model.stored.path) as checkpoint:
            conversion = _Conversion(together, new_ops, recipe, windows, folder)

            def change(run: int) -> tuple[Mapping[str, Array], None]:
                arrays = {name: as_array(each) for name, each in conversion.run(run).items()}
                return stored_tensors(arrays, definition.sources, checkpoint), None

            outside = outside_layers(model, checkpoint)
            write_layers(conversion.inputs, folder, change, outside, progress)
        folder.finish(model.stored.path, config)
    before, after = (
        sum(group.elements_per_token for group in kv_groups(each))
        for each in (spec, definition.spec)
    )
    return ConversionReport(
        path=out,
        kv_elements_before=before,
        kv_elements=after,
        weights_bytes=folder.weights_bytes,
    )


def _layers_of(new_ops: Sequence[ops.Op]) -> list[list[int]]:
    """The layers of each run, counted from 1 as runs are."""
    sizes = [len(layer) for layer in single_layers(new_ops)]
    found, layers = list[list[int]](), iter(range(len(sizes)))
    for run in layer_ops(new_ops):
        found.append([])
        while sum(sizes[layer] for layer in found[-1]) < len(run):
            found[-1].append(next(layers))
    return found


def _together(model: LayeredModel, new_ops: Sequence[ops.Op]) -> tuple[Run, ...]:
    """The ops of a model, in runs of layers that will share K and V."""
    old = single_layers(model.loaded.model.ops)
    return tuple(
        tuple(op for layer in layers for op in old[layer]) for layers in _layers_of(new_ops)
    )


class _Conversion:
    """Layers that will share K and V are converted together, as one run of ``model``."""

    def __init__(
        self,
        model: LayeredModel,
        new_ops: Sequence[ops.Op],
        recipe: ConversionRecipe,
        windows: Sequence[Document],
        folder: OutputFolder,
    ) -> None:
        self._recipe, self._spec = recipe, model.loaded.definition.spec
        self._old = single_layers(model.loaded.model.ops)
        self._new = single_layers(new_ops)
        self._layers_of = _layers_of(new_ops)
        self._model = model
        self.inputs = LayerInputs(model, windows, folder)

    @torch.no_grad()
    def run(self, run: int) -> _Weights:
        """The weights of a run's layers, converted; the streams behind them are written."""
        weights, done = self._model.weights(run), list[ops.Op]()
        for name, values in weights.items():
            check_finite(name, as_array(values))
        for layer in self._layers_of[run]:
            if self._recipe.is_calibrated:
                self._convert(run, layer, tuple(done), weights)
            done += self._new[layer]
        self.inputs.write_behind(run, weights, tuple(done))
        return weights

    def _convert(self, run: int, layer: int, done: Run, weights: _Weights) -> None:
        """Convert the heads of a layer behind those that are ``done``, in place."""
        spec = self._spec.layers[layer - 1].attention
        assert isinstance(spec, AttentionSpec)
        project, _ = _attention(self._old[layer])
        new_project, new_attend = _attention(self._new[layer])
        (output,) = (op for op in self._old[layer] if isinstance(op, ops.OutProject))
        source = new_attend.layer if new_project.key is None else None
        parts = key_parts(spec), value_parts(spec)
        keys, values, asked = self._moments(run, layer, source, done, weights, parts)
        asking = Moments(parts[1])
        asking.add(weights[output.weight.name].reshape(-1, spec.num_heads, spec.head_dim))
        groups = self._groups(keys, values, spec.num_kv_heads, new_attend.num_kv_heads, source)
        merges = [
            [
                merged(moments, readers, group, self._recipe.merge)
                if source is None
                else read_from(moments, group, spec.num_kv_heads + index, self._recipe.merge)
                for index, group in enumerate(groups)
            ]
            for moments, readers in ((keys, asked), (values, asking))
        ]
        shape = spec.num_kv_heads, spec.head_dim
        for old, which in (
            (project.key, 0),
            (project.key_bias, 0),
            (project.value, 1),
            (project.value_bias, 1),
        ):
            if old is not None:
                weight = weights.pop(old.name)
                if source is None:
                    made = [
                        (group, merge.down)
                        for group, merge in zip(groups, merges[which], strict=True)
                    ]
                    weights[old.name] = _mixed(weight, shape, parts[which], made)
        queries, shape = spec.num_heads // spec.num_kv_heads, (spec.num_heads, spec.head_dim)
        for reader, which in ((project.query, 0), (project.query_bias, 0), (output.weight, 1)):
            if reader is not None:
                turned = [
                    ([head * queries + query], merge.turn(place))
                    for group, merge in zip(groups, merges[which], strict=True)
                    for place, head in enumerate(group)
                    for query in range(queries)
                ]
                weights[reader.name] = _mixed(
                    weights[reader.name],
                    shape,
                    parts[which],
                    turned,
                    columns=reader is output.weight,
                )

    def _moments(
        self,
        run: int,
        layer: int,
        source: int | None,
        done: Run,
        weights: _Weights,
        parts: tuple[tuple[Part, ...], tuple[Part, ...]],
    ) -> tuple[Moments, Moments, Moments]:
        """Of the layer's K and V, and behind them those of the layer that it will read.

        K is as it is kept: positions turn what is compared by one angle.
        """
        own = self._old[layer]
        write = next(i for i, op in enumerate(own) if isinstance(op, ops.KVWrite))
        found, asked = (Moments(parts[0]), Moments(parts[1])), Moments(parts[0])
        for x_TD, window in self.inputs.of_layer(run):
            forward = BlockForward(weights, [window], x_TD=x_TD)
            forward.run((*done, *own[: write + 1]))
            asked.add(forward.buffers["q"])
            for place, moments in enumerate(found):
                heads = [forward.kv[layer - 1][place]]
                if source is not None:
                    heads.append(forward.kv[source][place])
                moments.add(torch.cat([each for each in heads if each is not None], dim=1))
        return *found, asked

    def _groups(
        self, keys: Moments, values: Moments, count: int, new: int, source: int | None
    ) -> list[list[int]]:
        """Which old heads become each new one."""
        if self._recipe.merge in ("mean", "first"):
            size = count // new
            return [list(range(first, first + size)) for first in range(0, count, size)]
        return groups_of_heads(_likeness(keys, count) + _likeness(values, count), new)


def _attention(layer: Run) -> tuple[ops.QKVProject, ops.Attend]:
    (project,) = (op for op in layer if isinstance(op, ops.QKVProject))
    (attend,) = (op for op in layer if isinstance(op, ops.Attend))
    return project, attend


def _mixed(
    weight: torch.Tensor,
    shape: tuple[int, int],
    parts: Sequence[Part],
    made: Sequence[tuple[Sequence[int], Sequence[torch.Tensor]]],
    *,
    columns: bool = False,
) -> torch.Tensor:
    """A weight whose rows (or columns) are heads of ``shape``, each new one ``made`` of some old
    ones by a matrix for each part."""
    rows = weight if columns else weight.movedim(0, -1)
    x_RHd = rows.reshape(-1, *shape)
    heads = [mix(parts, matrices, x_RHd[:, list(group)]) for group, matrices in made]
    found = torch.cat(heads, dim=1).flatten(1)
    return found if columns else found.T.reshape(-1, *weight.shape[1:]).contiguous()


def _likeness(moments: Moments, count: int) -> torch.Tensor:
    """`likeness_of` the first heads in all parts, as a share of the largest."""
    total = torch.zeros(count, count, dtype=torch.float64)
    for place, part in enumerate(moments.parts):
        rows = count * part.width
        total += likeness_of(moments.of(place)[:, :rows, :rows], part.width)
    return total / total.max()
