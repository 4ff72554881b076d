"""Who runs first: first come first served, by priority, by deadline, or by fair share."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from ridgeline.core.request import Request
from ridgeline.scheduler.growing_ranks import GrowingRanks
from ridgeline.scheduler.sequence import Sequence

Rank = tuple[float, ...]

INPUT_TOKEN_COST, OUTPUT_TOKEN_COST = 1.0, 2.0


class QueuePolicy(Protocol):
    """Orders waiting sequences, and so also who gives way when blocks run out.

    Sequences wait in lanes, within which the order never changes while they wait. The sequence to
    run next is the one of lowest rank in the lane of lowest rank; the one to preempt is the one
    that would be last.
    """

    def lane(self, sequence: Sequence) -> str: ...

    def lane_rank(self, lane: str) -> float:
        """It never shrinks while sequences wait in the lane, nor from one wait to the next."""

    def rank(self, sequence: Sequence) -> Rank: ...

    def entered(self, sequence: Sequence) -> None:
        """The sequence waits from now on."""

    def left(self, sequence: Sequence) -> None:
        """The sequence waits no more."""

    def charge(self, sequence: Sequence, num_input: int, num_output: int) -> None:
        """The sequence was given service for so many tokens."""

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

    def lane(self, sequence: Sequence) -> str:
        return ""

    def lane_rank(self, lane: str) -> float:
        return 0.0

    def rank(self, sequence: Sequence) -> Rank:
        return (sequence.order, sequence.sample_index)

    def entered(self, sequence: Sequence) -> None: ...

    def left(self, sequence: Sequence) -> None: ...

    def charge(self, sequence: Sequence, num_input: int, num_output: int) -> None: ...

    def may_displace(self, sequence: Sequence, other: Sequence) -> bool:
        return False

    def displaced_by(self, newcomer: Request, waiting: Iterable[Sequence]) -> Iterator[Sequence]:
        yield from ()


class Priority(FirstComeFirstServed):
    """By ``Request.priority``, lowest first, then by arrival; running ones give way to lower ones.

    Under lasting overload the highest numbers wait for ever.
    """

    preempts = True

    def rank(self, sequence: Sequence) -> Rank:
        return (sequence.request.priority, *super().rank(sequence))

    def may_displace(self, sequence: Sequence, other: Sequence) -> bool:
        return sequence.request.priority < other.request.priority

    def displaced_by(self, newcomer: Request, waiting: Iterable[Sequence]) -> Iterator[Sequence]:
        higher = (each for each in waiting if newcomer.priority < each.request.priority)
        yield from sorted(higher, key=self.rank, reverse=True)


class EarliestDeadlineFirst(FirstComeFirstServed):
    """By ``Request.deadline_s``, then by arrival; without a deadline last.

    What can no longer make its deadline is postponed behind all that can (by the scheduler, which
    has the price): under overload, plain EDF serves everybody just too late (Liu and Layland 1973
    prove it optimal only without overload).
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
    idleness earns no credit.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._counters: dict[str, float] = {}
        self._waiting: Counter[str] = Counter()
        self._least_served = GrowingRanks(self.lane_rank, self._waiting)  # of those who wait
        self._last_left = ""  # the tenant whose last waiting sequence left last
        self._prune_at = 1024

    def lane(self, sequence: Sequence) -> str:
        return sequence.request.tenant

    def lane_rank(self, lane: str) -> float:
        return self._counters.get(lane, 0.0)

    def entered(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        if not self._waiting[tenant]:
            floor = self._floor()
            self._counters[tenant] = max(self._counters.get(tenant, floor), floor)
        self._waiting[tenant] += 1
        self._least_served.add(tenant)

    def left(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]
            self._last_left = tenant
            self._prune()

    def charge(self, sequence: Sequence, num_input: int, num_output: int) -> None:
        tenant = sequence.request.tenant
        cost = INPUT_TOKEN_COST * num_input + OUTPUT_TOKEN_COST * num_output
        cost /= self._weights.get(tenant, 1.0)
        if tenant not in self._counters:  # forgotten since it waited last
            self._counters[tenant] = self._floor()
        self._counters[tenant] += cost

    def displaced_by(self, newcomer: Request, waiting: Iterable[Sequence]) -> Iterator[Sequence]:
        """The latest of the tenant that has the most samples waiting, as long as that is more."""
        num_waiting = self._waiting.copy()
        num_mine = num_waiting[newcomer.tenant] + newcomer.params.n
        of_tenant: dict[str, list[Sequence]] = {}
        if max(num_waiting.values(), default=0) > num_mine:
            for sequence in sorted(waiting, key=self.rank):
                of_tenant.setdefault(sequence.request.tenant, []).append(sequence)
        while of_tenant:
            most = max(of_tenant, key=num_waiting.__getitem__)
            if num_waiting[most] <= num_mine:
                return
            latest = of_tenant[most].pop()
            num_waiting[most] -= latest.request.params.n
            if not of_tenant[most]:
                del of_tenant[most]
            yield latest

    def _floor(self) -> float:
        least = self._least_served.first()
        return self._counters.get(self._last_left if least is None else least, 0.0)

    def _prune(self) -> None:
        """Forget tenants whose counter would be lifted anyway, so that memory stays bounded."""
        if len(self._counters) < self._prune_at:
            return
        floor = self._floor()
        self._counters = {
            tenant: count
            for tenant, count in self._counters.items()
            if count > floor or tenant in self._waiting or tenant == self._last_left
        }
        self._prune_at = max(1024, 2 * len(self._counters))


def create_policy(name: str, tenant_weights: Mapping[str, float]) -> QueuePolicy:
    """The policy called ``name``, one of `ridgeline.core.config.SCHEDULING_POLICIES`."""
    match name:
        case "fcfs":
            return FirstComeFirstServed()
        case "priority":
            return Priority()
        case "edf":
            return EarliestDeadlineFirst()
        case "fair":
            return FairShare(tenant_weights)
    raise ValueError(f"there is no scheduling policy {name!r}")
