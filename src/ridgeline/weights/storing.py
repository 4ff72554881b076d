"""Weights back in the tensors that a family's checkpoints have: the inverse of `loading`."""

from collections.abc import Mapping

from ridgeline.core.arrays import Array, cast, empty
from ridgeline.core.errors import UnsupportedModelError
from ridgeline.models import TensorSource
from ridgeline.weights.matching import name_in, stored_shapes
from ridgeline.weights.names import short_name
from ridgeline.weights.stacking import split_stacks
from ridgeline.weights.store import TensorStore


def stored_tensors(
    weights: Mapping[str, Array],
    sources: Mapping[str, TensorSource],
    like: TensorStore,
) -> dict[str, Array]:
    """Tensors with the names and types that those of ``like`` have, rounded to nearest.

    ``weights`` are by canonical name, and have all that lie in a tensor of which they have one;
    their shapes need not be those of ``like``.

    Raises:
        UnsupportedModelError: a tensor may be stored either way round.
    """
    shapes, sources, stacks = split_stacks(
        {name: values.shape for name, values in weights.items()}, sources
    )
    available, names_of = frozenset(like.names()), dict[str, list[str]]()
    for name in shapes:
        names_of.setdefault(name_in(available, sources[name]), []).append(name)
    tensors: dict[str, Array] = {}
    for tensor, names in names_of.items():
        if any(sources[name].either_way for name in names):
            raise UnsupportedModelError(
                f"Which way round {short_name(tensor)} is stored differs between checkpoints of "
                "this family, so that it is not written."
            )
        (shape,) = stored_shapes(names, shapes, sources)
        tensors[tensor] = empty(shape, like.dtype(tensor))
        for name in names:
            weight, index = stacks.place(name)
            values = weights[weight] if index is None else weights[weight][index]
            _put(tensors[tensor], sources[name], cast(values, tensors[tensor].dtype.name))
    return tensors


def _put(tensor: Array, place: TensorSource, values: Array) -> None:
    """Write a weight's values to its place; see `TensorSource`."""
    part = tensor if place.every_other is None else tensor[..., place.every_other :: 2]
    part = part.swapaxes(-1, -2) if place.transpose else part
    part = part[:, 0] if place.squeeze else part
    if place.of_each is not None:
        period, start, stop = place.of_each
        groups = part.reshape(-1, period, *part.shape[1:])  # a view: such tensors are as they lie
        groups[:, start:stop] = values.reshape(len(groups), stop - start, *values.shape[1:])
        return
    if place.rows is not None:
        part = part[(*[slice(None)] * max(0, part.ndim - 2), slice(*place.rows))]
    part[...] = values
