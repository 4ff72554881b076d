"""Real engines under the load, one visit after another."""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeVar

from ridgeline.bench.serve.runner import run_closed_loop
from ridgeline.bench.serve.session import Arrivals, run_point
from ridgeline.bench.serve.targets import EngineTarget
from ridgeline.core.config import EngineConfig
from ridgeline.engine.async_engine import AsyncEngine
from ridgeline.optimize.load import dialogues
from ridgeline.optimize.objective import Outcome, measured_outcomes
from ridgeline.optimize.space import DEFAULT, Candidate
from ridgeline.planning import Arrival
from ridgeline.roofline.slo import Slo

T = TypeVar("T")
_WARM_UP = 6  # requests that nobody counts, of an engine that has just started


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """What a candidate did with one stretch of load. ``utilization`` is what each phase reached, as
    in ``ridgeline bench serve --json``; ``first_error`` that of the first request that failed."""

    outcomes: tuple[Outcome, ...]
    utilization: dict[str, dict[str, Any]] = field(default_factory=dict)
    acceptance: float | None = None
    first_error: str | None = None


class Measurer(Protocol):
    """Runs candidates under a load: `EngineMeasurer` does."""

    def visit(self, candidate: Candidate, arrivals: Sequence[Arrival], *, seed: int) -> Visit:
        """Requests of these lengths and times, with contents of ``seed``.

        Raises:
            RidgelineError: this candidate does not run here.
        """

    def close(self) -> None:
        """Let go of everything."""


class EngineMeasurer:
    """Engines in processes of their own, of which up to ``most_open`` wait for their next visit.

    ``corpus`` are the tokens that prompts are cut from.
    """

    def __init__(self, base: EngineConfig, corpus: Sequence[int], *, most_open: int) -> None:
        self._base, self._corpus, self._most_open = base, corpus, most_open
        self._engines: dict[Candidate, AsyncEngine] = {}  # the one used last is the last
        # In a thread, so that waiting engines are heard while the caller does other things.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def visit(self, candidate: Candidate, arrivals: Sequence[Arrival], *, seed: int) -> Visit:
        return self._run(self._visit(candidate, arrivals, seed))

    def close(self) -> None:
        for candidate in list(self._engines):
            self._run(self._stop(candidate))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _visit(self, candidate: Candidate, arrivals: Sequence[Arrival], seed: int) -> Visit:
        engine = await self._engine(candidate, arrivals)
        point = await run_point(
            EngineTarget(engine),
            Arrivals(),
            dialogues(arrivals, self._corpus, seed=seed),
            slo=Slo(),
            engine=engine,
        )
        roofline = engine.stats().roofline
        drafted = 0 if roofline is None else roofline.drafted
        return Visit(
            outcomes=measured_outcomes(point.traces),
            utilization={name: asdict(use) for name, use in point.utilization.items()},
            acceptance=roofline.accepted / drafted if roofline is not None and drafted else None,
            first_error=point.summary.first_error,
        )

    async def _engine(self, candidate: Candidate, arrivals: Sequence[Arrival]) -> AsyncEngine:
        engine = self._engines.pop(candidate, None)
        if engine is None:
            if len(self._engines) >= self._most_open:
                others = [each for each in self._engines if each != DEFAULT]
                await self._stop(others[0] if others else DEFAULT)
            engine = AsyncEngine(candidate.config(self._base))
            await engine.start()
            warm = dialogues(arrivals[:_WARM_UP], self._corpus, seed=-1)
            await run_closed_loop(EngineTarget(engine), warm, concurrency=_WARM_UP // 2)
        self._engines[candidate] = engine
        return engine

    async def _stop(self, candidate: Candidate) -> None:
        await self._engines.pop(candidate).shutdown()
