"""Weights that are stacked from one tensor for each expert."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ridgeline.core.arrays import Array, empty
from ridgeline.models import TensorSource


@dataclass(slots=True)
class Stacks:
    """Weights being stacked: which part belongs where, and what has been read so far."""

    places: Mapping[str, tuple[str, int]]  # part -> weight and its index in it
    sizes: Mapping[str, int]
    _unfinished: dict[str, Array] = field(default_factory=dict)
    _num_read: dict[str, int] = field(default_factory=dict)

    def place(self, name: str) -> tuple[str, int | None]:
        """The weight that ``name`` is part of and its index in it; itself if it is no part."""
        return self.places.get(name, (name, None))

    def join(self, weights: Iterable[tuple[str, Array]]) -> Iterator[tuple[str, Array]]:
        """Pass weights through; collect parts and yield a stack with its last part.

        Parts are copied into the stack, so that beside it one part takes memory.
        """
        for name, values in weights:
            if name not in self.places:
                yield name, values
                del values  # before the next one is read
                continue
            stack, index = self.places[name]
            if stack not in self._unfinished:
                shape = (self.sizes[stack], *values.shape)
                self._unfinished[stack] = empty(shape, values.dtype.name)
            self._unfinished[stack][index] = values
            self._num_read[stack] = self._num_read.get(stack, 0) + 1
            if self._num_read[stack] == self.sizes[stack]:
                yield stack, self._unfinished.pop(stack)


def split_stacks(
    shapes: Mapping[str, tuple[int, ...]], sources: Mapping[str, TensorSource]
) -> tuple[dict[str, tuple[int, ...]], dict[str, TensorSource], Stacks]:
    """Shapes and sources with each stacked weight replaced by its parts.

    A source whose name has ``{e}`` is stacked; the weight's first axis says how many parts it has.
    """
    part_shapes: dict[str, tuple[int, ...]] = {}
    part_sources = dict(sources)
    places: dict[str, tuple[str, int]] = {}
    sizes: dict[str, int] = {}
    for name, shape in shapes.items():
        source = sources.get(name)
        if source is None or "{e}" not in source.name:
            part_shapes[name] = shape
            continue
        sizes[name] = shape[0]
        for index in range(shape[0]):
            part = f"{name}[{index}]"
            part_shapes[part], part_sources[part] = shape[1:], source.of_expert(index)
            places[part] = name, index
    return part_shapes, part_sources, Stacks(places=places, sizes=sizes)
