"""Weights as they are quantized: codes and scales, cut out of the tensors that hold them."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from ridgeline.core.arrays import Array
from ridgeline.quant import GGUFBlocks, QuantizedTensor, stack
from ridgeline.weights.gguf import GGUFCheckpoint
from ridgeline.weights.matching import read_places
from ridgeline.weights.quantized_checkpoint import QuantizedCheckpoint
from ridgeline.weights.stacking import Places
from ridgeline.weights.store import TensorStore

Weight = Array | QuantizedTensor | GGUFBlocks
"""A weight ``[…, out, in]``, as values or as it is quantized."""


WeightPart = tuple[str, int | None, Weight]
"""A weight's name, its place in a stack if it is one matrix of that, and the weight itself."""


def holds_stacks(places: Places, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether all that a tensor holds are stacks of matrices, each with the tensor's first axis, or
    the same part of it."""
    is_stacked = all(len(shapes[name]) == 3 for names in places.values() for name in names)
    return is_stacked and len({place.experts for place in places}) == 1


def read_weights(
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


def stacked(parts: Sequence[Weight], dtype: str) -> Weight:
    """A stack ``[E, out, in]`` of matrices: quantized if all are so alike, else values."""
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
