"""Where a model's weights come from: read one after the other, so that no two copies are held."""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from ridgeline.core.arrays import Array
from ridgeline.core.ops import Op
from ridgeline.core.weight_uses import op_weights
from ridgeline.models import TensorSource
from ridgeline.quant import Scheme
from ridgeline.weights.digest import content_digest, weight_files
from ridgeline.weights.dummy import stream_dummy_weights
from ridgeline.weights.gguf.shards import part_names
from ridgeline.weights.matching import (
    match_tensors,
    open_checkpoint,
    read_places,
    weight_shapes,
)
from ridgeline.weights.packed import (
    Weight,
    WeightPart,
    expanded,
    holds_stacks,
    read_weights,
    stacked,
)
from ridgeline.weights.progress import ByteCount, Progress
from ridgeline.weights.quantized_checkpoint import QuantizedCheckpoint
from ridgeline.weights.stacking import Places, RowRanges, Stacks, split_stacks
from ridgeline.weights.store import TensorStore


class WeightSource(Protocol):
    """Weights by canonical name. A dictionary of arrays is one."""

    def items(self) -> Iterable[tuple[str, Weight]]:
        """Every weight once, in any order; those of a file are read anew by each call."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWeights:
    """The weights of a folder or GGUF file.

    ``sources`` says which tensor of the checkpoint each weight is, or which rows of it; ``ignored``
    are regular expressions for the full names of tensors that may be left over. Of weights in
    ``rows`` no others are read. With ``only``, weights of other names are checked, but not read.

    A weight that several ops read, such as a tied head, comes once, and one that is stacked from
    several tensors when its last part has been read. Values are not looked at: NaN passes.
    ``items``, ``values`` and ``parts`` follow the order of the file, the last two with no more than
    one weight held, for callers that pack or move each in turn. All raise, at the first step,
    before any weight is read, unless a file fails later:

        WeightsMismatchError: tensors are missing, left over or of another shape; names them.
        UnsupportedModelError: a weight has a dtype that is not a plain floating-point one.
        ModelNotFoundError, CorruptFileError, DiskError: as `Checkpoint`.
    """

    path: Path
    ops: Sequence[Op]
    sources: Mapping[str, TensorSource]
    ignored: Sequence[str]
    dtype: str
    quantization: Scheme | None = None
    progress: Progress | None = None
    rows: RowRanges = field(default_factory=dict)
    only: Collection[str] | None = None

    @property
    def may_be_quantized(self) -> bool:
        """Whether a scheme says so, or the format of the file allows it."""
        return self.quantization is not None or not self.path.is_dir()

    def items(self) -> Iterator[tuple[str, Weight]]:
        """Every weight, quantized ones as `QuantizedTensor` or `GGUFBlocks`.

        Plain tensors come in ``dtype``, and so do the few quantized weights that cannot be cut
        without expanding them (stored the other way round than codes are, or experts that are
        quantized differently).
        """
        # Stacks of plain tensors are filled in place by the one, and need twice the memory by the
        # other.
        return self._joined_parts() if self.may_be_quantized else self.values()

    def values(self) -> Iterator[tuple[str, Array]]:
        """Every weight in ``dtype`` and in memory of its own, quantized ones expanded.

        Beside the weight itself this takes a few MiB, and one tensor where the checkpoint stores it
        transposed, or one expert's where it stores experts apart.
        """
        shapes, sources, stacks = split_stacks(weight_shapes(self.ops), self.sources, self.rows)
        for tensor in self._tensors(shapes, sources, stacks, self.only):
            for name, weight in stacks.join(read_places(*tensor)):
                if self.only is None or name in self.only:
                    yield name, weight
                del weight  # before the next one is read

    def parts(
        self, only: Collection[str] | None = None, *, cut_stacks: bool = True
    ) -> Iterator[WeightPart]:
        """The weights of ``items``, or ``only`` some, but stacks of experts one matrix at a time.

        The parts of several stacks may come in turn. A tensor that holds whole stacks is read one
        expert at a time, unless ``cut_stacks`` is false: then it comes whole.
        """
        only = self.only if only is None else only
        shapes, sources, stacks = split_stacks(weight_shapes(self.ops), self.sources, self.rows)
        for checkpoint, tensor, places, dtype, advance in self._tensors(
            shapes, sources, stacks, only
        ):
            entries: Iterable[int | None] = (None,)
            first = 0
            if cut_stacks and holds_stacks(places, shapes):
                first, stop = next(iter(places)).experts or (0, checkpoint.shape(tensor)[0])
                entries = range(first, stop)
                places = {replace(place, experts=None): names for place, names in places.items()}
            for entry in entries:
                for part, weight in read_weights(checkpoint, tensor, places, dtype, advance, entry):
                    name, index = stacks.place(part)
                    if only is None or name in only:
                        yield name, index if entry is None else entry - first, weight
                    del weight  # before the next one is read

    def _joined_parts(self) -> Iterator[tuple[str, Weight]]:
        shapes = weight_shapes(self.ops)
        stacks: dict[str, dict[int, Weight]] = {}
        for name, index, weight in self.parts(cut_stacks=False):
            if index is None:
                yield name, weight
                del weight  # before the next one is read
                continue
            stacks.setdefault(name, {})[index] = weight
            first, stop = self.rows.get(name, (0, shapes[name][0]))
            if len(stacks[name]) == stop - first:
                parts = stacks.pop(name)
                yield name, stacked([parts[index] for index in sorted(parts)], self.dtype)

    def _tensors(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        sources: Mapping[str, TensorSource],
        stacks: Stacks,
        only: Collection[str] | None,
    ) -> Iterator[tuple[TensorStore, str, Places, str, Callable[[int], None]]]:
        """What `read_places` takes, for each tensor of which something is wanted."""
        with open_checkpoint(self.path) as files:
            checkpoint: TensorStore = files
            if self.quantization is not None:
                checkpoint = QuantizedCheckpoint(files, self.quantization)
            matched = match_tensors(checkpoint, shapes, sources, self.ignored, self.rows, only)
            places_of = stacks.wanted(matched, only)
            count = ByteCount(self.progress, sum(map(checkpoint.num_bytes, places_of)))
            for tensor, places in places_of.items():
                advance = count.of(f"loading {next(iter(places.values()))[0]}")
                yield checkpoint, tensor, places, self.dtype, advance

    def num_bytes(self) -> int:
        """Bytes of the files; 0 for what cannot be read."""
        with suppress(OSError):
            return sum(path.stat().st_size for path in self._files())
        return 0

    def digest(self, *, memory: Path | None = None) -> str:
        """Names all that decides what ``items`` yields; for ``memory`` see `content_digest`.

        Reports its progress, as ``items`` does.

        Raises:
            DiskError: a file cannot be read.
        """
        content = content_digest(self._files(), memory=memory, progress=self.progress)
        # The scheme is the config's, which is one of the files.
        meaning: tuple[object, ...] = (
            self.ops,
            sorted(self.sources.items()),
            self.dtype,
            self.quantization is None,
        )
        if self.rows:
            meaning += (sorted(self.rows.items()),)
        if self.only is not None:
            meaning += (sorted(self.only),)
        return hashlib.sha256(repr((content, meaning)).encode()).hexdigest()

    def _files(self) -> list[Path]:
        if self.path.is_dir():
            return weight_files(self.path)
        return [self.path.parent / name for name in part_names(self.path.name)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DummyWeights:
    """Random weights; see `dummy_weights`. ``rows`` and ``only`` as in `CheckpointWeights`."""

    ops: Sequence[Op]
    dtype: str
    seed: int
    rows: RowRanges = field(default_factory=dict)
    only: Collection[str] | None = None

    def items(self) -> Iterator[tuple[str, Array]]:
        for name, weight in stream_dummy_weights(
            self.ops, dtype=self.dtype, seed=self.seed, rows=self.rows
        ):
            if self.only is None or name in self.only:
                yield name, weight
            del weight  # before the next one is made

    def digest(self) -> str:
        """Names all that decides what ``items`` yields."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


