"""Who has the lowest rank, where ranks only grow."""

import heapq
from collections.abc import Callable, Collection
from itertools import count
from typing import Generic, TypeVar

Name = TypeVar("Name")


class GrowingRanks(Generic[Name]):
    """A heap of names by rank, put right only as far as its top is looked at.

    ``rank`` of a member never shrinks; one that left may come back with any. ``members`` are those
    who count: names that have left stay in the heap until they reach its top or outnumber the
    others. Of equal ranks the one goes first that was added, or put right, first.
    """

    def __init__(
        self, rank: Callable[[Name], tuple[float, ...]], members: Collection[Name]
    ) -> None:
        self._rank = rank
        self._members = members
        self._heap: list[tuple[tuple[float, ...], int, Name]] = []
        self._known: dict[Name, tuple[float, ...]] = {}  # the lowest rank of each in the heap
        self._serial = count()

    def add(self, name: Name) -> None:
        """The name has become a member; adding one again changes nothing."""
        rank = self._rank(name)
        if name in self._known and self._known[name] <= rank:
            return
        if len(self._heap) > 2 * len(self._members) + 64:
            self._known = {each: at for each, at in self._known.items() if each in self._members}
            self._heap = [entry for entry in self._heap if self._known.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)
        self._known[name] = rank
        heapq.heappush(self._heap, (rank, next(self._serial), name))

    def first(self) -> Name | None:
        """The member of the lowest rank."""
        while self._heap:
            rank, _, name = self._heap[0]
            if self._known.get(name) != rank:  # it came back with a lower one
                heapq.heappop(self._heap)
            elif name not in self._members:
                heapq.heappop(self._heap)
                del self._known[name]
            elif rank < (now := self._rank(name)):
                heapq.heapreplace(self._heap, (now, next(self._serial), name))
                self._known[name] = now
            else:
                return name
        return None
