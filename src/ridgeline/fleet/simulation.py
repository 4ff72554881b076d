"""Replicas on one virtual clock: the engine's scheduler in each, a router before them."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf

import numpy as np

from ridgeline.core.config import EngineConfig
from ridgeline.core.plan import ModelRole, StepPlan
from ridgeline.core.protocols import StepTimePredictor
from ridgeline.core.request import Request, RequestTimings
from ridgeline.core.result import SegmentResult, StepResult, StepTimings
from ridgeline.engine.summary import linear_predictor, step_curve
from ridgeline.executors.simulated import SimulatedExecutor, VirtualClock
from ridgeline.fleet.load import LoadTracker, TrackedRequest
from ridgeline.fleet.policies import ByPredictedSeconds, EngineChoice, LoadColumns, Policy, Wanted
from ridgeline.fleet.prefixes import BLOCK_BYTES, BYTES_PER_TOKEN
from ridgeline.planning.simulation import PhaseSeconds, request_of, scheduler_settings
from ridgeline.planning.traffic import RequestTiming, Traffic
from ridgeline.planning.workload import Arrival
from ridgeline.roofline import PricedModel
from ridgeline.roofline.calibration import Calibration
from ridgeline.roofline.separable import SeparablePredictor
from ridgeline.scheduler import Scheduler, SchedulerConfig
from ridgeline.scheduler import Sequence as Sample
from ridgeline.scheduler.prediction import LinearPredictor, StepCurve

_BLOCK_TOKENS = BLOCK_BYTES // BYTES_PER_TOKEN
_USUAL_OUTPUT_TOKENS = 128
_SURE = 0.95  # of the seconds that steps are expected to take at least


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTraffic:
    """What became of a workload on all replicas, how many requests each got, and how much of the
    prompts was cached where they came."""

    traffic: Traffic
    num_requests: tuple[int, ...]
    hit_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedMachine:
    """What each replica is: its scheduler's settings, what steps cost, in predicted seconds and as
    routers are told (``linear``, ``curve``), and seconds of the host for each step and segment."""

    settings: SchedulerConfig
    predictor: StepTimePredictor
    linear: LinearPredictor
    curve: StepCurve
    host_step_s: float = 0.0
    host_segment_s: float = 0.0

    @classmethod
    def of_model(
        cls,
        model: PricedModel,
        calibration: Calibration,
        config: EngineConfig,
        *,
        kv_pool_bytes: float,
    ) -> "SimulatedMachine":
        """A model on a machine that is known, with an engine's settings."""
        predictor = SeparablePredictor({ModelRole.TARGET: model}, calibration)
        executor = SimulatedExecutor(
            predictor.models, predictor, VirtualClock(), block_tokens=config.block_tokens
        )
        return cls(
            settings=scheduler_settings(executor, config, kv_pool_bytes=kv_pool_bytes),
            predictor=predictor,
            linear=linear_predictor(predictor, model),
            curve=step_curve(predictor, model),
            host_step_s=calibration.host_step_s,
            host_segment_s=calibration.host_segment_s,
        )


def simulate_fleet(
    machine: SimulatedMachine, arrivals: Sequence[Arrival], policy: Policy, *, count: int
) -> FleetTraffic:
    """Run a workload on ``count`` equal replicas, each request where the policy puts it.

    The policy sees what a router sees: its own counts and its own view of prefixes, and outputs as
    long as they may be. Same arrivals, same policy: same bits.
    """
    fleet = SimulatedFleet(machine, policy)
    for _ in range(count):
        fleet.add_replica()
    waiting = sorted(arrivals, key=lambda arrival: arrival.arrival_s)
    for arrival in waiting:
        fleet.send(arrival)
    fleet.run_until(inf)
    return fleet.outcome(waiting)


