"""Changing a model layer by layer, each on what the changed layers before it give.

At most one layer is in memory, with what is known of the inputs of its matrices; the residual
streams between layers are in a file. A run goes on behind the last layer that is written.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ridgeline.compress.block_forward import BlockForward, Key, seeing_inputs
from ridgeline.compress.hessian import Curvature, InputSum
from ridgeline.compress.layers import LayeredModel, Run
from ridgeline.compress.memory import EXPERT_SUMS_BYTES
from ridgeline.compress.output import OutputFolder, Streams
from ridgeline.core.arrays import Array, is_float
from ridgeline.core.errors import CorruptFileError
from ridgeline.evaluation import Document
from ridgeline.weights import Checkpoint, weight_shapes
from ridgeline.weights.matching import match_tensors
from ridgeline.weights.stacking import split_stacks

_BLOCK = 1 << 22  # values that are checked at a time
Progress = Callable[[int, int, str], None]
Example = tuple[torch.Tensor, torch.Tensor, Document]
"""What a layer gets ``[T, D]`` of a window, what it should give, and the window."""


class LayerInputs:
    """What each layer gets of the calibration's windows; nothing, if there are none.

    Layers count from 1, as runs do: run 0 is the embedding.
    """

    def __init__(
        self, model: LayeredModel, windows: Sequence[Document], folder: OutputFolder
    ) -> None:
        self.num_layers = len(model.runs) - 2
        self.windows = windows
        self._model, self._folder = model, folder

    def begin(self) -> None:
        """Compute what the first layer gets, unless a run did so before."""
        if self.windows and not self._folder.num_done and not self._streams(0).exists:
            weights = self._model.weights(0)
            self._streams(0).write(
                BlockForward(weights, [window]).run(self._model.runs[0]) for window in self.windows
            )

    def of_layer(self, layer: int) -> Iterator[tuple[torch.Tensor, Document]]:
        """The residual stream ``[T, D]`` before a layer, with its window, of each."""
        streams = self._streams(layer - 1)
        for number, window in enumerate(self.windows):
            yield streams.read(number), window

    def first(self, layer: int) -> tuple[torch.Tensor, Document]:
        """That of the first window."""
        return self._streams(layer - 1).read(0), self.windows[0]

    def write_behind(self, layer: int, weights: Mapping[str, torch.Tensor], run: Run) -> None:
        """Compute what the next layer gets by these weights and ops of this one."""
        if self.windows:
            self._streams(layer).write(
                BlockForward(weights, [window], x_TD=x_TD).run(run)
                for x_TD, window in self.of_layer(layer)
            )

    def write_wanted(self, layer: int, weights: Mapping[str, torch.Tensor], run: Run) -> None:
        """Compute what the model gives behind this layer, by weights that are as they were."""
        before = self._wanted(layer - 1) if layer > 1 else self._streams(0)
        self._wanted(layer).write(
            BlockForward(weights, [window], x_TD=before.read(number)).run(run)
            for number, window in enumerate(self.windows)
        )

    def example(self, layer: int, number: int) -> Example:
        """What a layer gets of a window, and what `write_wanted` noted that it should give."""
        wanted_TD = self._wanted(layer).read(number)
        return self._streams(layer - 1).read(number), wanted_TD, self.windows[number]

    def curvatures(
        self,
        layer: int,
        some_ops: Run,
        weights: Mapping[str, torch.Tensor],
        name: str,
        curvature_of: Callable[[torch.Tensor], Curvature] = Curvature.of,
    ) -> Iterator[tuple[int | None, Curvature, int]]:
        """That of each matrix of a weight that ``some_ops`` multiply with, and the tokens seen.

        Experts come some at a time, as their sums fit; those that no token reached come last, with
        what all experts together saw.
        """
        columns, is_stack = weights[name].shape[-1], weights[name].ndim == 3
        indices: list[int | None] = list(range(len(weights[name]))) if is_stack else [None]
        at_once = max(1, EXPERT_SUMS_BYTES // (8 * columns**2))
        together, unseen = InputSum(columns), list[int | None]()
        for first in range(0, len(indices), at_once):
            sums = {index: InputSum(columns) for index in indices[first : first + at_once]}

            def see(
                key: Key, x_TI: torch.Tensor, sums: Mapping[int | None, InputSum] = sums
            ) -> None:
                if key[0] == name and key[1] in sums:
                    sums[key[1]].add(x_TI)

            for x_TD, window in self.of_layer(layer):
                with seeing_inputs({name: weights[name]}, see):
                    BlockForward(weights, [window], x_TD=x_TD).run(some_ops)
            for index in list(sums):
                total = sums.pop(index)
                if is_stack:
                    together.add_sum(total)
                if not total.num_tokens:
                    unseen.append(index)
                    continue
                tokens = total.num_tokens
                yield index, curvature_of(total.take()), tokens
        if unseen:
            curvature = curvature_of(together.take())
            for index in unseen:
                yield index, curvature, 0

    def _streams(self, run: int) -> Streams:
        return self._at(self._folder.state_path(run))

    def _wanted(self, run: int) -> Streams:
        return self._at(self._folder.wanted_path(run))

    def _at(self, path: Path) -> Streams:
        lengths = [len(window) for window in self.windows]
        return Streams(path, lengths, self._model.loaded.definition.spec.hidden_size)


def write_layers(
    inputs: LayerInputs,
    folder: OutputFolder,
    change: Callable[[int], tuple[Mapping[str, Array], Any]],
    outside: Mapping[str, Array] | None,
    progress: Progress | None,
) -> None:
    """Write a shard for each layer that has none, and one of the tensors ``outside`` the layers.

    ``change`` gives the tensors of a layer, with notes on them, and writes the streams behind it.
    """
    time_left = _TimeLeft(progress, inputs.num_layers)
    inputs.begin()
    for layer in range(1, inputs.num_layers + 1):
        if folder.num_done < layer:
            folder.add_shard(_shard_name(layer, inputs.num_layers), *change(layer))
        folder.drop_state(layer - 1)
        time_left.done(layer)
    if folder.num_done == inputs.num_layers and outside is not None:
        folder.add_shard(_shard_name(inputs.num_layers + 1, inputs.num_layers), outside, {})


def outside_layers(model: LayeredModel, checkpoint: Checkpoint) -> dict[str, Array]:
    """The tensors that hold no weight of a layer.

    Raises:
        WeightsMismatchError: the checkpoint does not fit its config.
        CorruptFileError: a value is not finite.
    """
    shapes, sources, stacks = split_stacks(weight_shapes(model.stored.ops), model.stored.sources)
    places_of = match_tensors(checkpoint, shapes, sources, model.stored.ignored)
    of_layers = {
        tensor
        for tensor, places in places_of.items()
        for names in places.values()
        if any(stacks.place(name)[0].startswith("layers.") for name in names)
    }
    found = {name: checkpoint.tensor(name) for name in checkpoint.names() if name not in of_layers}
    for name, values in found.items():
        check_finite(name, values)
    return found


def check_finite(name: str, values: Array) -> None:
    """Of norms and embeddings as well: a calibration would spread what is wrong with them.

    Raises:
        CorruptFileError: a value is not finite.
    """
    flat = values.reshape(-1)
    if is_float(values) and not all(
        np.isfinite(flat[first : first + _BLOCK]).all() for first in range(0, len(flat), _BLOCK)
    ):
        raise CorruptFileError(
            f"Tensor {name} has values that are infinite or not a number: nothing can be computed "
            "with it."
        )


def _shard_name(number: int, num_layers: int) -> str:
    return f"model-{number:05}-of-{num_layers + 1:05}.safetensors"


class _TimeLeft:
    """Tells of layers that are done, and of the minutes that the others will take."""

    def __init__(self, progress: Progress | None, num_layers: int) -> None:
        self._progress, self._num_layers = progress, num_layers
        self._begin_s, self._num_done = time.monotonic(), 0

    def done(self, layer: int) -> None:
        self._num_done += 1
        left = (self._num_layers - layer) * (time.monotonic() - self._begin_s) / self._num_done
        if self._progress is not None:
            label = f"layer {layer} of {self._num_layers}, {left / 60:.0f} min left"
            self._progress(layer, self._num_layers, label)
