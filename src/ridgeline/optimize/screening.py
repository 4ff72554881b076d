"""Predicting candidates: memory, and the engine's own scheduler on a simulated executor."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import log

from ridgeline.core.config import EngineConfig
from ridgeline.core.formats import NumberFormat, on_load_format
from ridgeline.engine.loading import LoadedModel
from ridgeline.executors.priced import priced_model
from ridgeline.executors.traits import ExecutorTraits
from ridgeline.optimize.objective import Objective, Outcome, simulated_outcomes, value
from ridgeline.optimize.space import DEFAULT, Candidate
from ridgeline.planning import Arrival, simulate
from ridgeline.quant.declared import declared_formats
from ridgeline.roofline import PricedModel
from ridgeline.roofline.calibration import Calibration
from ridgeline.roofline.memory import MemoryFit, fit, rank_pool_bytes
from ridgeline.roofline.slo import Slo

_COMBINATIONS = 128  # that are simulated at the most
_SAME = 0.02  # relative gain of predictions that no change is worth


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedCandidate:
    """A candidate, what it is predicted to reach, and the bytes of its weights and KV pool."""

    candidate: Candidate
    value: float
    memory_bytes: float


class CandidatePredictor:
    """Predicts one model on one machine; ``memory_bytes`` and ``kv_share`` as in
    `roofline.memory.fit`."""

    def __init__(
        self,
        base: EngineConfig,
        loaded: LoadedModel,
        traits: ExecutorTraits,
        calibration: Calibration,
        *,
        memory_bytes: float,
        kv_share: float | None,
    ) -> None:
        self.base = base
        self.calibration = calibration
        self._loaded, self._traits = loaded, traits
        self.available_bytes, self._kv_share = memory_bytes, kv_share
        self._model = lru_cache(maxsize=None)(self._make_model)

    @property
    def context(self) -> int:
        """Tokens of the longest sequence."""
        return self.base.max_model_len or self._loaded.model.spec.max_position

    def model(self, candidate: Candidate) -> PricedModel:
        """As the executor would hold it."""
        config = candidate.config(self.base)
        return self._model(config.quantization, config.kv_cache_dtype)

    def fit(self, candidate: Candidate) -> MemoryFit:
        """What has room beside its weights."""
        config = candidate.config(self.base)
        return fit(
            self.model(candidate),
            memory_bytes=self.available_bytes,
            context=self.context,
            block_tokens=config.block_tokens,
            step_tokens=config.max_num_batched_tokens,
            kv_share=self._kv_share,
        )

    def memory_bytes(self, candidate: Candidate) -> float:
        """Of weights and of the KV pool, which never exceeds what its sequences can use."""
        config, found = candidate.config(self.base), self.fit(candidate)
        each = rank_pool_bytes(
            self.model(candidate), self.context, block_tokens=config.block_tokens
        )
        pool = config.kv_cache_memory_bytes or found.kv_pool_bytes
        return found.weights_bytes + min(pool, config.max_num_seqs * each)

    def outcomes(self, candidate: Candidate, arrivals: Sequence[Arrival]) -> tuple[Outcome, ...]:
        """What becomes of the requests, by prediction; speculation is not predicted."""
        config = replace(
            candidate.without("speculation").config(self.base), max_model_len=self.context
        )
        traffic = simulate(
            self.model(candidate),
            self.calibration,
            arrivals,
            config,
            kv_pool_bytes=self.fit(candidate).kv_pool_bytes,
        )
        return simulated_outcomes(traffic)

    def _make_model(self, quantization: str | None, kv_cache_dtype: str) -> PricedModel:
        model = replace(self._loaded.model, quantization=on_load_format(quantization))
        return priced_model(
            model, self._traits.name, kv_cache_dtype=kv_cache_dtype, held=self._held(quantization)
        )

    def _held(self, quantization: str | None) -> Mapping[str, NumberFormat]:
        definition = self._loaded.definition
        if quantization is not None:
            return {}
        declared = declared_formats(definition)
        config = definition.quantization or {}
        return {
            weight: form
            for weight, form in declared.items()
            if self._traits.expands(form, config) is None
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Screened:
    """``num_points``, of which ``num_simulated`` were simulated and ``num_too_large`` do not fit;
    ``leaders`` are the best of them, the default first."""

    leaders: Sequence[PredictedCandidate]
    num_points: int
    num_simulated: int
    num_too_large: int


def screen(
    predictor: CandidatePredictor,
    points: Sequence[Candidate],
    arrivals: Sequence[Arrival],
    *,
    objective: Objective,
    slo: Slo,
    seconds: float,
    most: int,
    clock: Callable[[], float] = time.monotonic,
    progress: Callable[[int, int], object] = lambda _done, _total: None,
) -> Screened:
    """Predict points on the same requests, and keep the ``most`` that are the best: of each format
    the best one, then by value.

    Single changes are simulated first, combinations in the order of what their changes do alone,
    as many as the time allows. Candidates that another with fewer changes equals are left out.
    """
    deadline, too_large = clock() + seconds, 0
    found = dict[Candidate, PredictedCandidate]()
    alone = dict[tuple[str, object], float]()  # the logarithm of what a change does by itself

    def by_changes(candidate: Candidate) -> float:
        return -sum(alone.get(change, 0.0) for change in candidate.changes)

    singles = [point for point in points if len(point.changes) <= 1]
    combined = [point for point in points if len(point.changes) > 1]
    for stage in (singles, combined):
        order = sorted(stage, key=by_changes)[:_COMBINATIONS]
        for number, point in enumerate(order):
            if clock() > deadline and point != DEFAULT:
                break
            if point != DEFAULT and not predictor.fit(point).fits:
                too_large += 1
                continue
            found[point] = PredictedCandidate(
                candidate=point,
                value=value(objective, predictor.outcomes(point, arrivals), slo),
                memory_bytes=predictor.memory_bytes(point),
            )
            for change in point.changes if stage is singles else ():
                alone[change] = log(found[point].value / found[DEFAULT].value)
            progress(number, len(order))
    return Screened(
        leaders=_leaders(list(found.values()), objective, most),
        num_points=len(points),
        num_simulated=len(found),
        num_too_large=too_large,
    )


def _leaders(
    found: Sequence[PredictedCandidate], objective: Objective, most: int
) -> list[PredictedCandidate]:
    """The default, and the best of the others."""
    by_memory = objective is Objective.MEMORY
    kept = list[PredictedCandidate]()
    for each in sorted(found, key=lambda each: len(each.candidate.changes)):
        if not any(_equals(simpler, each, by_memory=by_memory) for simpler in kept):
            kept.append(each)
    default, others = kept[0], kept[1:]
    others.sort(key=lambda each: each.memory_bytes if by_memory else -each.value)
    firsts = {each.candidate.formats: each for each in reversed(others)}
    best = sorted(firsts.values(), key=others.index)
    best += [each for each in others if each not in best]
    return [default, *best[:most]]


def _equals(simpler: PredictedCandidate, other: PredictedCandidate, *, by_memory: bool) -> bool:
    """Whether the simpler one, whose changes the other has all, is as good."""
    is_part = set(simpler.candidate.changes) <= set(other.candidate.changes)
    same = simpler.value >= (1 - _SAME) * other.value
    return is_part and same and (not by_memory or simpler.memory_bytes <= other.memory_bytes)
