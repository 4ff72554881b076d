"""Quantizing a model folder, layer by layer, into a new one.

Each layer is rounded on what the layers before it, rounded already, give it; and within a layer
each matrix on what those before it do (`layerwise`).
"""

import math
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

import ridgeline
from ridgeline.compress.block_forward import Key
from ridgeline.compress.calibration import CalibrationText
from ridgeline.compress.gguf_file import GGUFTarget, block_name
from ridgeline.compress.gptq import RoundedMatrix, round_gptq, round_nearest, round_weighted
from ridgeline.compress.grids import Blocks, Grid
from ridgeline.compress.hessian import Curvature
from ridgeline.compress.layers import LayeredModel, Run, input_groups
from ridgeline.compress.layerwise import LayerInputs, Progress, check_finite, write_layers
from ridgeline.compress.memory import MemoryNeed, memory_need
from ridgeline.compress.mixing import choose_bits
from ridgeline.compress.output import OutputFolder
from ridgeline.compress.recipe import Recipe
from ridgeline.compress.smoothing import changed_weights, smooth
from ridgeline.compress.tensors import (
    OUTSIDE,
    GridOf,
    StoredTensor,
    TensorPlan,
    matrices_by_weight,
    plan_tensors,
)
from ridgeline.compress.tuning import LatentMatrix, tune
from ridgeline.compress.writing import quantized_config, quantized_parts
from ridgeline.core.arrays import Array, cast
from ridgeline.core.errors import UnsupportedModelError
from ridgeline.kernels.tensors import as_array, torch_dtype
from ridgeline.models import read_config
from ridgeline.weights import Checkpoint, weight_shapes
from ridgeline.weights.digest import content_digest

Notes = dict[str, dict[str, Any]]
"""Of each quantized matrix: the errors of its outputs, and what was seen of its inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationReport:
    """What was done.

    Attributes:
        notes: of each quantized matrix, by name: ``error`` and ``nearest_error`` of its outputs,
            ``tokens`` and ``dead`` inputs that were seen, ``fallback`` if it was rounded to the
            nearest all the same, ``unseen`` if no token reached it, ``tuned`` with the error that
            tuning left of its layer's outputs. None of a GGUF file that was finished before.
        left: tensors of layers that stay as they are, and why.
        weights_bytes: of all tensors that were written.
        num_weights: that are quantized, by the bits of their codes, where these were chosen.
        bits_per_weight: of those on average, with their scales.
    """

    path: Path
    notes: Notes
    left: Mapping[str, str]
    weights_bytes: int
    num_weights: Mapping[int, int] = field(default_factory=dict)
    bits_per_weight: float = 0.0

    @property
    def error_ratio(self) -> float:
        """The mean of the matrices' errors over those of rounding to the nearest."""
        ratios: list[float] = [
            note["error"] / note["nearest_error"]
            for note in self.notes.values()
            if note["nearest_error"]
        ]
        return sum(ratios) / max(len(ratios), 1)


def quantize(
    model: LayeredModel,
    out: Path,
    recipe: Recipe,
    text: CalibrationText | None,
    *,
    resume: bool = False,
    progress: Progress | None = None,
    announce: Callable[[MemoryNeed], None] | None = None,
) -> QuantizationReport:
    """Quantize ``model`` into the new folder ``out``, or the new file if that is GGUF.

    A GGUF file is written once all layers are there; until then they are in ``out``.parts.
    ``announce`` is told of the memory that it takes before it starts. ``text`` is needed by methods
    that are calibrated. With ``resume``, what an earlier run with the same model, text and recipe
    has done is kept, and the bytes are those of one run.

    Raises:
        SettingsError, InvalidRequestError: ``out`` exists; or is to be gone on with, and is from
            something else.
        UnsupportedModelError: the model is quantized already, or cannot be.
        CorruptFileError: a weight is not finite.
        OutOfMemoryError: it does not fit into memory.
        DiskError: a file cannot be read or written.
    """
    check_source(model)
    identity = {
        "ridgeline": ridgeline.__version__,
        "recipe": asdict(recipe),
        "model": content_digest([model.stored.path]),
        "calibration": text.digest if text is not None and recipe.is_calibrated else None,
    }
    target, grid_of, shards = None, _grids(recipe), out
    if recipe.format == "gguf":
        shards = out.with_name(f"{out.name}.parts")
        if resume and GGUFTarget.is_finished(out, identity):
            shutil.rmtree(shards, ignore_errors=True)
            return QuantizationReport(path=out, notes={}, left={}, weights_bytes=out.stat().st_size)
        target = GGUFTarget.of(model, out, recipe.gguf_type, identity)
        grid_of = target.grid_of
    with Checkpoint(model.stored.path) as checkpoint:
        plan = plan_tensors(model, checkpoint, grid_of)
        windows = text.windows if text is not None and recipe.is_calibrated else ()
        need = memory_need(
            model,
            [matrices_by_weight(plan, run) for run in range(len(model.runs))],
            windows,
            is_calibrated=recipe.is_calibrated,
            is_mixed=recipe.bits_per_weight is not None,
            is_tuned=recipe.tune > 0,
        )
        if announce is not None:
            announce(need)
        need.check("method rtn")
        folder = OutputFolder(shards, identity, resume=resume)
        bits: dict[str, int] = {}
        if recipe.bits_per_weight is not None:
            bits = folder.kept("bits", lambda: choose_bits(model, plan, recipe, windows, progress))
            grid_of = _grids(recipe, bits)
        if not folder.is_complete:
            _Quantization(model, checkpoint, plan, recipe, grid_of, windows, folder, progress).run()
        num_bytes = folder.weights_bytes
        if target is not None:
            num_bytes = target.write(model, plan, shards)
            shutil.rmtree(shards, ignore_errors=True)
        elif not folder.is_complete:
            config = read_config(model.stored.path)
            folder.finish(
                model.stored.path,
                {**config, "quantization_config": quantized_config(recipe, plan, bits)},
            )
    return QuantizationReport(
        path=out,
        notes={name: note for notes in folder.notes for name, note in notes.items()},
        left={each.name: each.left for each in plan.tensors if each.left is not None},
        weights_bytes=num_bytes,
        **_mix(model, recipe, bits),
    )


