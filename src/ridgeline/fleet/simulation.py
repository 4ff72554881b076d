"""Several replicas on one virtual clock: the engine's scheduler in each, a router before them."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from ridgeline.core.config import EngineConfig
from ridgeline.core.plan import ModelRole
from ridgeline.engine.summary import linear_price
from ridgeline.executors.simulated import SimulatedExecutor, VirtualClock
from ridgeline.fleet.load import LoadTracker, TrackedRequest
from ridgeline.fleet.policies import EngineChoice, Policy, Wanted
from ridgeline.fleet.prefixes import BLOCK_BYTES, BYTES_PER_TOKEN
from ridgeline.planning.simulation import PhaseSeconds, make_loop, request_of
from ridgeline.planning.traffic import RequestTiming, Traffic
from ridgeline.planning.workload import Arrival
from ridgeline.roofline import PricedModel
from ridgeline.roofline.calibration import Calibration
from ridgeline.roofline.predict import StepPredictor
from ridgeline.scheduler.pricing import LinearPrice

_BLOCK_TOKENS = BLOCK_BYTES // BYTES_PER_TOKEN
_USUAL_OUTPUT_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTraffic:
    """What became of a workload on all replicas, how many requests each got, and how much of the
    prompts was cached where they came."""

    traffic: Traffic
    num_requests: tuple[int, ...]
    hit_share: float


def simulate_fleet(
    model: PricedModel,
    calibration: Calibration,
    arrivals: Sequence[Arrival],
    config: EngineConfig,
    policy: Policy,
    *,
    count: int,
    kv_pool_bytes: float,
) -> FleetTraffic:
    """Run a workload on ``count`` equal replicas, each request where the policy puts it.

    The policy sees what a router sees: its own counts and its own view of prefixes, and outputs as
    long as they may be. Same arrivals, same policy: same bits.
    """
    predictor = StepPredictor({ModelRole.TARGET: model}, calibration)
    price = linear_price(predictor, model)
    replicas = [
        SimulatedReplica(f"{number:04}", model, calibration, config, predictor, kv_pool_bytes)
        for number in range(count)
    ]
    by_name = {replica.name: replica for replica in replicas}
    waiting = sorted(arrivals, key=lambda arrival: arrival.arrival_s)
    for number, arrival in enumerate(waiting):
        now_s = arrival.arrival_s
        for replica in replicas:
            replica.run_until(now_s)
        blocks, wanted = _blocks(number, arrival), _wanted(arrival)
        choices = [replica.choice(blocks, price) for replica in replicas]
        chosen = by_name[policy.ranked(wanted, choices)[0].name]
        chosen.add(number, arrival, wanted, blocks)
    for replica in replicas:
        replica.run_until(inf)
    answers = sorted(
        (answer for replica in replicas for answer in replica.answers),
        key=lambda answer: (answer.done_s, answer.arrival.arrival_s),
    )
    traffic = Traffic(
        answers=tuple(answers),
        begin_s=waiting[0].arrival_s,
        end_s=max(replica.clock() for replica in replicas),
        prefill_s=sum(replica.account.prefill_s for replica in replicas),
        decode_s=sum(replica.account.decode_s for replica in replicas),
        num_steps=sum(replica.executor.num_steps for replica in replicas),
        num_preemptions=sum(replica.scheduler.num_preemptions for replica in replicas),
    )
    stats = [replica.scheduler.prefix_cache.stats for replica in replicas]
    return FleetTraffic(
        traffic=traffic,
        num_requests=tuple(len(replica.answers) for replica in replicas),
        hit_share=sum(each.hit_tokens for each in stats)
        / max(1, sum(arrival.prompt_tokens for arrival in arrivals)),
    )


class SimulatedReplica:
    """An engine on a clock of its own, which is never far behind the fleet's."""

    def __init__(
        self,
        name: str,
        model: PricedModel,
        calibration: Calibration,
        config: EngineConfig,
        predictor: StepPredictor,
        kv_pool_bytes: float,
    ) -> None:
        self.name, self.clock = name, VirtualClock()
        self.account = PhaseSeconds(predictor)
        self.executor = SimulatedExecutor(
            {ModelRole.TARGET: model},
            self.account,
            self.clock,
            block_tokens=config.block_tokens,
            host_step_s=calibration.host_step_s,
            host_segment_s=calibration.host_segment_s,
        )
        self._loop, self.scheduler = make_loop(
            self.executor, config, self.clock, price=predictor, kv_pool_bytes=kv_pool_bytes
        )
        self._tracker = LoadTracker()
        settings = self.scheduler.config
        kv_tokens = min(settings.num_blocks, default=0) * settings.block_tokens
        self._tracker.prefixes.renew("simulated", kv_tokens)
        self._open: dict[int, tuple[Arrival, TrackedRequest]] = {}
        self.answers: list[RequestTiming] = []

    def choice(self, blocks: Sequence[bytes], price: LinearPrice) -> EngineChoice:
        """Itself as policies see it."""
        return self._tracker.choice(
            self.name,
            blocks,
            price=price,
            pass_s=price.pass_s,
            max_seqs=self.scheduler.config.max_num_seqs,
        )

    def add(self, number: int, arrival: Arrival, wanted: Wanted, blocks: Sequence[bytes]) -> None:
        """A request comes, at the time to which this replica has run."""
        self.clock.advance_to(arrival.arrival_s)
        request = request_of(number, arrival)
        self._open[number] = arrival, self._tracker.begin(wanted, blocks)
        self._loop.add(request)

    def run_until(self, time_s: float) -> None:
        """Run the steps that begin before a time; decode steps are replayed up to it."""
        while self._loop.has_work and self.clock() < time_s:
            before = self.clock()
            quiet_s = time_s - max(before, self.executor.free_s)
            with self.scheduler.lengthened_replays(quiet_s):
                chunks = self._loop.step()
            for chunk in chunks:
                arrival, tracked = self._open[chunk.request_id]
                tracked.start()
                if chunk.timings is not None:
                    tracked.end()
                    del self._open[chunk.request_id]
                    timing = RequestTiming(
                        arrival=arrival, timings=chunk.timings, done_s=self.clock()
                    )
                    self.answers.append(timing)
            if self.clock() == before and self.scheduler.wait_s:
                self.clock.advance(self.scheduler.wait_s)


def _wanted(arrival: Arrival) -> Wanted:
    return Wanted(
        prompt_tokens=arrival.prompt_tokens,
        output_tokens=min(arrival.output_tokens, _USUAL_OUTPUT_TOKENS),
        session=arrival.prefix.encode(),
    )


def _blocks(number: int, arrival: Arrival) -> list[bytes]:
    """Keys as `prefix_blocks` makes them: those of the shared prefix, then the request's own."""
    shared = arrival.prefix_tokens // _BLOCK_TOKENS
    count = arrival.prompt_tokens // _BLOCK_TOKENS
    return [b"%b/%d" % (arrival.prefix.encode(), index) for index in range(shared)] + [
        b"own %d/%d" % (number, index) for index in range(shared, count)
    ]
