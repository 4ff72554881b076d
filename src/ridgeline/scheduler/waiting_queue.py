"""Waiting sequences in the order of a policy."""

import heapq
from collections.abc import Iterator

from ridgeline.scheduler.growing_ranks import GrowingRanks
from ridgeline.scheduler.policies import QueuePolicy, Rank
from ridgeline.scheduler.sequence import Lane, Sequence


class _Entry:
    """A place in a lane; ``sequence`` is ``None`` once it has left from the middle."""

    __slots__ = ("rank", "sequence")

    def __init__(self, rank: Rank, sequence: Sequence) -> None:
        self.rank = rank
        self.sequence: Sequence | None = sequence

    def __lt__(self, other: "_Entry") -> bool:
        return self.rank < other.rank


class WaitingQueue:
    """One heap per lane of the policy, and one of lanes; entry, exit and the head take O(log n)."""

    def __init__(self, policy: QueuePolicy) -> None:
        self._policy = policy
        self._lanes: dict[Lane, list[_Entry]] = {}
        self._lane_ranks = GrowingRanks(policy.lane_rank, self._lanes)
        self._entries: dict[Sequence, _Entry] = {}
        self._num_dead = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        """In no particular order."""
        return iter(self._entries)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._entries

    def push(self, sequence: Sequence) -> None:
        entry = _Entry(self._policy.rank(sequence), sequence)
        self._entries[sequence] = entry
        lane = sequence.lane
        heapq.heappush(self._lanes.setdefault(lane, []), entry)
        self._policy.entered(sequence)
        self._lane_ranks.add(lane)

    def head(self) -> Sequence | None:
        """The sequence to run next."""
        lane = self._lane_ranks.first()
        return None if lane is None else self._lanes[lane][0].sequence

    def remove(self, sequence: Sequence) -> None:
        self._policy.left(sequence)
        entry = self._entries.pop(sequence)
        entry.sequence = None
        self._num_dead += 1
        self._trim(sequence.lane)
        if self._num_dead > len(self._entries) + 64:
            self._compact()

    def untouched(self) -> Iterator[Sequence]:
        """The first samples of the requests of which nothing was computed yet."""
        return (each for each in self._entries if not each.was_admitted and not each.sample_index)

    def full_rank(self, sequence: Sequence) -> Rank:
        """The lane's rank and the rank within it; sequences that run have one, too."""
        lane = sequence.lane
        return (*self._policy.lane_rank(lane), *self._policy.rank(sequence))

    def _trim(self, lane: Lane) -> None:
        """Let a lane start with a sequence that waits, or be gone."""
        entries = self._lanes[lane]
        while entries and entries[0].sequence is None:
            heapq.heappop(entries)
            self._num_dead -= 1
        if not entries:
            del self._lanes[lane]

    def _compact(self) -> None:
        for entries in self._lanes.values():
            entries[:] = [entry for entry in entries if entry.sequence is not None]
            heapq.heapify(entries)
        self._num_dead = 0
