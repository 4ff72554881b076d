"""Simulated replicas that hand over requests: prompts on one, the rest on another."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

import numpy as np

from ridgeline.fleet.pairs import PairSeconds, pair_seconds, prompt_seconds, transfer_seconds
from ridgeline.fleet.policies import ByPredictedSeconds, Floats, Wanted
from ridgeline.fleet.roles import Roles
from ridgeline.fleet.simulation import (
    FleetTraffic,
    OpenRequest,
    SimulatedFleet,
    SimulatedMachine,
    SimulatedReplica,
)
from ridgeline.planning.workload import Arrival

_SLICE_S = 0.01  # in which replicas run while some prompt is to be handed over


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedLink:
    """What goes from replica to replica: KV of ``token_bytes`` a token; a replica sends or takes
    one prompt after another, ``latency_s`` after its end."""

    token_bytes: float
    bytes_per_s: float
    latency_s: float = 0.05


_Arriving = tuple[float, int, OpenRequest, SimulatedReplica, Wanted, Sequence[bytes]]


class DisaggregatedFleet(SimulatedFleet):
    """Replicas of which the router takes a pair for each request, by predicted seconds.

    ``num_prefill``: instead, so many of them compute all prompts, and the others all the rest.
    """

    def __init__(
        self, machine: SimulatedMachine, link: SimulatedLink, *, num_prefill: int | None = None
    ) -> None:
        super().__init__(machine, ByPredictedSeconds())
        self._link, self._num_prefill = link, num_prefill
        self._arriving: list[_Arriving] = []  # by time, and then by number
        self._roles = Roles()
        self._wire_free_s: dict[SimulatedReplica, float] = {}
        self._num_handing_over = 0
        self.num_handed_over = 0

    def add_replica(self, now_s: float = 0.0) -> SimulatedReplica:
        """See `SimulatedFleet.add_replica`."""
        replica = super().add_replica(now_s)
        replica.on_done = lambda timing: self._roles.note_output(timing.arrival.output_tokens)
        return replica

    def run_until(self, time_s: float) -> None:
        """See `SimulatedFleet.run_until`; what is handed over comes up to a slice late."""
        while self._num_handing_over and (now_s := self._first_s()) < time_s:
            self._run_slice(min(time_s, now_s + _SLICE_S))
        super().run_until(time_s)

    def _first_s(self) -> float:
        """When something may happen next."""
        due = min((each.due_s for each in self.replicas), default=inf)
        return min(due, self._arriving[0][0]) if self._arriving else due

    def _run_slice(self, until_s: float) -> None:
        super().run_until(until_s)
        while self._arriving and self._arriving[0][0] < until_s:
            now_s, _, begun, replica, wanted, blocks = heappop(self._arriving)
            self._num_handing_over -= 1
            replica.run_until(now_s)
            replica.take_over(begun, wanted, blocks, now_s)
            self._note(replica)

    def _place(
        self, number: int, arrival: Arrival, wanted: Wanted, blocks: Sequence[bytes]
    ) -> SimulatedReplica:
        now_s = arrival.arrival_s
        pairs = self._pairs(wanted, blocks, now_s)
        if pairs is None:
            prefill = decode = self._taking.index(self._choose(arrival, wanted, blocks))
        else:
            prefill, decode = pairs.best()
        replica = self._taking[prefill]
        link = self._link
        prompt_s = prompt_seconds(self._linear, wanted, replica.cached_tokens(blocks))
        transfer_s = wanted.prompt_tokens * link.token_bytes / link.bytes_per_s + link.latency_s
        self._roles.note(now_s, wanted, prompt_s=prompt_s, transfer_s=transfer_s)
        replica.run_until(now_s)
        is_first = not replica.tracker.num_pending

        def begun_at(first_s: float) -> None:
            if is_first:
                self._roles.note_seconds(prompt_s + self._linear.pass_s, first_s - now_s)

        hands_over = prefill != decode and arrival.output_tokens > 1
        self._num_handing_over += hands_over

        def send_on(begun: OpenRequest, first_s: float) -> None:
            pairs = self._pairs(wanted, blocks, first_s)
            after = prefill if pairs is None else pairs.best_after(prefill)
            self._send_on(begun, replica, self._taking[after], wanted, blocks, first_s)

        replica.add(
            number,
            arrival,
            wanted,
            blocks,
            begun_at=begun_at,
            handed_over=send_on if hands_over else None,
        )
        self._note(replica)
        return replica

    def _send_on(
        self,
        begun: OpenRequest,
        source: SimulatedReplica,
        target: SimulatedReplica,
        wanted: Wanted,
        blocks: Sequence[bytes],
        now_s: float,
    ) -> None:
        done_s = now_s
        if target is not source:
            self.num_handed_over += 1
            tokens = begun.arrival.prompt_tokens - target.cached_tokens(blocks)
            ends = source, target
            begin_s = max(now_s, *(self._wire_free_s.get(each, 0.0) for each in ends))
            sent_s = begin_s + tokens * self._link.token_bytes / self._link.bytes_per_s
            self._wire_free_s |= dict.fromkeys(ends, sent_s)
            done_s = sent_s + self._link.latency_s
        heappush(self._arriving, (done_s, begun.number, begun, target, wanted, blocks))

    def _pairs(self, wanted: Wanted, blocks: Sequence[bytes], now_s: float) -> PairSeconds | None:
        taking, columns = self._taking, self._columns
        columns.cached_tokens[:] = [each.cached_tokens(blocks) for each in taking]
        if self._num_prefill is not None:
            shares: Floats | None = np.zeros(len(taking))
        else:
            shares = self._roles.shares(now_s, self._names, columns)
        if shares is None:
            return None
        count, link = len(taking), self._link
        rates = np.full((count, count), link.bytes_per_s)
        sizes = [link.token_bytes] * count
        transfer_s = transfer_seconds(wanted.prompt_tokens, sizes, rates, link.latency_s)
        pairs = pair_seconds(wanted, columns, shares, transfer_s / self._roles.scale)
        if self._num_prefill is not None:
            pairs.prefill_s[self._num_prefill :] = inf
            pairs.decode_s[:, : self._num_prefill] = inf
        return pairs


def simulate_disaggregated(
    machine: SimulatedMachine,
    arrivals: Sequence[Arrival],
    link: SimulatedLink,
    *,
    count: int,
    num_prefill: int | None = None,
) -> tuple[FleetTraffic, float]:
    """Run a workload on ``count`` equal replicas that hand over requests; see `DisaggregatedFleet`.
    Returns the share that was handed over as well."""
    fleet = DisaggregatedFleet(machine, link, num_prefill=num_prefill)
    for _ in range(count):
        fleet.add_replica()
    waiting = sorted(arrivals, key=lambda arrival: arrival.arrival_s)
    for arrival in waiting:
        fleet.send(arrival)
    fleet.run_until(inf)
    return fleet.outcome(waiting), fleet.num_handed_over / len(waiting)