class SimulatedFleet:
    """Replicas behind a router, which come and go.

    A replica is run when something that the router sees may happen in it, or a request goes to it;
    not with each arrival elsewhere. So arrivals cost what their own replica does.
    """

    def __init__(self, machine: SimulatedMachine, policy: Policy) -> None:
        self._machine, self._policy = machine, policy
        self._linear = machine.linear
        self.replicas: list[SimulatedReplica] = []
        self._taking: list[SimulatedReplica] = []
        self._columns = _columns(0, self._linear, machine.settings)
        self._due: list[tuple[float, int]] = []  # when a replica is to be run, and its number
        self._num_sent = 0

    def add_replica(self, now_s: float = 0.0) -> "SimulatedReplica":
        """One more, which takes requests from now on."""
        replica = SimulatedReplica(len(self.replicas), self._machine)
        replica.clock.advance_to(now_s)
        self.replicas.append(replica)
        self._route_to([*self._taking, replica])
        return replica

    def retire(self, replica: "SimulatedReplica") -> None:
        """Send no more to it; what it has goes on."""
        self._route_to([each for each in self._taking if each is not replica])

    def send(self, arrival: Arrival) -> "SimulatedReplica":
        """Place a request that arrives no earlier than all before; returns where it went."""
        self.run_until(arrival.arrival_s)
        number, self._num_sent = self._num_sent, self._num_sent + 1
        wanted, blocks = _wanted(arrival), _blocks(number, arrival)
        return self._place(number, arrival, wanted, blocks)

    def run_until(self, time_s: float) -> None:
        """Run the steps that begin before a time, as far as a router sees them."""
        due = self._due
        while due and due[0][0] < time_s:
            replica = self.replicas[heappop(due)[1]]
            if replica.due_s < time_s:  # else it was run meanwhile
                replica.run_until(time_s)
                self._note(replica)

    def outcome(self, arrivals: Sequence[Arrival]) -> FleetTraffic:
        """What became of all that was sent, once everything has run."""
        replicas = self.replicas
        answers = sorted(
            (answer for replica in replicas for answer in replica.answers),
            key=lambda answer: (answer.done_s, answer.arrival.arrival_s),
        )
        traffic = Traffic(
            answers=tuple(answers),
            begin_s=min(arrival.arrival_s for arrival in arrivals),
            end_s=max(replica.clock() for replica in replicas),
            prefill_s=sum(replica.account.prefill_s for replica in replicas),
            decode_s=sum(replica.account.decode_s for replica in replicas),
            num_steps=sum(replica.executor.num_steps for replica in replicas),
            num_preemptions=sum(replica.scheduler.num_preemptions for replica in replicas),
        )
        hits = sum(replica.scheduler.prefix_cache.stats.hit_tokens for replica in replicas)
        return FleetTraffic(
            traffic=traffic,
            num_requests=tuple(len(replica.answers) for replica in replicas),
            hit_share=hits / max(1, sum(arrival.prompt_tokens for arrival in arrivals)),
        )

    def _place(
        self, number: int, arrival: Arrival, wanted: Wanted, blocks: Sequence[bytes]
    ) -> "SimulatedReplica":
        replica = self._choose(arrival, wanted, blocks)
        replica.run_until(arrival.arrival_s)
        replica.add(number, arrival, wanted, blocks)
        self._note(replica)
        return replica

    def _choose(
        self, arrival: Arrival, wanted: Wanted, blocks: Sequence[bytes]
    ) -> "SimulatedReplica":
        taking = self._taking
        if len(taking) == 1:
            return taking[0]
        if not isinstance(self._policy, ByPredictedSeconds):
            choices = [replica.choice(blocks, self._linear) for replica in taking]
            chosen = self._policy.ranked(wanted, choices)[0].name
            return next(replica for replica in taking if replica.name == chosen)
        if arrival.prefix_tokens:
            self._columns.cached_tokens[:] = [each.cached_tokens(blocks) for each in taking]
        else:
            self._columns.cached_tokens[:] = 0
        return taking[self._policy.cheapest(wanted, self._columns, self._names)]

    def _route_to(self, replicas: list["SimulatedReplica"]) -> None:
        self._taking, self._names = replicas, [replica.name for replica in replicas]
        self._columns = _columns(len(replicas), self._linear, self._machine.settings)
        for row, replica in enumerate(replicas):
            replica.show(self._columns, row)

    def _note(self, replica: "SimulatedReplica") -> None:
        if replica.due_s < inf:
            heappush(self._due, (replica.due_s, replica.number))


