"""Who runs first: first come first served, by priority, by deadline, or by fair share."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol, cast

from ridgeline.core.parts import load_part
from ridgeline.core.request import Request
from ridgeline.scheduler.growing_ranks import GrowingRanks
from ridgeline.scheduler.sequence import Lane, Sequence, SequenceUpdate

Rank = tuple[float, ...]

INPUT_TOKEN_COST, OUTPUT_TOKEN_COST = 1.0, 2.0


class QueuePolicy(Protocol):
    """Orders waiting sequences, and so also who gives way when blocks run out.

    Sequences wait in lanes, within which the order never changes while they wait. The sequence to
    run next is the one of lowest rank in the lane of lowest rank; the one to preempt is the one
    that would be last.
    """

    def lane(self, request: Request) -> Lane:
        """Where the samples of a request wait."""

    def lane_rank(self, lane: Lane) -> Rank:
        """It never shrinks while sequences wait in the lane."""

    def rank(self, sequence: Sequence) -> Rank: ...

    def entered(self, sequence: Sequence) -> None:
        """The sequence waits from now on."""

    def left(self, sequence: Sequence) -> None:
        """The sequence waits no more."""

    def charge_input(self, sequence: Sequence, num_tokens: int) -> None:
        """So many tokens of the sequence's prompt are computed for it."""

    def charge_outputs(self, updates: Iterable[SequenceUpdate]) -> None:
        """A step gave sequences these tokens."""

    def may_displace(self, sequence: Sequence, other: Sequence) -> bool:
        """Whether a waiting sequence may take the place of one that runs."""

    def displaced_by(self, newcomer: Request, waiting: Iterable[Sequence]) -> Iterator[Sequence]:
        """Those of a full queue whose places a newcomer may take, in the order to take them.

        All samples of a request leave with its first, which alone is in ``waiting``.
        """

    @property
    def preempts(self) -> bool:
        """Whether a waiting sequence may take the place of a running one that it may displace."""

    @property
    def postpones(self) -> bool:
        """Whether the scheduler marks sequences that can no longer make their deadline."""


class FirstComeFirstServed:
    """In order of arrival; a preempted sequence keeps its place, and so does each sample."""

    preempts = False
    postpones = False

    def lane(self, request: Request) -> Lane:
        return 0, ""

    def lane_rank(self, lane: Lane) -> Rank:
        return ()

    def rank(self, sequence: Sequence) -> Rank:
        return (sequence.order, sequence.sample_index)

    def entered(self, sequence: Sequence) -> None: ...

    def left(self, sequence: Sequence) -> None: ...

    def charge_input(self, sequence: Sequence, num_tokens: int) -> None: ...

    def charge_outputs(self, updates: Iterable[SequenceUpdate]) -> None: ...

    def may_displace(self, sequence: Sequence, other: Sequence) -> bool:
        return False

    def displaced_by(self, newcomer: Request, waiting: Iterable[Sequence]) -> Iterator[Sequence]:
        yield from ()


class EarliestDeadlineFirst(FirstComeFirstServed):
    """By ``Request.deadline_s``, then by arrival; without a deadline last.

    What can no longer make its deadline is postponed behind all that can (by the scheduler, which
    predicts): under overload, plain EDF serves everybody just too late (Liu and Layland 1973 prove
    it optimal only without overload).
    """

    postpones = True

    def rank(self, sequence: Sequence) -> Rank:
        deadline_s = sequence.request.deadline_s
        due = float("inf") if deadline_s is None else deadline_s
        return (sequence.postponed, due, *super().rank(sequence))

    def displaced_by(self, newcomer: Request, waiting: Iterable[Sequence]) -> Iterator[Sequence]:
        late = (each for each in waiting if each.postponed)
        yield from sorted(late, key=self.rank, reverse=True)


