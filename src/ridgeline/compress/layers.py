"""A model on disk as runs of ops, each with its weights, of which one is in memory at a time."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ridgeline.compress.block_forward import BlockForward, Key, layer_ops, seeing_inputs
from ridgeline.core import ops
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import UnsupportedModelError
from ridgeline.engine.loading import LoadedModel, load_model
from ridgeline.evaluation import Document, LogProbabilities, log_softmax
from ridgeline.kernels.tensors import as_tensor
from ridgeline.weights import CheckpointWeights, expanded, weight_parts, weight_shapes

Run = tuple[ops.Op, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayeredModel:
    """A model's runs of ops (`layer_ops`), whose weights are read when they are asked for."""

    loaded: LoadedModel
    runs: tuple[Run, ...]

    @classmethod
    def open(cls, name: str | None, *, offline: bool = False) -> "LayeredModel":
        """Find a model and read all but its weights.

        Raises:
            ModelFileError, MachineError: as `load_model`; it is an encoder or a classifier, or its
                layers have embeddings of their own.
        """
        loaded = load_model(EngineConfig(model=name, dtype="float32", offline=offline))
        if not loaded.model.spec.has_head:
            raise UnsupportedModelError(
                "Models that generate no text are not calibrated; --quantization int8 quantizes "
                "them as they are loaded."
            )
        if loaded.model.spec.layer_inputs is not None:
            raise UnsupportedModelError(
                "Models whose layers have embeddings of their own are not calibrated layer by "
                "layer; --quantization int8 quantizes them as they are loaded."
            )
        return cls(loaded=loaded, runs=tuple(layer_ops(loaded.model.ops)))

    @property
    def stored(self) -> CheckpointWeights:
        """Where the weights are."""
        assert isinstance(self.loaded.model.weights, CheckpointWeights), "not random ones"
        return self.loaded.model.weights

    def weights(self, run: int) -> dict[str, torch.Tensor]:
        """The weights of a run, float32, in memory of their own.

        Raises:
            WeightsMismatchError, CorruptFileError, DiskError: as the stream of weights.
        """
        shapes, found = weight_shapes(self.runs[run]), dict[str, torch.Tensor]()
        for name, index, weight in weight_parts(self.stored, only=shapes):
            values = as_tensor(expanded(weight, "float32"))
            if index is None:
                found[name] = values
            else:
                found.setdefault(name, torch.empty(shapes[name]))[index] = values
        return found

    def num_bytes(self, run: int) -> int:
        """What `weights` takes."""
        return 4 * sum(map(math.prod, weight_shapes(self.runs[run]).values()))

    @torch.no_grad()
    def log_probabilities(
        self, documents: Sequence[Document]
    ) -> Iterator[tuple[Document, LogProbabilities]]:
        """Each document with the log-probabilities after its tokens, by all layers in turn.

        Beside a layer, the residual streams of all documents are in memory.
        """
        streams: list[torch.Tensor | None] = [None] * len(documents)
        for run, some_ops in enumerate(self.runs[:-1]):
            weights = self.weights(run)
            for number, document in enumerate(documents):
                forward = BlockForward(weights, [document], x_TD=streams[number])
                streams[number] = forward.run(some_ops)
        weights = self.weights(len(self.runs) - 1)
        for document, stream in zip(documents, streams, strict=True):
            forward = BlockForward(weights, [document], x_TD=stream)
            forward.run(self.runs[-1])
            yield document, log_softmax(forward.buffers["logits"].numpy())


@dataclass(frozen=True, slots=True, kw_only=True)
class InputGroup:
    """Weights that are multiplied with the same rows, and the ops up to the one that does it."""

    names: tuple[str, ...]
    ops: Run


def input_groups(
    run: Run, weights: dict[str, torch.Tensor], x_TD: torch.Tensor, window: Document
) -> list[InputGroup]:
    """The groups of a layer in the order of its ops, seen by running it once.

    Of experts, all of a stack are one group: each has rows of its own, which are those of the same
    expert of the other stacks.
    """
    rows: dict[tuple[int, int], list[str]] = {}  # ops before and address of the rows -> weights
    kept: list[torch.Tensor] = []  # so that no other rows come to lie where these were
    done: list[ops.Op] = []
    seen: set[str] = set()

    def see(key: Key, x_TI: torch.Tensor) -> None:
        kept.append(x_TI)
        if key[0] not in seen:
            seen.add(key[0])
            rows.setdefault((len(done), x_TI.data_ptr()), []).append(key[0])

    with torch.no_grad(), seeing_inputs(weights, see):
        forward = BlockForward(weights, [window], x_TD=x_TD)
        for op in run:
            forward.step(op)
            done.append(op)
    return [
        InputGroup(names=tuple(names), ops=run[: before + 1]) for (before, _), names in rows.items()
    ]
