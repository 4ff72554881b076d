"""Weights as they are quantized, for executors that compute with codes and scales."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ridgeline.core.arrays import Array
from ridgeline.core.ops import Op
from ridgeline.models import TensorSource
from ridgeline.quant import GGUFBlocks, QuantizedTensor, Scheme, stack
from ridgeline.weights.gguf import GGUFCheckpoint
from ridgeline.weights.loading import (
    match_tensors,
    open_checkpoint,
    read_places,
    weight_shapes,
)
from ridgeline.weights.progress import ByteCount, Progress
from ridgeline.weights.quantized_checkpoint import QuantizedCheckpoint
from ridgeline.weights.stacking import Places, RowRanges, split_stacks
from ridgeline.weights.store import TensorStore

Weight = Array | QuantizedTensor | GGUFBlocks
"""A weight ``[…, out, in]``, as values or as it is quantized."""


WeightPart = tuple[str, int | None, Weight]
"""A weight's name, its place in a stack if it is one matrix of that, and the weight itself."""


def stream_packed_weights(
    path: Path,
    *,
    ops: Sequence[Op],
    sources: Mapping[str, TensorSource],
    ignored: Sequence[str],
    dtype: str,
    quantization: Scheme | None = None,
    progress: Progress | None = None,
    rows: RowRanges | None = None,
    only: Collection[str] | None = None,
) -> Iterator[tuple[str, Weight]]:
    """Yield (canonical name, weight); quantized ones as `QuantizedTensor` or `GGUFBlocks`.

    As `stream_weights` otherwise: plain tensors come in ``dtype``, and so do the few quantized
    weights that cannot be cut without expanding them (stored the other way round than codes are,
    or experts that are quantized differently).
    """
    shapes = weight_shapes(ops)
    stacks: dict[str, dict[int, Weight]] = {}
    for name, index, weight in stream_weight_parts(
        path,
        ops=ops,
        sources=sources,
        ignored=ignored,
        dtype=dtype,
        quantization=quantization,
        progress=progress,
        rows=rows,
        only=only,
        cut_stacks=False,
    ):
        if index is None:
            yield name, weight
            del weight  # before the next one is read
            continue
        stacks.setdefault(name, {})[index] = weight
        first, stop = (rows or {}).get(name, (0, shapes[name][0]))
        if len(stacks[name]) == stop - first:
            parts = stacks.pop(name)
            yield name, _stacked([parts[index] for index in sorted(parts)], dtype)


def stream_weight_parts(
    path: Path,
    *,
    ops: Sequence[Op],
    sources: Mapping[str, TensorSource],
    ignored: Sequence[str],
    dtype: str,
    quantization: Scheme | None = None,
    progress: Progress | None = None,
    rows: RowRanges | None = None,
    only: Collection[str] | None = None,
    cut_stacks: bool = True,
) -> Iterator[WeightPart]:
    """As `stream_packed_weights`, but stacks of experts come one matrix after the other.

    They come in file order, so that the parts of several stacks may come in turn. A tensor that
    holds whole stacks is read one expert at a time, unless ``cut_stacks`` is false: then it comes
    whole. With ``only``, weights of other names are checked, but not read.
    """
    shapes = weight_shapes(ops)
    wanted = shapes.keys() if only is None else only
    shapes, sources, stacks = split_stacks(shapes, sources, rows)
    with open_checkpoint(path) as files:
        checkpoint: TensorStore = files
        if quantization is not None:
            checkpoint = QuantizedCheckpoint(files, quantization)
        matched = match_tensors(checkpoint, shapes, sources, ignored, rows, only)
        places_of = stacks.wanted(matched, wanted)
        count = ByteCount(progress, sum(map(checkpoint.num_bytes, places_of)))
        for tensor, places in places_of.items():
            advance = count.of(next(iter(places.values()))[0])
            entries: Iterable[int | None] = (None,)
            first = 0
            if cut_stacks and _holds_stacks(places, shapes):
                first, stop = next(iter(places)).experts or (0, checkpoint.shape(tensor)[0])
                entries = range(first, stop)
                places = {replace(place, experts=None): names for place, names in places.items()}
            for entry in entries:
                for part, weight in _weights(checkpoint, tensor, places, dtype, advance, entry):
                    name, index = stacks.place(part)
                    if name in wanted:
                        yield name, index if entry is None else entry - first, weight
                    del weight  # before the next one is read


