"""``ridgeline profile``: an engine's own steps, with and without recording, in turns with the
ceilings."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from ridgeline.bench.ceilings import CeilingMeter
from ridgeline.bench.native_loops import load_native_loops
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ContextLengthError
from ridgeline.core.expert_load import plain_load
from ridgeline.core.recorded_step import RecordedStep
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.engine.engine import Engine
from ridgeline.engine.observing import load_of_experts
from ridgeline.engine.profiling import profile_of, record, stop_recording
from ridgeline.executors import executor_traits
from ridgeline.executors.recorder import Recording
from ridgeline.roofline.profile import Profile

_WARM_UP_PLANS = 3
_MOST_TOKENS_A_PLAN = 128  # that a replay may make for a sequence

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileCase:
    """A prompt of ``prompt_tokens``; or, if that is 0, decode steps of ``batch`` sequences with
    ``context`` tokens behind them."""

    prompt_tokens: int = 0
    batch: int = 1
    context: int = 0

    @property
    def name(self) -> str:
        if self.prompt_tokens:
            return f"prompt of {self.prompt_tokens}"
        return f"batch {self.batch}" + (f" at {self.context}" if self.context else "")


@dataclass(frozen=True, kw_only=True)
class ProfileReport:
    """The round of median length. ``unrecorded_s``: a step's seconds without recording, the median
    of all rounds; ``steps`` are those of the profile. ``experts`` is how tokens were spread over
    experts (`plain_load`), those that were not recorded included."""

    model: str
    executor: str
    dtype: str
    case: ProfileCase
    profile: Profile
    steps: Sequence[RecordedStep]
    unrecorded_s: float
    recorded_s: float
    experts: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """One object of plain values."""
        return {
            "model": self.model,
            "executor": self.executor,
            "dtype": self.dtype,
            "case": self.case.name,
            "unrecorded_s": self.unrecorded_s,
            "recorded_s": self.recorded_s,
            "experts": self.experts,
            **self.profile.to_json(),
        }


def profile_engine(
    config: EngineConfig,
    case: ProfileCase,
    *,
    num_plans: int,
    rounds: int,
    by_layer: bool = False,
    progress: Progress | None = None,
) -> ProfileReport:
    """Load the model, and profile a case in some rounds.

    Raises what loading a model raises, and:
        ContextLengthError: the case is longer than the model's context.
        InvalidRequestError: the executor runs no ops that could be timed.
    """
    engine = Engine(config, progress=progress)
    try:
        driver = _Driver(engine, case, num_plans)
        on_host = executor_traits(engine.executor.name).device_bytes() is None
        meter = CeilingMeter(load_native_loops()) if on_host else None
        unrecorded, recordings = [], []
        for number in range(rounds):
            if progress is not None:
                progress(number, rounds, case.name)
            if meter is not None:
                meter.sample()
            unrecorded.append(driver.unrecorded_s())
            recordings.append(driver.recording())
        ceilings = None if meter is None else meter.report().ceilings()
        profiles = [
            profile_of(engine, each, ceilings=ceilings, by_layer=by_layer) for each in recordings
        ]
        profile = sorted(profiles, key=lambda each: each.seconds)[(rounds - 1) // 2]
        return ProfileReport(
            model=engine.info.name,
            executor=engine.executor.name,
            dtype=engine.observer.models[next(iter(engine.observer.models))].main_format.name,
            case=case,
            profile=profile,
            steps=recordings[profiles.index(profile)].steps(),
            unrecorded_s=statistics.median(unrecorded),
            recorded_s=statistics.median(each.seconds for each in profiles),
            experts=plain_load(load_of_experts(engine.executor), engine.executor.expert_tokens()),
        )
    finally:
        engine.close()


class _Driver:
    """Requests of random tokens, all alike, so that each step is one of the case."""

    def __init__(self, engine: Engine, case: ProfileCase, num_plans: int) -> None:
        self._engine, self._case, self._num_plans = engine, case, num_plans
        self._random = np.random.default_rng(0)
        self._live: list[int] = []
        room = engine.info.config.max_model_len - self._length
        if room < (1 if case.prompt_tokens else 2 * num_plans):
            raise ContextLengthError(
                f"The case {case.name!r} leaves {max(room, 0)} positions of the model's context."
            )
        most = (2 * num_plans + _WARM_UP_PLANS) * _MOST_TOKENS_A_PLAN
        self._max_tokens = 1 if case.prompt_tokens else min(room, most)

    @property
    def _length(self) -> int:
        return self._case.prompt_tokens or max(self._case.context, 1)

    def unrecorded_s(self) -> float:
        """Of a step; leaves the sequences where a recording may begin."""
        if self._case.prompt_tokens:
            self._run_all()  # warms up
            return self._run_all()
        self._begin_decoding()
        begin_s = time.perf_counter()
        for _ in range(self._num_plans):
            self._engine.loop.step()
        seconds = time.perf_counter() - begin_s
        num_steps = sum(record.num_steps for record in self._engine.loop.stats().steps)
        return seconds / max(num_steps, 1)

    def recording(self) -> Recording:
        """Of the case's steps alone."""
        if self._case.prompt_tokens:
            recorded = record(self._engine, 1 << 30)
            self._run_all()
            stop_recording(self._engine)
            return recorded.result()
        recorded = record(self._engine, self._num_plans)
        self._run_until(recorded)
        self._end()
        batch = self._case.batch
        return Recording(
            [each for each in recorded.result().noted if len(each[0].passes[-1].segments) == batch]
        )

    def _run_until(self, recorded: Future[Recording]) -> None:
        while not recorded.done() and self._engine.loop.has_work:
            self._engine.loop.step()
        stop_recording(self._engine)

    def _run_all(self) -> float:
        """One request from its start to its end; its seconds for each step."""
        self._add()
        self._engine.loop.stats()
        begin_s = time.perf_counter()
        while self._engine.loop.has_work:
            self._engine.loop.step()
        seconds = time.perf_counter() - begin_s
        self._live.clear()
        return seconds / max(len(self._engine.loop.stats().steps), 1)

    def _begin_decoding(self) -> None:
        for _ in range(self._case.batch):
            self._add()
        begun = set[int]()
        while len(begun) < self._case.batch:
            begun |= {chunk.request_id for chunk in self._engine.loop.step() if chunk.token_ids}
        for _ in range(_WARM_UP_PLANS):
            self._engine.loop.step()
        self._engine.loop.stats()

    def _add(self) -> None:
        vocabulary = self._engine.info.spec.vocab_size
        request = self._engine.requests.build(
            self._random.integers(0, vocabulary, self._length).tolist(),
            SamplingParams(temperature=0.0, max_tokens=self._max_tokens, ignore_eos=True),
        )
        self._engine.loop.add(request)
        self._live.append(request.request_id)

    def _end(self) -> None:
        for number in self._live:
            self._engine.loop.abort(number)
        self._live.clear()
        while self._engine.loop.has_work:
            self._engine.loop.step()
