"""Weights as they are quantized, for executors that compute with codes and scales."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from ridgeline.core.ops import Op
from ridgeline.models import TensorSource
from ridgeline.quant import GGUFBlocks, QuantizedTensor, Scheme, stack
from ridgeline.weights.gguf import GGUFCheckpoint
from ridgeline.weights.loading import (
    Places,
    match_tensors,
    open_checkpoint,
    read_places,
    weight_shapes,
)
from ridgeline.weights.progress import ByteCount, Progress
from ridgeline.weights.quantized_checkpoint import QuantizedCheckpoint
from ridgeline.weights.stacking import split_stacks
from ridgeline.weights.store import TensorStore

Weight = torch.Tensor | QuantizedTensor | GGUFBlocks
"""A weight ``[…, out, in]``, as values or as it is quantized."""


def stream_packed_weights(
    path: Path,
    *,
    ops: Sequence[Op],
    sources: Mapping[str, TensorSource],
    ignored: Sequence[str],
    dtype: torch.dtype,
    quantization: Scheme | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[str, Weight]]:
    """Yield (canonical name, weight); quantized ones as `QuantizedTensor` or `GGUFBlocks`.

    As `stream_weights` otherwise: plain tensors come in ``dtype``, and so do the few quantized
    weights that cannot be cut without expanding them (stored the other way round than codes are,
    or experts that are quantized differently).
    """
    shapes, sources, stacks = split_stacks(weight_shapes(ops), sources)
    experts: dict[str, dict[int, Weight]] = {}
    with open_checkpoint(path) as files:
        checkpoint: TensorStore = files
        if quantization is not None:
            checkpoint = QuantizedCheckpoint(files, quantization)
        places_of = match_tensors(checkpoint, shapes, sources, ignored)
        count = ByteCount(progress, sum(map(checkpoint.num_bytes, places_of)))
        for tensor, places in places_of.items():
            advance = count.of(next(iter(places.values()))[0])
            for name, weight in _weights(checkpoint, tensor, places, dtype, advance):
                if name not in stacks.places:
                    yield name, weight
                    del weight  # before the next one is read
                    continue
                whole, index = stacks.places[name]
                experts.setdefault(whole, {})[index] = weight
                if len(experts[whole]) == stacks.sizes[whole]:
                    parts = experts.pop(whole)
                    yield whole, _stacked([parts[index] for index in sorted(parts)], dtype)


def _weights(
    checkpoint: TensorStore,
    tensor: str,
    places: Places,
    dtype: torch.dtype,
    advance: Callable[[int], None],
) -> Iterator[tuple[str, Weight]]:
    """The weights that a tensor holds, cut out of its codes where that can be done."""
    match checkpoint:
        case QuantizedCheckpoint() if checkpoint.stored(tensor) is not None:
            yield from _of_parts(checkpoint, tensor, places, dtype, advance)
        case GGUFCheckpoint() if checkpoint.is_quantized(tensor):
            yield from _of_blocks(checkpoint, tensor, places, dtype, advance)
        case _:
            yield from read_places(checkpoint, tensor, places, dtype, advance)


def _of_parts(
    checkpoint: QuantizedCheckpoint,
    tensor: str,
    places: Places,
    dtype: torch.dtype,
    advance: Callable[[int], None],
) -> Iterator[tuple[str, Weight]]:
    stored = checkpoint.stored(tensor)
    assert stored is not None
    for place, names in places.items():
        interleaved = place.every_other is not None and not stored.transposed
        if stored.transposed != place.transpose or interleaved:
            yield from read_places(checkpoint, tensor, {place: names}, dtype, advance)
            continue
        weight = checkpoint.quantized(tensor, advance)
        if place.every_other is not None:
            weight = weight.every_other_row(place.every_other)
        if place.rows is not None:
            weight = weight.rows(*place.rows)
        for name in names:
            yield name, weight


def _of_blocks(
    checkpoint: GGUFCheckpoint,
    tensor: str,
    places: Places,
    dtype: torch.dtype,
    advance: Callable[[int], None],
) -> Iterator[tuple[str, Weight]]:
    blocks = None
    for place, names in places.items():
        if place.transpose or place.every_other is not None:
            yield from read_places(checkpoint, tensor, {place: names}, dtype, advance)
            continue
        if blocks is None:
            blocks = checkpoint.blocks(tensor)
            advance(blocks.data.nbytes)
        weight = blocks if place.rows is None else blocks.rows(*place.rows)
        for name in names:
            yield name, weight


def expanded(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """The values of a weight: as they are, or of ``dtype`` if it is quantized."""
    return weight if isinstance(weight, torch.Tensor) else weight.dequantize(dtype)


def _stacked(parts: Sequence[Weight], dtype: torch.dtype) -> Weight:
    packed = [part for part in parts if isinstance(part, QuantizedTensor)]
    if len(packed) == len(parts) and (whole := stack(packed)) is not None:
        return whole
    blocks = [part for part in parts if isinstance(part, GGUFBlocks)]
    if len(blocks) == len(parts) and len({part.format.name for part in blocks}) == 1:
        return GGUFBlocks(
            format=blocks[0].format,
            shape=(len(blocks), *blocks[0].shape),
            data=np.concatenate([part.data for part in blocks]),
        )
    return torch.stack([expanded(part, dtype) for part in parts])
