"""``ridgeline bench``: from settings to a report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.bench.cases import Case, DecodeCase, PrefillCase, RecomputeCase, check_cases
from ridgeline.bench.ceilings import CeilingMeter, CeilingReport
from ridgeline.bench.measure import Measurement, reached, run_rounds
from ridgeline.bench.native_loops import load_native_loops
from ridgeline.bench.workloads import make_workloads
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.expert_load import plain_load
from ridgeline.core.plan import ModelRole, StepPlan
from ridgeline.engine.loading import load_model
from ridgeline.engine.observing import load_of_experts
from ridgeline.executors import create_executor, executor_traits
from ridgeline.executors.priced import priced_model
from ridgeline.kernels.cpu.library import native_level
from ridgeline.roofline import PricedModel
from ridgeline.roofline.batch import batches_of
from ridgeline.roofline.calibration import (
    calibration_path,
    contradiction,
    corrected,
    describe,
    load,
    measured_elsewhere,
    save,
)
from ridgeline.roofline.features import roof_seconds
from ridgeline.roofline.history import past_errors, past_sentences
from ridgeline.roofline.memory import bits_per_weight
from ridgeline.roofline.predict import StepPredictor

_DECODE_STEPS = 512  # of one case, in a round

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """What was run, on what, and how fast it was.

    ``predictor`` is there if this machine was calibrated for the executor.
    ``calibration`` says with what, and ``contradiction`` that the steps are far from it.
    ``experts`` is how the tokens of all steps were spread over experts (`plain_load`).
    """

    model: str
    executor: str
    priced: PricedModel
    ceilings: CeilingReport
    measurements: Sequence[Measurement]
    predictor: StepPredictor | None = None
    calibration: str | None = None
    contradiction: str | None = None
    experts: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """One object of plain values; of the two rates of a case, one is ``None``."""
        spec = self.priced.spec
        return {
            "model": self.model,
            "executor": self.executor,
            "shape": {
                "layers": len(spec.layers),
                "hidden_size": spec.hidden_size,
                "vocab_size": spec.vocab_size,
            },
            "dtype": self.priced.main_format.name,
            "kv_dtype": self.priced.kv_format.name,
            "bits_per_weight": bits_per_weight(self.priced),
            "product_format": self.priced.main_product_format.name,
            "machine": self.ceilings.conditions["cpu"],
            "ceilings": self.ceilings.to_json(),
            "predicted_by": "roof" if self.predictor is None else "calibration",
            "calibration": self.calibration,
            "past_errors": []
            if self.predictor is None
            else past_sentences(past_errors(self.executor, {self.priced.main_format.name})),
            "contradiction": self.contradiction,
            "cases": [self._case(measurement) for measurement in self.measurements],
            "kv_reuse": self._kv_reuse(),
            "experts": self.experts,
        }

    def _kv_reuse(self) -> list[dict[str, Any]]:
        """How many times as fast a token is with a KV cache, by context, where it was measured."""
        found = {each.case: each for each in self.measurements}
        rows = []
        for anew in self.measurements:
            if isinstance(anew.case, RecomputeCase):
                at = anew.case.context
                kept = found[DecodeCase(batch=anew.case.batch, context=at)]
                ratio = anew.seconds / kept.seconds
                predicted = self._predicted(anew) / self._predicted(kept)
                rows.append({"context": at, "ratio": ratio, "predicted_ratio": predicted})
        return rows

    def _case(self, measurement: Measurement) -> dict[str, Any]:
        case, rate = measurement.case, measurement.tokens_per_s
        is_prefill = isinstance(case, PrefillCase)
        share = reached(measurement, self.ceilings.ceilings(), self.priced.main_product_format)
        return {
            "name": case.name,
            "prompt_tokens": case.prompt_tokens if isinstance(case, PrefillCase) else 0,
            "batch": 1 if isinstance(case, PrefillCase) else case.batch,
            "context": 0 if isinstance(case, PrefillCase) else case.context,
            "prefill_tok_s": rate if is_prefill else None,
            "decode_tok_s": None if is_prefill else rate,
            "mfu": share.mfu,
            "mbu": share.mbu,
            "bound": share.bound,
            "predicted_s": self._predicted(measurement),
            "measured_s": measurement.seconds,
            "joules_per_token": measurement.joules_per_token,
            "energy_source": measurement.energy.source,
            # Counters are of the whole machine, whoever works on it.
            "energy_valid": measurement.energy.valid and not self.ceilings.conditions["contended"],
            "samples": measurement.num_samples,
        }

    def _predicted(self, measurement: Measurement) -> float:
        return sum(map(self._predicted_s, measurement.plans))

    def _predicted_s(self, plan: StepPlan) -> float:
        """By the calibration; without one, what the measured ceilings allow at the least."""
        if self.predictor is not None:
            return self.predictor.seconds(plan)
        ceilings = self.ceilings.ceilings()
        return sum(
            roof_seconds(self.priced, batch, ceilings)
            for a_pass in plan.passes
            for batch in batches_of(a_pass)
        )


def bench_executor(
    config: EngineConfig,
    cases: Sequence[Case],
    *,
    rounds: int,
    progress: Progress | None = None,
) -> BenchReport:
    """Load the model, run the cases in turns with the ceilings, and take medians.

    Raises what loading a model raises, and:
        ContextLengthError: a case is longer than the model's positions.
        CorruptFileError: the file of this machine's calibration is damaged.
        InvalidRequestError: the executor has a benchmark of its own.
        NativeLibraryError: the loops that measure the ceilings are not built.
        OutOfMemoryError: the KV of all cases does not fit.
    """
    loops = load_native_loops()
    loaded = load_model(config, progress=progress)
    check_cases(cases, loaded.model.spec, _DECODE_STEPS)
    executor = create_executor({ModelRole.TARGET: loaded.model}, config)
    if (instead := executor_traits(executor.name).own_bench) is not None:
        executor.close()
        raise InvalidRequestError(instead)
    try:
        workloads = make_workloads(
            executor,
            cases,
            chunk_tokens=config.max_num_batched_tokens,
            decode_steps=_DECODE_STEPS,
        )
        meter = CeilingMeter(loops)
        priced = priced_model(
            loaded.model,
            executor.name,
            kv_cache_dtype=config.kv_cache_dtype,
            held=executor.weight_formats(),
        )
        predictor = _predictor(priced, executor.name)
        measurements = run_rounds(workloads, priced, meter, rounds=rounds, progress=progress)
        experts = plain_load(load_of_experts(executor), executor.expert_tokens())
    finally:
        executor.close()
    ceilings = meter.report()
    return BenchReport(
        model=loaded.name,
        executor=executor.name,
        priced=priced,
        ceilings=ceilings,
        measurements=measurements,
        experts=experts,
        predictor=predictor,
        calibration=describe(predictor.calibration) if predictor else None,
        contradiction=contradicted(predictor, measurements, quiet=not ceilings.contended)
        if predictor
        else None,
    )


def contradicted(
    predictor: StepPredictor, measurements: Sequence[Measurement], *, quiet: bool
) -> str | None:
    """A sentence if all cases took far more, or all far less, than the calibration predicts.

    If the machine was ``quiet``, the calibration's file is corrected by their median.
    Raises `DiskError` if it cannot be written.
    """
    ratio = contradiction(
        [each.seconds / sum(map(predictor.seconds, each.plans)) for each in measurements]
    )
    if ratio is None:
        return None
    found = predictor.calibration
    text = f"Steps take {ratio:.2g} times what the calibration of {found.created[:10]} predicts"
    if not quiet:
        return f"{text}, beside other processes; it is kept as it is."
    save(corrected(found, ratio), calibration_path(found.executor))
    return (
        f"{text}; predictions are scaled by that from now on (ridgeline roofline --calibrate "
        "measures anew)."
    )


def _predictor(model: PricedModel, executor: str) -> StepPredictor | None:
    """By the calibration of this machine; ``None`` if it has none."""
    calibration = load(calibration_path(executor))
    if calibration is None or measured_elsewhere(calibration, native_level()):
        return None
    return StepPredictor({ModelRole.TARGET: model}, calibration)
