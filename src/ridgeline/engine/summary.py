"""A loaded model in one line: what runs it, in which format, how much room, how fast."""

import os
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from ridgeline.core.config import ResolvedConfig
from ridgeline.core.formats import number_format
from ridgeline.core.host import usable_cores
from ridgeline.core.plan import ModelRole
from ridgeline.engine.info import LoadSummary
from ridgeline.executors.model import ExecutorModel
from ridgeline.executors.priced import priced_model
from ridgeline.executors.registry import executor_traits
from ridgeline.roofline import PricedModel
from ridgeline.roofline.batch import make_batch
from ridgeline.roofline.calibration import disturbance
from ridgeline.roofline.live import Observer
from ridgeline.roofline.memory import bits_per_weight, num_parameters, weights_bytes
from ridgeline.roofline.predict import Prediction, StepPredictor, is_known
from ridgeline.scheduler.prediction import (
    DEFAULT_CURVE,
    DEFAULT_PREDICTOR,
    LinearPredictor,
    StepCurve,
)
from ridgeline.weights import DummyWeights

_CONTEXT = 512  # tokens before the one whose seconds are predicted
_PROMPT, _FAR = 256, 2048
_CURVE_TOKENS = (1, 16, 64, 128, 256, 512, 1024, 2048)
_CURVE_SEQUENCES = 16
_WORTH_SAYING = 1.3  # times as fast


def load_summary(
    name: str, config: ResolvedConfig, model: ExecutorModel, observer: Observer
) -> LoadSummary:
    """What was loaded.

    Nothing is measured for it: seconds are those of a stored calibration, with the interval that
    holds 80 of 100 measured ones. A format on load that is predicted to be `_WORTH_SAYING` times as
    fast is named with its setting.
    """
    priced, predictor = observer.models[ModelRole.TARGET], observer.predictor
    return LoadSummary(
        line=_line(name, config, model, observer),
        weights_format=priced.main_format.name,
        weights_bytes=int(weights_bytes(priced)),
        num_parameters=num_parameters(priced),
        linear=DEFAULT_PREDICTOR if predictor is None else linear_predictor(predictor, priced),
        curve=DEFAULT_CURVE if predictor is None else step_curve(predictor, priced),
    )


def linear_predictor(predictor: StepPredictor, model: PricedModel) -> LinearPredictor:
    """The line through three of its points: a token alone, and a prompt of `_PROMPT` tokens at the
    beginning and after as many as the context allows."""
    context = max(1, min(_FAR, model.spec.max_position - _PROMPT))
    near = predictor.segment_seconds(_PROMPT, 0)
    far = predictor.segment_seconds(_PROMPT, context)
    pair_s = max(0.0, (far - near) / (_PROMPT * context))
    token_s = max(0.0, near / _PROMPT - pair_s * (_PROMPT + 1) / 2)
    of_model = StepPredictor({ModelRole.TARGET: model}, predictor.calibration)
    one_s = of_model.batch_seconds(make_batch([(0, 1)]))
    return LinearPredictor(pass_s=max(0.0, one_s - token_s), token_s=token_s, pair_s=pair_s)


def step_curve(predictor: StepPredictor, model: PricedModel) -> StepCurve:
    """Seconds of a prompt's tokens alone by their number, and of decodes by their context."""
    of_model = StepPredictor({ModelRole.TARGET: model}, predictor.calibration)
    longest, context = model.spec.max_position, min(_FAR, model.spec.max_position - 1)
    tokens = tuple(each for each in _CURVE_TOKENS if each <= max(16, longest))
    near, far = (
        of_model.batch_seconds(make_batch([(before, before + 1)] * _CURVE_SEQUENCES))
        for before in (0, context)
    )
    return StepCurve(
        tokens=tokens,
        seconds=tuple(
            accumulate(  # kernels of many tokens may be faster than those of one
                (of_model.batch_seconds(make_batch([(0, each)], logit_rows=1)) for each in tokens),
                max,
            )
        ),
        context_s=max(0.0, (far - near) / (_CURVE_SEQUENCES * max(1, context))),
    )


def _line(name: str, config: ResolvedConfig, model: ExecutorModel, observer: Observer) -> str:
    priced = observer.models[ModelRole.TARGET]
    form = priced.main_format
    kv_tokens = max(config.num_blocks, default=0) * config.block_tokens
    ranks = f", {config.num_ranks} ranks" if config.num_ranks > 1 else ""
    random = "random " if isinstance(model.weights, DummyWeights) else ""
    parts = [
        f"{Path(name).name if Path(name).exists() else name} on {config.executor}{ranks}",
        f"{random}{form.name} weights, {bits_per_weight(priced):.3g} bits, "
        + _size(weights_bytes(priced)),
        f"context {config.max_model_len:,}"
        + (f", KV cache for {kv_tokens:,} tokens" if config.num_blocks else ""),
    ]
    if not model.spec.has_head:  # rates of decode are not its own
        return " · ".join(parts)
    if observer.predictor is None:
        part = f" -t {usable_cores()}" if usable_cores() < (os.cpu_count() or 1) else ""
        parts.append(f"speed not predicted (`ridgeline roofline{part}` measures this machine once)")
        return " · ".join(parts)
    decode = _decode(observer.predictor, priced)
    busy = disturbance(observer.predictor.calibration) is not None
    hint = " by a calibration on a busy machine (`ridgeline roofline --calibrate`)" if busy else ""
    parts.append(f"predicted {_rate(decode)}{hint}")
    line = " · ".join(parts)
    if form.is_quantized:
        return line
    others = [
        (other, quantization)
        for quantization in executor_traits(config.executor).calibrated_formats
        if number_format(quantization).is_quantized
        for other in [_decode(observer.predictor, _quantized(model, config, quantization))]
    ]
    best = min(others, key=lambda each: each[0].seconds, default=None)
    if best is not None and decode.seconds > _WORTH_SAYING * best[0].seconds:
        times = decode.seconds / best[0].seconds
        line += (
            f" · {times:.1f} times as fast, at some loss of quality, with "
            f"--quantization {best[1]}: {_rate(best[0])}"
        )
    return line


def _decode(predictor: StepPredictor, model: PricedModel) -> Prediction:
    """Of the next token of one sequence."""
    of_model = StepPredictor({ModelRole.TARGET: model}, predictor.calibration)
    context = min(_CONTEXT, model.spec.max_position - 1)
    return of_model.interval(of_model.batch_seconds(make_batch([(context, context + 1)])), "decode")


def _quantized(model: ExecutorModel, config: ResolvedConfig, quantization: str) -> PricedModel:
    kv = "auto" if config.kv_cache_dtype == config.dtype else config.kv_cache_dtype
    return priced_model(
        replace(model, quantization=number_format(quantization)),
        config.executor,
        kv_cache_dtype=kv,
    )


def _rate(decode: Prediction) -> str:
    text = f"{_per_second(decode.seconds)} tok/s"
    if not is_known(decode.low_s, decode.high_s):
        return f"{text} (error unknown)"
    return f"{text} ({_per_second(decode.high_s)}–{_per_second(decode.low_s)})"


def _per_second(seconds: float) -> str:
    rate = 1 / seconds
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"
