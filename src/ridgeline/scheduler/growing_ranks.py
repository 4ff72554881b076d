"""Who has the lowest rank, where ranks only grow."""

import heapq
from collections.abc import Callable, Collection
from itertools import count
from typing import Generic, TypeVar

Name = TypeVar("Name")


class GrowingRanks(Generic[Name]):
    """A heap of names by rank, put right only as far as its top is looked at.

    ``rank`` of a name never shrinks between looks. ``members`` are those who count: names that have
    left stay in the heap until they reach its top or outnumber the others. Of equal ranks the one
    goes first that was added, or put right, first.
    """

    def __init__(
        self, rank: Callable[[Name], tuple[float, ...]], members: Collection[Name]
    ) -> None:
        self._rank = rank
        self._members = members
        self._heap: list[tuple[tuple[float, ...], int, Name]] = []
        self._known: set[Name] = set()  # those in the heap
        self._serial = count()

    def add(self, name: Name) -> None:
        """The name has become a member; adding one again changes nothing."""
        if name in self._known:
            return
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [entry for entry in self._heap if entry[2] in self._members]
            heapq.heapify(self._heap)
            self._known = {name for _, _, name in self._heap}
        self._known.add(name)
        heapq.heappush(self._heap, (self._rank(name), next(self._serial), name))

    def first(self) -> Name | None:
        """The member of the lowest rank."""
        while self._heap:
            rank, _, name = self._heap[0]
            if name not in self._members:
                heapq.heappop(self._heap)
                self._known.discard(name)
            elif rank < (now := self._rank(name)):
                heapq.heapreplace(self._heap, (now, next(self._serial), name))
            else:
                return name
        return None
