"""Traffic on a simulated executor: the real scheduler and the real loop, on virtual time."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

from ridgeline.core.config import EngineConfig, resolve
from ridgeline.core.plan import ModelRole, StepPlan
from ridgeline.core.protocols import Executor, StepTimePredictor
from ridgeline.core.request import Request
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.engine.loop import EngineLoop
from ridgeline.executors.simulated import SimulatedExecutor, VirtualClock
from ridgeline.planning.traffic import RequestTiming, Traffic
from ridgeline.planning.workload import Arrival
from ridgeline.roofline import PricedModel
from ridgeline.roofline.calibration import Calibration
from ridgeline.roofline.predict import StepPredictor
from ridgeline.scheduler import Scheduler, SchedulerConfig, Speculation

_TOKEN = 1
_OWN_TOKENS = 1 << 31  # from here on tokens that belong to one request alone


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledPredictor:
    """Predictions times a factor: the ends of their interval."""

    predictor: StepTimePredictor
    prefill: float = 1.0
    decode: float = 1.0

    def seconds(self, plan: StepPlan) -> float:
        few = all(s.num_tokens - s.num_drafts <= 1 for a in plan.passes for s in a.segments)
        return self.predictor.seconds(plan) * (self.decode if few else self.prefill)

    def segment_seconds(self, num_tokens: int, context: int) -> float:
        scale = self.decode if num_tokens <= 1 else self.prefill
        return self.predictor.segment_seconds(num_tokens, context) * scale


class PhaseSeconds:
    """A predictor that adds up the seconds of the steps it was asked for, by phase.

    In a step of both phases, prefill takes what its segments add to the step.
    """

    def __init__(self, predictor: StepTimePredictor) -> None:
        self._predictor = predictor
        self.prefill_s = self.decode_s = 0.0

    def seconds(self, plan: StepPlan) -> float:
        total = self._predictor.seconds(plan)
        segments = [segment for a_pass in plan.passes for segment in a_pass.segments]
        prefills = [each for each in segments if each.stop - each.start - each.num_drafts > 1]
        added = sum(self._predictor.segment_seconds(s.num_tokens, s.start) for s in prefills)
        prefill_s = total if len(prefills) == len(segments) else min(total, added)
        self.prefill_s += prefill_s
        self.decode_s += total - prefill_s
        return total

    def segment_seconds(self, num_tokens: int, context: int) -> float:
        return self._predictor.segment_seconds(num_tokens, context)


def simulate(
    model: PricedModel,
    calibration: Calibration,
    arrivals: Sequence[Arrival],
    config: EngineConfig,
    *,
    kv_pool_bytes: float,
    predictor: StepTimePredictor | None = None,
) -> Traffic:
    """Run a workload on one replica, as the engine would with this configuration."""
    clock = VirtualClock()
    predictor = predictor or StepPredictor({ModelRole.TARGET: model}, calibration)
    account = PhaseSeconds(predictor)
    executor = SimulatedExecutor(
        {ModelRole.TARGET: model},
        account,
        clock,
        block_tokens=config.block_tokens,
        host_step_s=calibration.host_step_s,
        host_segment_s=calibration.host_segment_s,
    )
    loop, scheduler = make_loop(
        executor, config, clock, predictor=predictor, kv_pool_bytes=kv_pool_bytes
    )
    answers = run_arrivals(loop, scheduler, arrivals, clock, busy_until=lambda: executor.free_s)
    return Traffic(
        answers=tuple(answers),
        begin_s=min(arrival.arrival_s for arrival in arrivals),
        end_s=clock(),
        prefill_s=account.prefill_s,
        decode_s=account.decode_s,
        num_steps=executor.num_steps,
        num_preemptions=scheduler.num_preemptions,
    )


def make_loop(
    executor: Executor,
    config: EngineConfig,
    clock: VirtualClock,
    *,
    predictor: StepTimePredictor,
    kv_pool_bytes: float,
    speculation: Speculation | None = None,
) -> tuple[EngineLoop, Scheduler]:
    """The engine's own scheduler and loop over an executor, on a virtual clock."""
    settings = scheduler_settings(executor, config, kv_pool_bytes=kv_pool_bytes)
    scheduler = Scheduler(settings, speculation, predictor=predictor, clock=clock)
    return EngineLoop(executor, scheduler, None, clock=clock), scheduler


def scheduler_settings(
    executor: Executor, config: EngineConfig, *, kv_pool_bytes: float
) -> SchedulerConfig:
    """What an engine's scheduler would be told, with so much KV; allocates it."""
    layout = executor.kv_layout()
    pool = config.kv_cache_memory_bytes or int(kv_pool_bytes)
    resolved = resolve(
        replace(config, kv_cache_memory_bytes=pool),
        spec=executor.spec(),
        executor=executor.name,
        dtype="",
        block_bytes=layout.block_bytes,
        free_bytes=0,
    )
    executor.allocate_kv(resolved.num_blocks)
    return SchedulerConfig.of_engine(
        config,
        resolved,
        windows=tuple(group.window for group in layout.groups),
        max_in_flight=executor.max_in_flight,
    )


def run_arrivals(
    loop: EngineLoop,
    scheduler: Scheduler,
    arrivals: Sequence[Arrival],
    clock: VirtualClock,
    *,
    busy_until: Callable[[], float] | None = None,
) -> list[RequestTiming]:
    """Send each request at its time, and step until all are answered.

    ``busy_until``: when the steps in flight will be done. Where it is given, decode steps are
    replayed until a request arrives that could run; no request's times change by that.
    """
    waiting = sorted(arrivals, key=lambda arrival: arrival.arrival_s, reverse=True)
    open_requests: dict[int, Arrival] = {}
    answers: list[RequestTiming] = []
    while waiting or open_requests:
        if not loop.has_work and waiting:
            clock.advance_to(waiting[-1].arrival_s)
        while waiting and waiting[-1].arrival_s <= clock():
            arrival = waiting.pop()
            request = request_of(len(answers) + len(open_requests), arrival)
            open_requests[request.request_id] = arrival
            loop.add(request)
        before = clock()
        quiet_s = 0.0
        if busy_until is not None:
            next_s = waiting[-1].arrival_s if waiting and not scheduler.is_full else inf
            quiet_s = next_s - max(before, busy_until())
        with scheduler.lengthened_replays(quiet_s):
            chunks = loop.step()
        for chunk in chunks:
            if chunk.timings is not None:
                arrival = open_requests.pop(chunk.request_id)
                answers.append(
                    RequestTiming(arrival=arrival, timings=chunk.timings, done_s=clock())
                )
        if clock() == before and scheduler.wait_s:
            clock.advance(scheduler.wait_s)
    return answers


def request_of(request_id: int, arrival: Arrival) -> Request:
    """A prompt that shares its prefix, if it has one, and an output of exactly its length."""
    prompt = (_TOKEN,) * arrival.prompt_tokens
    if arrival.prefix_tokens:
        shared = zlib.crc32(arrival.prefix.encode()) % _OWN_TOKENS
        own = arrival.prompt_tokens - arrival.prefix_tokens
        prompt = (shared,) * arrival.prefix_tokens + (_OWN_TOKENS + request_id,) * own
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        params=SamplingParams(max_tokens=arrival.output_tokens, ignore_eos=True, temperature=0.0),
        seed=request_id,
        cache_key=b"trace" if arrival.prefix_tokens else None,
        arrival_s=arrival.arrival_s,
    )
