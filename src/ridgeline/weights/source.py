"""Where a model's weights come from: read one after the other, so that no two copies are held."""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ridgeline.core.arrays import Array
from ridgeline.core.ops import Op
from ridgeline.core.weight_uses import op_weights
from ridgeline.models import TensorSource
from ridgeline.quant import Scheme
from ridgeline.weights.digest import content_digest, weight_files
from ridgeline.weights.dummy import stream_dummy_weights
from ridgeline.weights.gguf.shards import part_names
from ridgeline.weights.loading import stream_weights, weight_shapes
from ridgeline.weights.packed import (
    Weight,
    WeightPart,
    expanded,
    stream_packed_weights,
    stream_weight_parts,
)
from ridgeline.weights.progress import Progress
from ridgeline.weights.stacking import RowRanges


class WeightSource(Protocol):
    """Weights by canonical name. A dictionary of arrays is one."""

    def items(self) -> Iterable[tuple[str, Weight]]:
        """Every weight once, in any order; those of a file are read anew by each call."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWeights:
    """The weights of a folder or GGUF file, as `stream_packed_weights` yields them.

    ``items`` raises what that raises, before it yields anything unless a file fails later. ``rows``
    are the wanted ones of weights of which not all are; ``only`` names the wanted weights, if not
    all are.
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
        # Stacks of plain tensors are filled in place by the one, and need twice the memory by the
        # other.
        stream = stream_packed_weights if self.may_be_quantized else stream_weights
        return stream(self.path, **self._arguments())

    def parts(self, only: Collection[str] | None = None) -> Iterator[WeightPart]:
        """The same, or ``only`` some of them, but stacks one matrix at a time; see
        `stream_weight_parts`."""
        arguments = self._arguments()
        if only is not None:
            arguments["only"] = only
        return stream_weight_parts(self.path, **arguments)

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

    def _arguments(self) -> dict[str, Any]:
        return {field: getattr(self, field) for field in self.__slots__ if field != "path"}

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
