"""Traffic on a simulated executor: the real scheduler and the real loop, on virtual time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ridgeline.core.config import EngineConfig, resolve
from ridgeline.core.plan import ModelRole, StepPlan
from ridgeline.core.protocols import Executor, StepPrice
from ridgeline.core.request import Request, RequestTimings
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.engine.loop import EngineLoop
from ridgeline.executors.simulated import SimulatedExecutor, VirtualClock
from ridgeline.planning.workload import Arrival, Slo
from ridgeline.roofline import PricedModel
from ridgeline.roofline.calibration import Calibration
from ridgeline.roofline.predict import StepPredictor
from ridgeline.scheduler import Scheduler, SchedulerConfig, Speculation

_TOKEN = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one request got; seconds since its arrival."""

    arrival: Arrival
    timings: RequestTimings

    def good(self, slo: Slo) -> bool:
        timings = self.timings
        return timings.ttft_s is not None and slo.met(timings.ttft_s, timings.tpot_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What became of a workload. ``seconds`` are from the first arrival to the last token."""

    answers: tuple[Answer, ...]
    seconds: float
    num_steps: int
    num_preemptions: int

    @property
    def output_tok_s(self) -> float:
        return sum(answer.arrival.output_tokens for answer in self.answers) / self.seconds

    @property
    def input_tok_s(self) -> float:
        return sum(answer.arrival.prompt_tokens for answer in self.answers) / self.seconds

    @property
    def mean_ttft_s(self) -> float:
        return _mean([a.timings.ttft_s for a in self.answers if a.timings.ttft_s is not None])

    @property
    def mean_tpot_s(self) -> float:
        return _mean([a.timings.tpot_s for a in self.answers if a.timings.tpot_s is not None])

    def slower(self, factor: float) -> "Traffic":
        """As if everything took ``factor`` times as long; true where all requests came at once."""

        def scaled(seconds: float | None) -> float | None:
            return None if seconds is None else seconds * factor

        answers = tuple(
            replace(
                answer,
                timings=replace(
                    answer.timings,
                    queue_s=answer.timings.queue_s * factor,
                    ttft_s=scaled(answer.timings.ttft_s),
                    tpot_s=scaled(answer.timings.tpot_s),
                    end_to_end_s=answer.timings.end_to_end_s * factor,
                ),
            )
            for answer in self.answers
        )
        return replace(self, answers=answers, seconds=self.seconds * factor)

    def goodput_rps(self, slo: Slo) -> float:
        return sum(answer.good(slo) for answer in self.answers) / self.seconds

    def attainment(self, slo: Slo) -> float:
        """The share of requests that meet every SLO."""
        return sum(answer.good(slo) for answer in self.answers) / len(self.answers)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledPrice:
    """A price times a factor: the ends of a prediction's interval."""

    price: StepPrice
    prefill: float = 1.0
    decode: float = 1.0

    def seconds(self, plan: StepPlan) -> float:
        few = all(s.num_tokens - s.num_drafts <= 1 for a in plan.passes for s in a.segments)
        return self.price.seconds(plan) * (self.decode if few else self.prefill)

    def segment_seconds(self, num_tokens: int, context: int) -> float:
        scale = self.decode if num_tokens <= 1 else self.prefill
        return self.price.segment_seconds(num_tokens, context) * scale


def simulate(
    model: PricedModel,
    calibration: Calibration,
    arrivals: Sequence[Arrival],
    config: EngineConfig,
    *,
    kv_pool_bytes: float,
    price: StepPrice | None = None,
) -> Traffic:
    """Run a workload on one replica, as the engine would with this configuration."""
    clock = VirtualClock()
    price = price or StepPredictor({ModelRole.TARGET: model}, calibration)
    executor = SimulatedExecutor(
        {ModelRole.TARGET: model},
        price,
        clock,
        block_tokens=config.block_tokens,
        host_step_s=calibration.host_step_s,
        host_segment_s=calibration.host_segment_s,
    )
    loop, scheduler = make_loop(executor, config, clock, price=price, kv_pool_bytes=kv_pool_bytes)
    answers = run_arrivals(loop, scheduler, arrivals, clock)
    return Traffic(
        answers=tuple(answers),
        seconds=clock() - min(arrival.arrival_s for arrival in arrivals),
        num_steps=executor.num_steps,
        num_preemptions=scheduler.num_preemptions,
    )


def make_loop(
    executor: Executor,
    config: EngineConfig,
    clock: VirtualClock,
    *,
    price: StepPrice,
    kv_pool_bytes: float,
    speculation: Speculation | None = None,
) -> tuple[EngineLoop, Scheduler]:
    """The engine's own scheduler and loop over an executor, on a virtual clock."""
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
    settings = SchedulerConfig.of_engine(
        config, resolved, windows=tuple(group.window for group in layout.groups)
    )
    scheduler = Scheduler(settings, speculation, price=price, clock=clock)
    return EngineLoop(executor, scheduler, None, clock=clock), scheduler


def run_arrivals(
    loop: EngineLoop, scheduler: Scheduler, arrivals: Sequence[Arrival], clock: VirtualClock
) -> list[Answer]:
    """Send each request at its time, and step until all are answered."""
    waiting = sorted(arrivals, key=lambda arrival: arrival.arrival_s, reverse=True)
    open_requests: dict[int, Arrival] = {}
    answers: list[Answer] = []
    while waiting or open_requests:
        if not loop.has_work and waiting:
            clock.advance_to(waiting[-1].arrival_s)
        while waiting and waiting[-1].arrival_s <= clock():
            arrival = waiting.pop()
            request = _request(len(answers) + len(open_requests), arrival)
            open_requests[request.request_id] = arrival
            loop.add(request)
        before = clock()
        for chunk in loop.step():
            if chunk.timings is not None:
                arrival = open_requests.pop(chunk.request_id)
                answers.append(Answer(arrival=arrival, timings=chunk.timings))
        if clock() == before and scheduler.wait_s:
            clock.advance(scheduler.wait_s)
    return answers


def _request(request_id: int, arrival: Arrival) -> Request:
    """A prompt that shares no prefix with another, and an output of exactly its length."""
    return Request(
        request_id=request_id,
        prompt_token_ids=(_TOKEN,) * arrival.prompt_tokens,
        params=SamplingParams(max_tokens=arrival.output_tokens, ignore_eos=True, temperature=0.0),
        seed=request_id,
        arrival_s=arrival.arrival_s,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