class SimulatedReplica:
    """An engine on a clock of its own. ``due_s``: a router sees no change in it before."""

    def __init__(self, number: int, machine: SimulatedMachine) -> None:
        self.number, self.name, self.clock = number, f"{number:04}", VirtualClock()
        self.account = PhaseSeconds(machine.predictor)
        self.executor = _PlanClock(machine, self.account, self.clock)
        self.scheduler = Scheduler(machine.settings, predictor=machine.predictor, clock=self.clock)
        self.tracker = LoadTracker()
        self.tracker.prefixes.renew("simulated", _kv_tokens(machine.settings))
        self._open: dict[Sample, OpenRequest] = {}
        self._flights: deque[tuple[StepPlan, StepResult, float, float]] = deque()
        self._shown: tuple[LoadColumns, int] | None = None
        self.due_s = inf
        self.answers: list[RequestTiming] = []
        self.on_done: Callable[[RequestTiming], None] | None = None

    @property
    def num_open(self) -> int:
        """Requests in progress."""
        return len(self._open)

    def cached_tokens(self, blocks: Sequence[bytes]) -> int:
        """As the router believes."""
        return self.tracker.prefixes.cached_tokens(blocks)

    def choice(self, blocks: Sequence[bytes], linear: LinearPredictor) -> EngineChoice:
        """Itself as policies see it."""
        return self.tracker.choice(
            self.name,
            blocks,
            linear=linear,
            pass_s=linear.pass_s,
            max_seqs=self.scheduler.config.max_num_seqs,
        )

    def show(self, columns: LoadColumns, row: int) -> None:
        """Keep a row of a router's columns as the load is."""
        self._shown = columns, row
        self._update_shown()

    def add(
        self,
        number: int,
        arrival: Arrival,
        wanted: Wanted,
        blocks: Sequence[bytes],
        *,
        begun_at: Callable[[float], None] | None = None,
        handed_over: Callable[["OpenRequest", float], None] | None = None,
    ) -> None:
        """A request comes, at the time to which this replica has run.

        ``begun_at`` is called with the time of its first token. Where there is ``handed_over``, it
        ends with that here, and this is called with what is known of it, and the time.
        """
        self.clock.advance_to(arrival.arrival_s)
        request = request_of(number, arrival)
        if handed_over is not None:
            request = replace(request, params=replace(request.params, max_tokens=1))
        tracked = self.tracker.begin(wanted, blocks)
        opened = OpenRequest(number, arrival, tracked, begun_at=begun_at, handed_over=handed_over)
        self._open_request(request, opened)

    def take_over(
        self, begun: "OpenRequest", wanted: Wanted, blocks: Sequence[bytes], now_s: float
    ) -> None:
        """Go on with a request whose KV has come from another replica, as far as there is room."""
        self.clock.advance_to(now_s)
        arrival = begun.arrival
        request = request_of(begun.number, arrival)
        request = replace(
            request,
            prompt_token_ids=(*request.prompt_token_ids, 1),
            params=replace(request.params, max_tokens=arrival.output_tokens - 1),
            cache_key=request.cache_key or b"own %d" % begun.number,
        )
        self._import_kv(request)
        tracked = self.tracker.begin(wanted, blocks, is_computed=True)
        self._open_request(
            request,
            OpenRequest(begun.number, arrival, tracked, begun.started_s, begun.first_s, 1),
        )

    def _open_request(self, request: Request, opened: "OpenRequest") -> None:
        (sample,) = self.scheduler.add(request, None)
        self._open[sample] = opened
        self._update_shown()
        self.due_s = self.clock()

    def _import_kv(self, request: Request) -> None:
        """Put the whole blocks of a prompt into the prefix cache, as a load out of a tier does."""
        cache, key = self.scheduler.prefix_cache, request.cache_key
        tokens, size = request.prompt_token_ids, cache.block_tokens
        assert key is not None
        for pool in cache.pools:
            pool.now_s = self.clock()
        match = cache.match(key, tokens)
        held = [list(table) for table in match.tables]
        for pool, table in zip(cache.pools, match.tables, strict=True):
            pool.share(table)
        node = match.nodes[-1] if match.nodes else None
        for start in range(len(match.nodes) * size, len(tokens) - size, size):
            if not all(pool.num_free for pool in cache.pools):
                break
            blocks = [pool.allocate(1)[0] for pool in cache.pools]
            for table, block in zip(held, blocks, strict=True):
                table.append(block)
            node = cache.insert(key, node, tokens[start : start + size], blocks)
            if node is None:
                break
        for pool, table in zip(cache.pools, held, strict=True):
            pool.release(table)

    def run_until(self, time_s: float) -> None:
        """Run the steps that begin before a time; decode steps are replayed up to it."""
        clock, scheduler = self.clock, self.scheduler
        num_tokens = num_decoding = 0
        while (scheduler.has_work or self._flights) and clock() < time_s:
            before_s = clock()
            quiet_s = time_s - max(before_s, self.executor.free_s)
            with scheduler.lengthened_replays(quiet_s):
                self._submit()
            if self._flights:
                num_tokens, num_decoding = self._take_result()
            if clock() == before_s and scheduler.wait_s:
                clock.advance(scheduler.wait_s)
        if not self._open:
            self.due_s = inf
        elif self.tracker.num_pending or not num_tokens == num_decoding == len(self._open):
            self.due_s = clock()
        else:
            left = min(sample.max_length - len(sample.token_ids) for sample in self._open)
            self.due_s = clock() + _SURE * max(0, left - 2) * self._step_s

    def _submit(self) -> None:
        while len(self._flights) < self.scheduler.config.max_in_flight:
            plan = self.scheduler.schedule()
            if plan is None:
                return
            result, done_s = self.executor.submit(plan)
            self._flights.append((plan, result, self.clock(), done_s))

    def _take_result(self) -> tuple[int, int]:
        """Apply the oldest plan's result; returns how many tokens its first step computed, and of
        how many sequences."""
        plan, result, started_s, done_s = self._flights.popleft()
        self.clock.advance_to(done_s)
        now_s, has_changed = self.clock(), False
        for sample, _, tokens, _ in self.scheduler.update(plan, result):
            request = self._open[sample]
            if not request.is_running:
                request.started_s = min(request.started_s, started_s)
                if tokens:
                    request.is_running = has_changed = True
                    request.first_s = now_s if request.first_s is None else request.first_s
                    request.tracked.start()
                    if request.begun_at is not None:
                        request.begun_at(now_s)
            if sample.is_finished:
                has_changed = True
                self._end(sample, now_s)
        if has_changed:
            self._update_shown()
        (a_pass,) = plan.passes
        self._step_s = (result.timings.total_s or 0.0) / a_pass.num_steps
        return a_pass.num_tokens, len(a_pass.segments)

    def _end(self, sample: Sample, now_s: float) -> None:
        request = self._open.pop(sample)
        request.tracked.end()
        if request.handed_over is not None:
            request.handed_over(request, now_s)
            return
        arrival, first_s = request.arrival, request.first_s
        ttft_s = None if first_s is None else first_s - arrival.arrival_s
        elapsed_s = now_s - arrival.arrival_s
        num_tokens = request.num_before + sample.num_output_tokens
        has_rate = ttft_s is not None and num_tokens > 1
        timings = RequestTimings(
            queue_s=request.started_s - arrival.arrival_s,
            ttft_s=ttft_s,
            tpot_s=(elapsed_s - (ttft_s or 0.0)) / (num_tokens - 1) if has_rate else None,
            end_to_end_s=elapsed_s,
        )
        self.answers.append(RequestTiming(arrival=arrival, timings=timings, done_s=now_s))
        if self.on_done is not None:
            self.on_done(self.answers[-1])

    def _update_shown(self) -> None:
        if self._shown is not None:
            (columns, row), tracker = self._shown, self.tracker
            columns.num_pending[row] = tracker.num_pending
            columns.pending_tokens[row] = tracker.pending_tokens
            columns.num_running[row] = tracker.num_running
            columns.context_tokens[row] = tracker.context_tokens


