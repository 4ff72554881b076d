"""Weights as they are quantized, for executors that compute with codes and scales."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from ridgeline.core.ops import Op
from ridgeline.models import TensorSource
from ridgeline.quant import QuantizedTensor, Scheme, stack
from ridgeline.weights.checkpoint import Checkpoint
from ridgeline.weights.loading import Places, match_tensors, read_places, weight_shapes
from ridgeline.weights.quantized_checkpoint import QuantizedCheckpoint
from ridgeline.weights.stacking import split_stacks

Weight = torch.Tensor | QuantizedTensor


def stream_packed_weights(
    folder: Path,
    *,
    ops: Sequence[Op],
    sources: Mapping[str, TensorSource],
    ignored: Sequence[str],
    dtype: torch.dtype,
    quantization: Scheme,
) -> Iterator[tuple[str, Weight]]:
    """Yield (canonical name, weight); quantized ones as `QuantizedTensor`, in ``[…, out, in]``.

    As `stream_weights` otherwise: plain tensors come in ``dtype``, and so do the few quantized
    weights that cannot be cut without expanding them (stored the other way round than codes are,
    or experts that are quantized differently).
    """
    shapes, sources, stacks = split_stacks(weight_shapes(ops), sources)
    experts: dict[str, dict[int, Weight]] = {}
    with Checkpoint(folder) as files:
        checkpoint = QuantizedCheckpoint(files, quantization)
        for tensor, places in match_tensors(checkpoint, shapes, sources, ignored).items():
            for name, weight in _weights(checkpoint, tensor, places, dtype):
                if name not in stacks.places:
                    yield name, weight
                    continue
                whole, index = stacks.places[name]
                experts.setdefault(whole, {})[index] = weight
                if len(experts[whole]) == stacks.sizes[whole]:
                    parts = experts.pop(whole)
                    yield whole, _stacked([parts[index] for index in sorted(parts)], dtype)


def _weights(
    checkpoint: QuantizedCheckpoint, tensor: str, places: Places, dtype: torch.dtype
) -> Iterator[tuple[str, Weight]]:
    """The weights that a tensor holds, cut out of its codes where that can be done."""
    stored = checkpoint.stored(tensor)
    for place, names in places.items():
        if stored is None or stored.transposed != place.transpose:
            yield from read_places(checkpoint, tensor, {place: names}, dtype, lambda _: None)
            continue
        if place.every_other is not None and not stored.transposed:
            yield from read_places(checkpoint, tensor, {place: names}, dtype, lambda _: None)
            continue
        weight = checkpoint.quantized(tensor)
        if place.every_other is not None:
            weight = weight.every_other_row(place.every_other)
        if place.rows is not None:
            weight = weight.rows(*place.rows)
        for name in names:
            yield name, weight


def _stacked(parts: Sequence[Weight], dtype: torch.dtype) -> Weight:
    packed = [part for part in parts if isinstance(part, QuantizedTensor)]
    whole = stack(packed) if len(packed) == len(parts) else None
    if whole is not None:
        return whole
    return torch.stack(
        [p.dequantize(dtype) if isinstance(p, QuantizedTensor) else p for p in parts]
    )