def _holds_stacks(places: Places, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether all that a tensor holds are stacks of matrices, each with the tensor's first axis, or
    the same part of it."""
    is_stacked = all(len(shapes[name]) == 3 for names in places.values() for name in names)
    return is_stacked and len({place.experts for place in places}) == 1


def _weights(
    checkpoint: TensorStore,
    tensor: str,
    places: Places,
    dtype: str,
    advance: Callable[[int], None],
    entry: int | None,
) -> Iterator[tuple[str, Weight]]:
    """The weights that a tensor holds, cut out of its codes where that can be done.

    With ``entry``, that matrix of each: they are stacks.
    """
    match checkpoint:
        case QuantizedCheckpoint() if checkpoint.stored(tensor) is not None:
            yield from _of_parts(checkpoint, tensor, places, dtype, advance, entry)
        case GGUFCheckpoint() if checkpoint.is_quantized(tensor):
            yield from _of_blocks(checkpoint, tensor, places, dtype, advance, entry)
        case _:
            yield from read_places(checkpoint, tensor, places, dtype, advance, entry)


def _of_parts(
    checkpoint: QuantizedCheckpoint,
    tensor: str,
    places: Places,
    dtype: str,
    advance: Callable[[int], None],
    entry: int | None,
) -> Iterator[tuple[str, Weight]]:
    stored = checkpoint.stored(tensor)
    assert stored is not None
    for place, names in places.items():
        interleaved = place.every_other is not None and not stored.transposed
        cuts_stack = place.rows is not None and entry is None and len(stored.shape) == 3
        is_cut = interleaved or cuts_stack or place.of_each is not None
        if stored.transposed != place.transpose or is_cut:
            yield from read_places(checkpoint, tensor, {place: names}, dtype, advance, entry)
            continue
        weight = checkpoint.quantized(tensor, advance, entry=entry)
        if place.experts is not None:
            weight = weight.rows(*place.experts)
        if place.every_other is not None:
            weight = weight.every_other_row(place.every_other)
        if place.rows is not None:
            weight = weight.rows(*place.rows)
        for name in names:
            yield name, weight
        del weight  # before the next one is read


def _of_blocks(
    checkpoint: GGUFCheckpoint,
    tensor: str,
    places: Places,
    dtype: str,
    advance: Callable[[int], None],
    entry: int | None,
) -> Iterator[tuple[str, Weight]]:
    blocks = None
    for place, names in places.items():
        cuts_stack = place.rows is not None and entry is None and len(checkpoint.shape(tensor)) == 3
        is_cut = place.every_other is not None or place.of_each is not None or cuts_stack
        if place.transpose or is_cut:
            yield from read_places(checkpoint, tensor, {place: names}, dtype, advance, entry)
            continue
        if blocks is None:
            blocks = checkpoint.blocks(tensor, entry)
            advance(blocks.data.nbytes)
        weight = blocks if place.experts is None else blocks.rows(*place.experts)
        weight = weight if place.rows is None else weight.rows(*place.rows)
        for name in names:
            yield name, weight


def expanded(weight: Weight, dtype: str) -> Array:
    """The values of a weight: as they are, or of ``dtype`` if it is quantized."""
    if isinstance(weight, QuantizedTensor | GGUFBlocks):
        return weight.dequantize(dtype)
    return weight


def _stacked(parts: Sequence[Weight], dtype: str) -> Weight:
    packed = [part for part in parts if isinstance(part, QuantizedTensor)]
    if len(packed) == len(parts) and (whole := stack(packed)) is not None:
        return whole
    blocks = [part for part in parts if isinstance(part, GGUFBlocks)]
    if len(blocks) == len(parts) and len({part.kind for part in blocks}) == 1:
        return GGUFBlocks(
            format=blocks[0].format,
            shape=(len(blocks), *blocks[0].shape),
            data=np.concatenate([part.data for part in blocks]),
        )
    return np.stack([expanded(part, dtype) for part in parts])