@dataclass(slots=True)
class OpenRequest:
    """A request at a replica. ``num_before`` tokens of its output another one has made; for
    ``handed_over`` see `SimulatedReplica.add`."""

    number: int
    arrival: Arrival
    tracked: TrackedRequest
    started_s: float = inf
    first_s: float | None = None
    num_before: int = 0
    begun_at: Callable[[float], None] | None = None
    handed_over: Callable[["OpenRequest", float], None] | None = None
    is_running: bool = False


class _PlanClock:
    """An executor of outputs that end by their length alone: which tokens they have makes no
    difference, and when they come is all that is known of them."""

    def __init__(
        self, machine: SimulatedMachine, predictor: StepTimePredictor, clock: VirtualClock
    ) -> None:
        self._host_step_s = machine.host_step_s
        self._host_segment_s = machine.host_segment_s
        self._predictor, self._clock = predictor, clock
        self.free_s = 0.0  # when the steps in flight will be done
        self.num_steps = 0

    def submit(self, plan: StepPlan) -> tuple[StepResult, float]:
        """The outcome, and when it is known."""
        (a_pass,) = plan.passes
        self.num_steps += a_pass.num_steps
        self._clock.advance(self._host_step_s + len(a_pass.segments) * self._host_segment_s)
        seconds = self._predictor.seconds(plan)
        self.free_s = max(self.free_s, self._clock()) + seconds
        drawn, nothing = SegmentResult(token_ids=(1,) * a_pass.num_steps), SegmentResult()
        result = StepResult(
            step_id=plan.step_id,
            passes=(tuple(drawn if s.outputs.sample else nothing for s in a_pass.segments),),
            timings=StepTimings(forward_s=seconds, total_s=seconds),
        )
        return result, self.free_s


def _kv_tokens(settings: SchedulerConfig) -> int:
    return min(settings.num_blocks, default=0) * settings.block_tokens


def _columns(count: int, linear: LinearPredictor, settings: SchedulerConfig) -> LoadColumns:
    counts = np.zeros((5, count), np.int64)
    return LoadColumns(
        np.full(count, linear.pass_s),
        np.full(count, linear.token_s),
        np.full(count, linear.pair_s),
        np.full(count, settings.max_num_seqs),
        np.full(count, _kv_tokens(settings)),
        *counts,
    )


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