def _mix(model: LayeredModel, recipe: Recipe, bits: Mapping[str, int]) -> dict[str, Any]:
    shapes, found = weight_shapes(model.loaded.model.ops), Counter[int]()
    for name, each in bits.items():
        found[each] += math.prod(shapes[name])
    stored = sum(recipe.stored_bits(each) * size for each, size in found.items())
    return {"num_weights": found, "bits_per_weight": stored / max(found.total(), 1)}


def _grids(recipe: Recipe, bits: Mapping[str, int] = MappingProxyType({})) -> GridOf:
    return lambda name, columns: recipe.grid(columns, bits.get(name))


def check_source(model: LayeredModel) -> None:
    """
    Raises:
        UnsupportedModelError: the model is quantized already, or no folder of safetensors.
    """
    path = model.stored.path
    expanding = f"ridgeline convert {path} FLOATS --format safetensors expands it."
    if not path.is_dir():
        raise UnsupportedModelError(
            f"{path} is a GGUF file, and this starts from a folder of safetensors; {expanding}"
        )
    if model.stored.quantization is not None:
        raise UnsupportedModelError(
            f"{path} is quantized already, and rounding twice adds up; start from the model that "
            f"it was made of. If there is none, {expanding}"
        )


class _Quantization:
    """One run over the layers, from the first that is not done."""

    def __init__(
        self,
        model: LayeredModel,
        checkpoint: Checkpoint,
        plan: TensorPlan,
        recipe: Recipe,
        grid_of: GridOf,
        windows: Sequence[tuple[int, ...]],
        folder: OutputFolder,
        progress: Progress | None,
    ) -> None:
        self._model, self._checkpoint, self._plan = model, checkpoint, plan
        self._recipe, self._folder, self._progress = recipe, folder, progress
        self._grid_of, self._is_gguf = grid_of, recipe.format == "gguf"
        self._inputs = LayerInputs(model, windows, folder)

    @torch.no_grad()
    def run(self) -> None:
        outside = [each.name for each in self._plan.of_run(OUTSIDE)]
        for name in outside:
            check_finite(name, self._checkpoint.tensor(name))
        write_layers(
            self._inputs,
            self._folder,
            self._layer,
            None if self._is_gguf else {name: self._checkpoint.tensor(name) for name in outside},
            self._progress,
        )

    def _layer(self, layer: int) -> tuple[dict[str, Array], Notes]:
        """Quantize a layer, and write the streams behind it; the tensors of its shard."""
        run, weights = self._model.runs[layer], self._model.weights(layer)
        for tensor in self._plan.of_run(layer):
            check_finite(tensor.name, self._checkpoint.tensor(tensor.name))
        rounding = _Layer(self._plan.of_run(layer), self._recipe, self._grid_of, weights)
        if self._recipe.tune:
            self._inputs.write_wanted(layer, weights, run)
        changed = self._smooth(layer, weights) if self._recipe.is_smoothed else frozenset()
        if self._inputs.windows and not self._recipe.rounds_activations:
            is_gptq = self._recipe.method == "gptq"
            for group in input_groups(run, weights, *self._inputs.first(layer)):
                wanted = [name for name in group.names if name in self._plan.quantized]
                if wanted:
                    for index, curvature, seen in self._inputs.curvatures(
                        layer,
                        group.ops,
                        weights,
                        wanted[0],
                        Curvature.of if is_gptq else Curvature.plain,
                    ):
                        for name in wanted:
                            rounding.round((name, index), curvature, seen)
        else:
            for key in rounding.missing():
                rounding.round(key, None, 0)
        assert not rounding.missing(), "something was multiplied with every matrix"
        if self._recipe.tune:
            rounding.tune(run, self._inputs, layer)
        self._inputs.write_behind(layer, weights, run)
        tensors: dict[str, Array] = {}
        for tensor in self._plan.of_run(layer):
            parts = rounding.parts.get(tensor.name)
            if self._is_gguf:  # what is not rounded comes from the model again
                tensors |= parts or {}
                continue
            values = self._checkpoint.tensor(tensor.name)
            if tensor.weight in changed:
                values = cast(as_array(weights[tensor.weight]), values.dtype.name)
            tensors |= parts or {tensor.name: values}
        return tensors, rounding.notes

    def _smooth(self, layer: int, weights: Mapping[str, torch.Tensor]) -> frozenset[str]:
        """Fold scales into the norms of a layer; the weights that are other ones now."""
        run = self._model.runs[layer]
        norms = {each.weight: each.name for each in self._plan.of_run(layer) if each.weight}
        smooth(
            run,
            weights,
            lambda: self._inputs.of_layer(layer),
            grid_of=self._grid_of,
            rounds_activations=self._recipe.rounds_activations,
            quantized=self._plan.quantized,
            gain_dtype=lambda name: torch_dtype(self._checkpoint.dtype(norms[name])),
        )
        return changed_weights(run)


