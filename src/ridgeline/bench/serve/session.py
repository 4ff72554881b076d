"""A sweep of rates or concurrencies over one target."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ridgeline.bench.serve.metrics import RequestTrace, Slo, Summary, summarize
from ridgeline.bench.serve.runner import Progress, run_closed_loop, run_open_loop
from ridgeline.bench.serve.targets import Target
from ridgeline.bench.serve.workload import Conversation, Workload
from ridgeline.engine import AsyncEngine
from ridgeline.engine.stats import StepRecord
from ridgeline.roofline.energy import UNKNOWN, Energy, EnergyMeter

_POLL_S = 0.05
_ENERGY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How requests are sent: Poisson at ``rate``, ``concurrency`` at once, or as a trace says."""

    rate: float | None = None
    concurrency: int | None = None

    @property
    def label(self) -> str:
        if self.rate is not None:
            return f"rate {self.rate:g}/s"
        return "trace" if self.concurrency is None else f"concurrency {self.concurrency}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run of a sweep; ``steps`` are the engine's, where it could be asked, and ``energy`` that
    of this machine, if the engine is here."""

    load: Load
    summary: Summary
    traces: Sequence[RequestTrace]
    steps: Sequence[StepRecord] = field(default=())
    energy: Energy = UNKNOWN

    def to_json(self, *, with_traces: bool = False) -> dict[str, Any]:
        result = {"load": asdict(self.load), **asdict(self.summary)}
        output_tokens = self.summary.output_tokens_s * self.summary.wall_s
        result["energy"] = asdict(self.energy) | {
            "joules_per_output_token": self.energy.per_token(output_tokens)
        }
        if self.steps:
            result["mean_sequences_per_step"] = _mean_occupancy(self.steps)
        if with_traces:
            result["traces"] = [asdict(trace) for trace in self.traces]
        return result


async def run_point(
    target: Target,
    load: Load,
    conversations: Sequence[Conversation],
    *,
    slo: Slo,
    think_s: float = 0.0,
    engine: AsyncEngine | None = None,
    may_be_short: bool = False,
    progress: Progress = lambda _: None,
) -> Point:
    """Run one load to the end; in a closed loop answers ``may_be_short``."""
    run: Callable[[], Awaitable[list[RequestTrace]]]
    if load.concurrency is not None:
        concurrency = load.concurrency

        async def run() -> list[RequestTrace]:
            return await run_closed_loop(
                target,
                conversations,
                concurrency=concurrency,
                think_s=think_s,
                may_be_short=may_be_short,
                progress=progress,
            )
    else:

        async def run() -> list[RequestTrace]:
            return await run_open_loop(target, conversations, think_s=think_s, progress=progress)

    steps: list[StepRecord] = []
    watch = asyncio.create_task(_collect_steps(engine, steps)) if engine else None
    energy = UNKNOWN
    try:
        if engine is None:
            traces = await run()
        else:
            traces, energy = await _with_energy(run)
    finally:
        if watch is not None:
            await asyncio.sleep(2 * _POLL_S)
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
    summary = summarize(traces, slo)
    return Point(load=load, summary=summary, traces=traces, steps=steps, energy=energy)


async def _with_energy(
    run: Callable[[], Awaitable[list[RequestTrace]]],
) -> tuple[list[RequestTrace], Energy]:
    """What comes of a run, and the energy meanwhile; counters are read beside the event loop."""
    meter, done = EnergyMeter(), asyncio.Event()
    await asyncio.to_thread(meter.start)

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
    return traces, energy


async def warm_up(target: Target, workload: Workload, count: int) -> None:
    """Send some requests, of other contents, whose figures nobody sees."""
    others = replace(workload, seed=workload.seed + 1_000_003, num_conversations=count, rate=None)
    await run_closed_loop(target, list(others.conversations()), concurrency=max(1, count // 2))


async def _collect_steps(engine: AsyncEngine, steps: list[StepRecord]) -> None:
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
