"""A sweep of rates or concurrencies over one target."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import psutil

from ridgeline.bench.energy import UNKNOWN, Energy, EnergyMeter
from ridgeline.bench.serve.costs import Prices, costs
from ridgeline.bench.serve.metrics import RequestTrace, Summary, summarize
from ridgeline.bench.serve.runner import Progress, run_closed_loop, run_open_loop
from ridgeline.bench.serve.targets import Target
from ridgeline.bench.serve.workload import Dialogue, Workload
from ridgeline.engine.client import EngineClient
from ridgeline.engine.stats import StepRecord
from ridgeline.roofline.live import RooflineReport
from ridgeline.roofline.slo import Slo
from ridgeline.roofline.utilization import Utilization, utilization_between

_POLL_S = 0.05
_IDLE_POLLS = 200
_ENERGY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """How requests are sent: Poisson at ``rate``, ``concurrency`` at once, or as a trace says."""

    rate: float | None = None
    concurrency: int | None = None

    @property
    def label(self) -> str:
        if self.rate is not None:
            return f"rate {self.rate:g}/s"
        return "trace" if self.concurrency is None else f"concurrency {self.concurrency}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineUse:
    """Energy of a stretch of time, and how busy the machine looked: the shares of the time in which
    processors ran anything, and in which GPUs did (`nvidia-smi`). Neither says how much was done.
    """

    energy: Energy = UNKNOWN
    processors_busy: float | None = None
    gpus_busy: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """One run of a sweep. If the engine is here: its ``steps``, what each phase reached of the
    ceilings, and what this machine did meanwhile."""

    load: Arrivals
    summary: Summary
    traces: Sequence[RequestTrace]
    slo: Slo = field(default_factory=Slo)
    prices: Prices = field(default_factory=Prices)
    steps: Sequence[StepRecord] = field(default=())
    utilization: Mapping[str, Utilization] = field(default_factory=dict)
    machine: MachineUse | None = None

    def to_json(self, *, with_traces: bool = False) -> dict[str, Any]:
        summary, machine = self.summary, self.machine or MachineUse()
        result: dict[str, Any] = {"load": asdict(self.load), **asdict(summary)}
        rates = (summary.request_rate, summary.completed_rate, summary.goodput)
        result["rpm"] = {
            name: None if rate is None else 60 * rate
            for name, rate in zip(("offered", "completed", "good"), rates, strict=True)
        }
        result["slo"] = asdict(self.slo)
        result["utilization"] = {name: asdict(use) for name, use in self.utilization.items()}
        result["busy"] = {"processors": machine.processors_busy, "gpus": machine.gpus_busy}
        result["cost"] = costs(summary, self.prices, self.utilization)
        output_tokens = summary.output_tokens_s * summary.wall_s
        result["energy"] = asdict(machine.energy) | {
            "joules_per_output_token": machine.energy.per_token(output_tokens)
        }
        if self.steps:
            result["mean_sequences_per_step"] = _mean_occupancy(self.steps)
        if with_traces:
            result["traces"] = [asdict(trace) for trace in self.traces]
        return result


async def run_point(
    target: Target,
    load: Arrivals,
    conversations: Sequence[Dialogue],
    *,
    slo: Slo,
    prices: Prices | None = None,
    think_s: float = 0.0,
    engine: EngineClient | None = None,
    may_be_short: bool = False,
    progress: Progress = lambda _: None,
) -> LoadPoint:
    """Run one load to the end; answers ``may_be_short``, or it is a failure."""
    settings: Any = {"think_s": think_s, "may_be_short": may_be_short, "progress": progress}

    async def run() -> list[RequestTrace]:
        if load.concurrency is None:
            return await run_open_loop(target, conversations, **settings)
        return await run_closed_loop(
            target, conversations, concurrency=load.concurrency, **settings
        )

    steps: list[StepRecord] = []
    watch = asyncio.create_task(_collect_steps(engine, steps)) if engine else None
    before, machine = await _idle_report(engine), None
    try:
        if engine is None:
            traces = await run()
        else:
            traces, machine = await _watched(run)
    finally:
        if watch is not None:
            await asyncio.sleep(2 * _POLL_S)
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
    return LoadPoint(
        load=load,
        summary=summarize(traces, slo, is_open_loop=load.concurrency is None),
        traces=traces,
        slo=slo,
        prices=prices or Prices(),
        steps=steps,
        utilization=utilization_between(before, await _idle_report(engine)),
        machine=machine,
    )


async def _idle_report(engine: EngineClient | None) -> RooflineReport | None:
    """The engine's account of its steps, once they are all priced, which is done without work."""
    if engine is None:
        return None
    for _ in range(_IDLE_POLLS):
        await asyncio.sleep(_POLL_S)
        stats = engine.stats()
        is_idle = not stats.num_running and not stats.num_waiting
        if is_idle and (stats.roofline is None or not stats.roofline.num_pending):
            break
    return engine.stats().roofline


async def _watched(
    run: Callable[[], Awaitable[list[RequestTrace]]],
) -> tuple[list[RequestTrace], MachineUse]:
    """What comes of a run, and what the machine did meanwhile; counters are read beside the event
    loop."""
    meter, done = EnergyMeter(), asyncio.Event()
    await asyncio.to_thread(meter.start)
    psutil.cpu_percent()  # the next one is of the time since

    async def sample() -> Energy:
        while not done.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), _ENERGY_S)
                break
            await asyncio.to_thread(meter.sample)
        return await asyncio.to_thread(meter.stop)

    sampling = asyncio.create_task(sample())
    try:
        traces = await run()
    finally:
        done.set()
        energy = await sampling
    busy = psutil.cpu_percent() / 100
    return traces, MachineUse(energy=energy, processors_busy=busy, gpus_busy=meter.gpu_busy_share)


async def warm_up(target: Target, workload: Workload, count: int) -> None:
    """Send some requests, of other contents, whose figures nobody sees."""
    others = replace(workload, seed=workload.seed + 1_000_003, num_conversations=count, rate=None)
    await run_closed_loop(target, list(others.conversations()), concurrency=max(1, count // 2))


async def _collect_steps(engine: EngineClient, steps: list[StepRecord]) -> None:
    """Keep every step that the engine tells of, from now on."""
    last_id = engine.stats().step_id
    while True:
        await asyncio.sleep(_POLL_S)
        for step in engine.stats().steps:
            if step.step_id > last_id:
                last_id = step.step_id
                steps.append(step)


def _mean_occupancy(steps: Sequence[StepRecord]) -> float:
    """Sequences per step, weighted by the steps' seconds."""
    seconds = sum(step.seconds for step in steps)
    return sum(step.num_sequences * step.seconds for step in steps) / seconds if seconds else 0.0