class _Layer:
    """The tensors of a layer as they are rounded. Values replace the weights, in place."""

    def __init__(
        self,
        tensors: Sequence[StoredTensor],
        recipe: Recipe,
        grid_of: GridOf,
        weights: Mapping[str, torch.Tensor],
    ) -> None:
        self._recipe, self._grid_of, self._weights = recipe, grid_of, weights
        self._tensor_of = {key: each for each in tensors for key in each.matrices}
        self._rounded: dict[Key, RoundedMatrix] = {}
        self._originals: dict[Key, torch.Tensor] = {}
        self._done: set[Key] = set()
        self.parts: dict[str, dict[str, Array]] = {}
        self.notes: Notes = {}

    def missing(self) -> list[Key]:
        return [key for key in self._tensor_of if key not in self._done]

    def round(self, key: Key, curvature: Curvature | None, tokens: int) -> None:
        """Round a matrix; its tensor's parts are made once all that lie in it are there."""
        tensor = self._tensor_of.get(key)
        if tensor is None:
            return
        weight, grid = self._matrix(key), self._grid(key)
        if self._recipe.tune:
            self._originals[key] = weight.clone()
        if curvature is None:
            found = round_nearest(weight, grid, None, out_OI=weight)
        elif self._recipe.method == "awq":
            found = round_weighted(weight, grid, curvature, out_OI=weight)
        else:
            zeros = self._recipe.keep_zeros
            found = round_gptq(weight, grid, curvature, out_OI=weight, keep_zeros=zeros)
        self._done.add(key)
        note = self.notes[self._label(key)] = {
            "error": found.error,
            "nearest_error": found.nearest_error,
            "tokens": tokens,
            "dead": 0 if curvature is None else curvature.num_dead,
        }
        if self._recipe.method == "gptq" and curvature is not None and curvature.factor_II is None:
            note["fallback"] = True
        if curvature is not None and not tokens:
            note["unseen"] = True
        self._rounded[key] = found
        if not self._recipe.tune:
            self._pack(tensor)

    def tune(self, run: Run, inputs: LayerInputs, layer: int) -> None:
        """Move the codes of all matrices together, and make the tensors' parts."""
        latents = {
            key: LatentMatrix(self._originals.pop(key), self._matrix(key), found, self._grid(key))
            for key, found in self._rounded.items()
        }
        left = tune(
            run,
            self._weights,
            latents,
            [len(window) for window in inputs.windows],
            partial(inputs.example, layer),
            steps=self._recipe.tune,
            random=np.random.default_rng((self._recipe.seed, layer)),
        )
        for key, latent in latents.items():
            self._rounded[key] = latent.rounded()
            self.notes[self._label(key)]["tuned"] = left
        for tensor in dict.fromkeys(self._tensor_of.values()):
            self._pack(tensor)

    def _pack(self, tensor: StoredTensor) -> None:
        """Make the parts of a tensor whose matrices are all there."""
        if not all(each in self._rounded for each in tensor.matrices):
            return
        found = {key: self._rounded.pop(key) for key in tensor.matrices}
        blocks: dict[str, Array] = {}
        for key, each in found.items():
            grid = self._grid(key)
            if isinstance(grid, Blocks):
                blocks[block_name(key)] = as_array(grid.pack(each.codes_OI, each.steps))
        if blocks:
            self.parts[tensor.name] = blocks
        else:
            parts = quantized_parts(self._recipe, [*found.values()], grid.bits)
            self.parts[tensor.name] = {tensor.module + name: p for name, p in parts.items()}

    def _matrix(self, key: Key) -> torch.Tensor:
        name, index = key
        return self._weights[name] if index is None else self._weights[name][index]

    def _grid(self, key: Key) -> Grid:
        grid = self._grid_of(key[0], self._weights[key[0]].shape[-1])
        assert grid is not None, "its tensor would have been left"
        return grid

    def _label(self, key: Key) -> str:
        tensor = self._tensor_of[key]
        return tensor.module if len(tensor.matrices) == 1 else f"{tensor.module}[{key[0]}]"
