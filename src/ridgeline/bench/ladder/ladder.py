"""``ridgeline bench ladder``: predict every rung, then measure them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ridgeline.bench.conditions import Watch
from ridgeline.bench.ladder.measuring import (
    Measured,
    log_probabilities,
    measure,
    quality,
)
from ridgeline.bench.ladder.rungs import (
    RUNGS,
    Forecast,
    Rung,
    best_forecast,
    forecast,
    priced_models,
)
from ridgeline.bench.ladder.runs import Drafting
from ridgeline.bench.ladder.subjects import SUBJECTS
from ridgeline.bench.ladder.texts import RecordedText, read_texts
from ridgeline.core.host import usable_cores
from ridgeline.core.plan import ModelRole
from ridgeline.evaluation import Quality
from ridgeline.executors import executor_traits
from ridgeline.roofline.calibration import Calibration
from ridgeline.roofline.model import PricedModel, weights_of

_SLOW_TEXTS, _SLOW_TOKENS = 1, 24  # of a rung without our kernels, or without a KV cache

Progress = Callable[[int, int, str], None]
Show = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RungResult:
    """One rung: what it weighs, what was predicted and what was measured.

    ``format`` is the weights', ``quality`` the embedded model's; random weights have none.
    """

    rung: Rung
    drafting: Drafting
    format: str
    weights_bytes: float
    predicted: Forecast | None
    measured: Measured
    quality: Quality | None


def climb(
    subject: str,
    calibrations: Mapping[str, Calibration],
    *,
    num_tokens: int = 32,
    num_texts: int = 8,
    rounds: int = 3,
    rungs: Sequence[Rung] = RUNGS,
    progress: Progress | None = None,
    show: Show | None = None,
) -> list[RungResult]:
    """All rungs of a subject; those of executors without a calibration have no prediction.

    ``show`` gets each rung of the report as soon as it is measured.
    """
    models = [priced_models(SUBJECTS[subject], rung) for rung in rungs]
    work = [_work(rung, num_texts, num_tokens) for rung in rungs]
    forecasts = [
        _forecast(rung, priced, calibrations, *each)
        for rung, priced, each in zip(rungs, models, work, strict=True)
    ]
    exact = None
    steps: list[RungResult] = []
    for number, (rung, priced, predicted) in enumerate(zip(rungs, models, forecasts, strict=True)):
        if progress is not None:
            progress(number, len(rungs), f"{subject}: {rung.name}")
        drafting = predicted.drafting if predicted else _usual_drafting(rung)
        measured = measure(
            subject,
            rung,
            drafting,
            work[number][0],
            num_tokens=work[number][1],
            rounds=rounds,
        )
        found = steps[-1].quality if steps else None
        if not (SUBJECTS[subject].is_random or rung.speculates):  # speculation changes no output
            documents = log_probabilities(rung)
            exact = documents if exact is None else exact
            found = quality(documents, exact)
        steps.append(
            RungResult(
                rung=rung,
                drafting=drafting,
                format=priced[ModelRole.TARGET].main_format.name,
                weights_bytes=sum(map(_weights_bytes, priced.values())),
                predicted=predicted,
                measured=measured,
                quality=found,
            )
        )
        if show is not None:
            show(_plain(steps[-1], steps[0]))
    return steps


def report(steps_of: Mapping[str, Sequence[RungResult]], watch: Watch) -> dict[str, Any]:
    """One object of plain values."""
    return {
        "conditions": dict(watch.conditions(threads=usable_cores())),
        "subjects": {
            name: [_plain(step, steps[0]) for step in steps] for name, steps in steps_of.items()
        },
    }


def _plain(step: RungResult, first: RungResult) -> dict[str, Any]:
    measured, predicted = step.measured.tokens_per_s, None
    speed_up, predicted_speed_up = measured / first.measured.tokens_per_s, None
    if step.predicted is not None:
        predicted = step.predicted.tokens_per_s
        if first.predicted is not None:
            predicted_speed_up = predicted / first.predicted.tokens_per_s
    return {
        **asdict(step.rung),
        "drafting": str(step.drafting),
        "format": step.format,
        "tokens_per_step": step.measured.tokens_per_step,
        "weights_bytes": step.weights_bytes,
        "resident_bytes": step.measured.resident_bytes,
        "predicted_tok_s": predicted,
        "measured_tok_s": measured,
        "rounds_tok_s": list(step.measured.rates),
        "speed_up": speed_up,
        "predicted_speed_up": predicted_speed_up,
        "perplexity": step.quality.perplexity if step.quality else None,
        "kl": step.quality.kl if step.quality else None,
        "same_top": step.quality.same_top if step.quality else None,
    }


def _work(rung: Rung, num_texts: int, num_tokens: int) -> tuple[Sequence[RecordedText], int]:
    """What a rung decodes: texts, and tokens of each."""
    texts = read_texts("continue", rung.draft_quantization)[:num_texts]
    if executor_traits(rung.executor).is_native and rung.reuses_kv:
        return texts, num_tokens
    return texts[:_SLOW_TEXTS], min(num_tokens, _SLOW_TOKENS)


def _forecast(
    rung: Rung,
    models: Mapping[ModelRole, PricedModel],
    calibrations: Mapping[str, Calibration],
    texts: Sequence[RecordedText],
    num_tokens: int,
) -> Forecast | None:
    calibration = calibrations.get(rung.executor)
    if calibration is None:
        return None
    if rung.speculates:
        return best_forecast(models, calibration, texts, num_tokens, "draft")
    reuse_kv = rung.reuses_kv
    return forecast(models, calibration, texts, num_tokens, Drafting(), reuse_kv=reuse_kv)


def _usual_drafting(rung: Rung) -> Drafting:
    return Drafting(speculation="draft", length=3) if rung.speculates else Drafting()


def _weights_bytes(model: PricedModel) -> float:
    return sum(map(model.bytes_of, weights_of(model)))