def weight_parts(source: WeightSource, only: Collection[str] | None = None) -> Iterator[WeightPart]:
    """Every weight, or ``only`` some of them, stacks of matrices ``[E, out, in]`` one at a time."""
    if isinstance(source, CheckpointWeights):
        yield from source.parts(only)
        return
    for name, weight in source.items():
        if only is not None and name not in only:
            continue
        if len(weight.shape) != 3:
            yield name, None, weight
        else:
            for index in range(weight.shape[0]):
                if isinstance(weight, np.ndarray):
                    yield name, index, weight[index]
                else:
                    yield name, index, weight.entry(index)
        del weight  # before the next one is made


def expanded_weights(source: WeightSource, dtype: str) -> dict[str, Array]:
    """All weights as values, quantized ones expanded to ``dtype``."""
    return {name: expanded(weight, dtype) for name, weight in source.items()}


def only_of(source: WeightSource, ops: Sequence[Op]) -> WeightSource:
    """The weights that ``ops`` read, of a source that has more; the others are not read."""
    names = weight_shapes(ops)
    match source:
        case CheckpointWeights():
            return replace(source, only=frozenset(names))
        case DummyWeights():
            own = [op for op in source.ops if any(w.name in names for w in op_weights(op))]
            return replace(source, ops=own, only=frozenset(names))
    return {name: weight for name, weight in source.items() if name in names}


def rows_of(source: WeightSource, rows: RowRanges) -> WeightSource:
    """The same weights, but of those in ``rows`` no other rows, which are not read either."""
    if not rows:
        return source
    if isinstance(source, CheckpointWeights | DummyWeights):
        assert not source.rows
        return replace(source, rows=rows)
    return {
        name: _cut(weight, *rows[name]) if name in rows else weight
        for name, weight in source.items()
    }


def _cut(weight: Weight, start: int, stop: int) -> Weight:
    return weight[start:stop] if isinstance(weight, np.ndarray) else weight.rows(start, stop)
