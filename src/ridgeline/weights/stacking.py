"""Weights that are stacked from one tensor for each expert."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ridgeline.core.arrays import Array, empty
from ridgeline.models import TensorSource

# The weights that a tensor holds, by their place in it: the source without its names.
Places = dict[TensorSource, list[str]]
# Of weights of which only some rows are wanted: the half-open range of their first axis.
RowRanges = Mapping[str, tuple[int, int]]


@dataclass(slots=True)
class Stacks:
    """Weights being stacked: which part belongs where, and what has been read so far."""

    places: Mapping[str, tuple[str, int]]  # part -> weight and its index in it
    sizes: Mapping[str, int]
    unwanted: frozenset[str] = frozenset()  # parts of which nothing is read
    _unfinished: dict[str, Array] = field(default_factory=dict)
    _num_read: dict[str, int] = field(default_factory=dict)

    def place(self, name: str) -> tuple[str, int | None]:
        """The weight that ``name`` is part of and its index in it; itself if it is no part."""
        return self.places.get(name, (name, None))

    def wanted(
        self, places_of: Mapping[str, Places], only: Collection[str] | None = None
    ) -> dict[str, Places]:
        """The tensors of which something is read, if ``only`` these weights are."""

        def is_wanted(name: str) -> bool:
            return name not in self.unwanted and (only is None or self.place(name)[0] in only)

        return {
            tensor: places
            for tensor, places in places_of.items()
            if any(is_wanted(name) for names in places.values() for name in names)
        }

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
    shapes: Mapping[str, tuple[int, ...]],
    sources: Mapping[str, TensorSource],
    rows: RowRanges | None = None,
) -> tuple[dict[str, tuple[int, ...]], dict[str, TensorSource], Stacks]:
    """Shapes and sources with each stacked weight replaced by its parts.

    A source whose name has ``{e}`` is stacked; the weight's first axis says how many parts it has.
    ``rows`` are the wanted parts of weights of which not all are.
    """
    rows, unwanted = rows or {}, set[str]()
    part_shapes: dict[str, tuple[int, ...]] = {}
    part_sources = dict(sources)
    places: dict[str, tuple[str, int]] = {}
    sizes: dict[str, int] = {}
    for name, shape in shapes.items():
        source = sources.get(name)
        if source is None or "{e}" not in source.name:
            part_shapes[name] = shape
            continue
        first, stop = rows.get(name, (0, shape[0]))
        sizes[name] = stop - first
        for index in range(shape[0]):
            part = f"{name}[{index}]"
            part_shapes[part], part_sources[part] = shape[1:], source.of_expert(index)
            places[part] = name, index - first
            if not first <= index < stop:
                unwanted.add(part)
    stacks = Stacks(places=places, sizes=sizes, unwanted=frozenset(unwanted))
    return part_shapes, part_sources, stacks