class FairShare(FirstComeFirstServed):
    """Weighted fair share between tenants by virtual token counters (Sheng et al. 2024, OSDI).

    Each tenant's counter grows by the service that it was given, input tokens once and output
    tokens twice (algorithm 2), over its weight. The tenant of the lowest counter goes next. One
    that comes back after a pause starts from the lowest counter of those that wait, so that
    idleness earns no credit. Counters of different priorities are apart.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._counters: dict[Lane, float] = {}
        self._waiting: Counter[Lane] = Counter()
        self._least_served: dict[int, GrowingRanks[Lane]] = {}  # of those who wait, by priority
        self._last_left: dict[int, Lane] = {}  # whose last waiting sequence left last
        self._prune_at = 1024

    def lane(self, request: Request) -> Lane:
        return 0, request.tenant

    def lane_rank(self, lane: Lane) -> Rank:
        return (self._served(lane),)

    def entered(self, sequence: Sequence) -> None:
        lane = sequence.lane
        if not self._waiting[lane]:
            self._counters[lane] = max(self._served(lane), self._floor(lane[0]))
        self._waiting[lane] += 1
        if lane[0] not in self._least_served:
            self._least_served[lane[0]] = GrowingRanks(self.lane_rank, self._waiting)
        self._least_served[lane[0]].add(lane)

    def left(self, sequence: Sequence) -> None:
        lane = sequence.lane
        self._waiting[lane] -= 1
        if not self._waiting[lane]:
            del self._waiting[lane]
            self._last_left[lane[0]] = lane
            self._prune()

    def charge_input(self, sequence: Sequence, num_tokens: int) -> None:
        self._charge(sequence.lane, INPUT_TOKEN_COST * num_tokens)

    def charge_outputs(self, updates: Iterable[SequenceUpdate]) -> None:
        served: dict[Lane, int] = {}
        for sequence, _, token_ids, _ in updates:
            lane = sequence.lane
            served[lane] = served.get(lane, 0) + len(token_ids)
        for lane, num_tokens in served.items():
            self._charge(lane, OUTPUT_TOKEN_COST * num_tokens)

    def displaced_by(self, newcomer: Request, waiting: Iterable[Sequence]) -> Iterator[Sequence]:
        """The latest of the tenant that has the most samples waiting, as long as that is more.

        Only those of the newcomer's priority count.
        """
        mine = self.lane(newcomer)
        num_waiting = Counter({each: n for each, n in self._waiting.items() if each[0] == mine[0]})
        num_mine = num_waiting[mine] + newcomer.params.n
        of_lane: dict[Lane, list[Sequence]] = {}
        if max(num_waiting.values(), default=0) > num_mine:
            for sequence in sorted(waiting, key=self.rank):
                if sequence.lane in num_waiting:
                    of_lane.setdefault(sequence.lane, []).append(sequence)
        while of_lane:
            most = max(of_lane, key=num_waiting.__getitem__)
            if num_waiting[most] <= num_mine:
                return
            latest = of_lane[most].pop()
            num_waiting[most] -= latest.request.params.n
            if not of_lane[most]:
                del of_lane[most]
            yield latest

    def _charge(self, lane: Lane, cost: float) -> None:
        self._counters[lane] = self._served(lane) + cost / self._weights.get(lane[1], 1.0)

    def _served(self, lane: Lane) -> float:
        served = self._counters.get(lane)
        return self._floor(lane[0]) if served is None else served  # forgotten since it waited last

    def _floor(self, priority: int) -> float:
        heap = self._least_served.get(priority)
        least = None if heap is None else heap.first()
        lane = self._last_left.get(priority) if least is None else least
        return 0.0 if lane is None else self._counters.get(lane, 0.0)

    def _prune(self) -> None:
        """Forget tenants whose counter would be lifted anyway, so that memory stays bounded.

        And all of a priority of which nobody waits.
        """
        if len(self._counters) < self._prune_at:
            return
        floors = {priority: self._floor(priority) for priority, _ in self._waiting}
        self._counters = {
            lane: count
            for lane, count in self._counters.items()
            if lane in self._waiting or count > floors.get(lane[0], math.inf)
        }
        for kept in (self._least_served, self._last_left):
            for priority in kept.keys() - floors.keys():
                del kept[priority]
        self._prune_at = max(1024, 2 * len(self._counters))


class Priority(FairShare):
    """By ``Request.priority``, lowest first; running ones give way to lower ones.

    Tenants of one priority share fairly, and without tenants that is the order of arrival. Under
    lasting overload the highest numbers wait for ever.
    """

    preempts = True

    def lane(self, request: Request) -> Lane:
        return request.priority, request.tenant

    def lane_rank(self, lane: Lane) -> Rank:
        return (lane[0], *super().lane_rank(lane))

    def may_displace(self, sequence: Sequence, other: Sequence) -> bool:
        return sequence.request.priority < other.request.priority

    def displaced_by(self, newcomer: Request, waiting: Iterable[Sequence]) -> Iterator[Sequence]:
        """The latest of the highest number; then, as in `FairShare`, of the newcomer's own."""
        waiting = list(waiting)
        higher = (each for each in waiting if newcomer.priority < each.request.priority)
        yield from sorted(
            higher, key=lambda each: (each.request.priority, *self.rank(each)), reverse=True
        )
        yield from super().displaced_by(newcomer, waiting)


def create_policy(name: str, tenant_weights: Mapping[str, float]) -> QueuePolicy:
    """The policy called ``name``.

    One of `ridgeline.core.settings.scheduling.SCHEDULING_POLICIES`, or an installed one: what makes
    a policy of the tenants' weights, of the group ``ridgeline.queue_policies``.
    """
    match name:
        case "fcfs":
            return FirstComeFirstServed()
        case "priority":
            return Priority(tenant_weights)
        case "edf":
            return EarliestDeadlineFirst()
        case "fair":
            return FairShare(tenant_weights)
    make = load_part("queue_policies", name)
    if make is None:
        raise ValueError(f"there is no scheduling policy {name!r}")
    return cast(QueuePolicy, make(tenant_weights))
