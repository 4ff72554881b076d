"""How many replicas are wanted: the fewest that will keep the limits, by simulation from now."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.core.errors import SettingsError
from ridgeline.fleet.forecast import ExpectedLoad
from ridgeline.fleet.light_simulation import ReplicaLoad, attainment
from ridgeline.roofline.slo import Slo

_WORTH = 0.02  # of attainment, that more replicas add at least where none reach the target
_SHORTEST_S = 20.0  # that is looked at after a replica would have started, or waited for
_MOST_FEWER = 3  # replicas, that a decision looks down


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingGoal:
    """What is wanted of a fleet of ``min_replicas`` to ``max_replicas``: that a share of ``target``
    of the requests keeps ``slo``.

    Raises:
        SettingsError: there is no such fleet.
    """

    slo: Slo
    min_replicas: int = 1
    max_replicas: int
    target: float = 0.95

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise SettingsError("A fleet has 1 replica or more, and max_replicas at the most.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingDecision:
    """How many replicas there are and are wanted, and why. ``predicted``: by number of replicas the
    share of requests that keep the limits, ``if_few`` at p50 of what is expected, ``if_many`` at
    bursts of it."""

    present: int
    wanted: int
    reason: str
    expected: ExpectedLoad
    if_few: dict[int, float]
    if_many: dict[int, float]


class ScalingPolicy:
    """Decides every few seconds; a replica takes ``start_s`` until it answers.

    The fleet grows when what is expected (p50) would miss the target with those that there are or
    start, to the fewest that keep it; only requests that a replica started now could serve count.
    It shrinks to the most that were needed in the last ``dwell_s``; needed are the fewest that keep
    the target from now on even in bursts.
    """

    def __init__(self, goal: ScalingGoal, *, start_s: float) -> None:
        self.goal, self.start_s = goal, start_s
        self._needed: deque[tuple[float, int]] = deque()
        self._since_s: float | None = None  # of the first decision, or the last that grew

    @property
    def ahead_s(self) -> float:
        """Seconds that are looked at."""
        return self.start_s + max(self.start_s, _SHORTEST_S)

    @property
    def dwell_s(self) -> float:
        """Seconds for which fewer have to be enough."""
        return max(2 * self.start_s, _SHORTEST_S)

    def decide(
        self, now_s: float, replicas: Sequence[ReplicaLoad], expected: ExpectedLoad
    ) -> ScalingDecision:
        """What is wanted now, where these replicas take requests or start."""
        present = len(replicas)
        if_few, if_many = dict[int, float](), dict[int, float]()
        wanted, reason = self._grown(replicas, expected, if_few)
        if wanted <= present:
            wanted, reason = self._shrunk(now_s, replicas, expected, if_many)
        if self._since_s is None or wanted > present:
            self._since_s = now_s
            self._needed.clear()
        return ScalingDecision(
            present=present,
            wanted=wanted,
            reason=reason,
            expected=expected,
            if_few=if_few,
            if_many=if_many,
        )

    def _grown(
        self, replicas: Sequence[ReplicaLoad], expected: ExpectedLoad, found: dict[int, float]
    ) -> tuple[int, str]:
        goal, present = self.goal, len(replicas)
        fewest = max(present, goal.min_replicas)
        for count in range(fewest, max(fewest, goal.max_replicas) + 1):
            found[count] = self._predict(replicas, count, expected, expected.p50_rps, self.start_s)
            if found[count] >= goal.target:
                break
        best = max(found.values())
        wanted = min(n for n, share in found.items() if share >= min(goal.target, best - _WORTH))
        if present < goal.min_replicas:
            return wanted, f"There are to be {goal.min_replicas} at least."
        return wanted, (
            f"{found[present]:.0%} of the requests would keep the limits, with {wanted} "
            f"{found[wanted]:.0%}."
        )

    def _shrunk(
        self,
        now_s: float,
        replicas: Sequence[ReplicaLoad],
        expected: ExpectedLoad,
        found: dict[int, float],
    ) -> tuple[int, str]:
        goal, present = self.goal, len(replicas)
        needed = min(present, goal.max_replicas)
        for count in range(needed - 1, max(goal.min_replicas, needed - _MOST_FEWER) - 1, -1):
            found[count] = self._predict(replicas, count, expected, expected.burst_rps, 0.0)
            if found[count] < goal.target:
                break
            needed = count
        while self._needed and self._needed[0][0] <= now_s - self.dwell_s:
            self._needed.popleft()
        self._needed.append((now_s, needed))
        if present > goal.max_replicas:
            return needed, f"There are to be {goal.max_replicas} at most."
        has_dwelt = self._since_s is not None and now_s - self._since_s >= self.dwell_s
        wanted = min(present, max(count for _, count in self._needed)) if has_dwelt else present
        if wanted == present:
            return wanted, "They are enough, and were needed not long ago."
        share = found.get(wanted, goal.target)
        return wanted, f"{share:.0%} of the requests would keep the limits even if bursts come."

    def _predict(
        self,
        replicas: Sequence[ReplicaLoad],
        count: int,
        expected: ExpectedLoad,
        rate_rps: float,
        from_s: float,
    ) -> float:
        return attainment(
            self._with_count(replicas, count),
            rate_rps,
            expected.lengths,
            self.goal.slo,
            from_s=from_s,
            until_s=self.ahead_s,
        )

    def _with_count(self, replicas: Sequence[ReplicaLoad], count: int) -> list[ReplicaLoad]:
        """Without those that have the least to do, or with new ones."""
        by_load = sorted(replicas, key=lambda each: (each.starts_in_s, -each.load.num_requests))
        like = by_load[0]
        new = like.as_new(self.start_s)
        return [*by_load[:count], *[new] * (count - len(by_load))]
