"""What limits a model on a machine and what each change would gain, in numbers and sentences."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from ridgeline.core.formats import number_format
from ridgeline.core.ops import Weight
from ridgeline.core.plan import ModelRole
from ridgeline.roofline.batch import Batch, decode_batch, make_batch, prefill_batch
from ridgeline.roofline.calibration import Calibration
from ridgeline.roofline.features import main_weight
from ridgeline.roofline.memory import kv_bytes_per_token, weights_bytes
from ridgeline.roofline.model import PricedModel, weights_of
from ridgeline.roofline.predict import Bound, StepPredictor
from ridgeline.roofline.price import op_costs, pass_work
from ridgeline.roofline.queueing import speculation_gain

_DRAFTS, _ACCEPTANCE = 4, 0.6
_DRAFT_SHARE = 0.05  # seconds of a drafted token, as a share of a step of the model
_PREFIX_HIT = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One forward pass in the roofline: FLOPs per byte, and FLOP/s that it is predicted to reach.

    ``roof_flops_per_s`` is what the roof allows at that intensity; ``gap`` is how many times slower
    than the roof the prediction is.
    """

    name: str
    phase: str
    tokens: int
    context: int
    intensity: float
    flops_per_s: float
    roof_flops_per_s: float
    seconds: float
    low_s: float
    high_s: float
    bound: Bound

    @property
    def gap(self) -> float:
        return self.roof_flops_per_s / self.flops_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPoint:
    """One kind of op in a forward pass: intensity, share of the roof's seconds, and bound."""

    name: str
    count: int
    intensity: float
    share: float
    bound: Bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A change, and how many times faster decode, prefill or the whole would be."""

    change: str
    gain: float
    what: str
    how: str


def points(
    predictor: StepPredictor, batches: Sequence[int], contexts: Sequence[int]
) -> list[Point]:
    """Decode at each batch and context that the model takes, and prefill of each context."""
    limit = predictor.models[ModelRole.TARGET].spec.max_position
    within = [context for context in contexts if context <= limit]
    found = [
        _point(predictor, f"decode B={size} C={context}", decode_batch(size, context), "decode")
        for context in within
        for size in batches
    ]
    return found + [
        _point(predictor, f"prefill S={context}", prefill_batch(context), "prefill")
        for context in within
    ]


def _point(predictor: StepPredictor, name: str, batch: Batch, phase: str) -> Point:
    model, ceilings = predictor.models[ModelRole.TARGET], predictor.calibration.ceilings
    work, seconds = pass_work(model, batch), predictor.batch_seconds(batch)
    interval = predictor.interval(seconds, phase)
    roof = min(
        product_peak(model, predictor.calibration),
        work.intensity * ceilings.bytes_per_s(work.num_bytes),
    )
    return Point(
        name=name,
        phase=phase,
        tokens=batch.num_tokens,
        context=int(batch.stops.max()),
        intensity=work.intensity,
        flops_per_s=work.flops / seconds,
        roof_flops_per_s=roof,
        seconds=seconds,
        low_s=interval.low_s,
        high_s=interval.high_s,
        bound=predictor.bound(batch),
    )


def product_peak(model: PricedModel, calibration: Calibration) -> float:
    """The arithmetic peak of the format that most of the model's products run in."""
    return calibration.ceilings.peak_flops(model.product_format(_largest(model)))


def _largest(model: PricedModel) -> Weight:
    weights = (main_weight(op) for op, _ in model.token_ops)
    matrices = [weight for weight in weights if weight is not None and "layers" in weight.name]
    return max(matrices, key=lambda weight: prod(weight.shape))


def ops(predictor: StepPredictor, batch: Batch) -> list[OpPoint]:
    """A forward pass by op, the slowest first."""
    model, ceilings = predictor.models[ModelRole.TARGET], predictor.calibration.ceilings
    rate = ceilings.bytes_per_s(pass_work(model, batch).num_bytes)
    rows: dict[str, tuple[int, float, float, float, float]] = {}
    for cost in op_costs(model, batch):
        name = type(cost.op).__name__
        peak = ceilings.peak_flops(model.product_format(main_weight(cost.op)))
        compute = cost.work.flops / peak * cost.count
        moving = cost.work.num_bytes / rate * cost.count
        count, flops, size, compute_s, moving_s = rows.get(name, (0, 0.0, 0.0, 0.0, 0.0))
        rows[name] = (
            count + cost.count,
            flops + cost.work.flops * cost.count,
            size + cost.work.num_bytes * cost.count,
            compute_s + compute,
            moving_s + moving,
        )
    whole = sum(max(compute, moving) for _, _, _, compute, moving in rows.values())
    found = [
        OpPoint(
            name=name,
            count=count,
            intensity=flops / size if size else 0.0,
            share=max(compute, moving) / whole,
            bound=Bound.COMPUTE if compute > moving else Bound.MEMORY,
        )
        for name, (count, flops, size, compute, moving) in rows.items()
    ]
    return sorted(found, key=lambda each: each.share, reverse=True)


def crossover_context(model: PricedModel, batch_size: int) -> float:
    """The context at which reading K and V takes as many bytes as reading the weights."""
    return weights_bytes(model) / (batch_size * kv_bytes_per_token(model))


def advise(predictor: StepPredictor, *, batch_size: int, context: int) -> list[Advice]:
    """What to try next, the largest predicted gain first; what gains nothing is left out."""
    model = predictor.models[ModelRole.TARGET]
    batch = decode_batch(batch_size, context)
    before = predictor.batch_seconds(batch)
    found = []
    for name in ("int8", "int4"):
        if model.weights is None and not _is_quantized(model):
            after = _with(predictor, _quantized(model, name)).batch_seconds(batch)
            found.append(
                Advice(
                    change=f"quantize weights to {name}",
                    gain=before / after,
                    what="decode",
                    how=f"--quantization {name}",
                )
            )
    if not model.kv_format.is_quantized:
        after = _with(predictor, replace(model, kv=number_format("int8"))).batch_seconds(batch)
        how = "--kv-cache-dtype int8"
        found.append(Advice(change="int8 KV cache", gain=before / after, what="decode", how=how))
    larger = batch_size * 8
    more = predictor.batch_seconds(decode_batch(larger, context))
    found.append(
        Advice(
            change=f"batch {larger} instead of {batch_size}",
            gain=8 * before / more,
            what="decode throughput",
            how="more requests at once",
        )
    )
    found.append(_speculation(predictor, batch_size, context, before))
    found.append(_prefixes(predictor, context))
    useful = [advice for advice in found if advice.gain > 1.02]
    return sorted(useful, key=lambda advice: advice.gain, reverse=True)


def _speculation(predictor: StepPredictor, batch_size: int, context: int, before: float) -> Advice:
    ranges = [(context - 1, context + _DRAFTS)] * batch_size
    verify = predictor.batch_seconds(make_batch(ranges, batch_size * (1 + _DRAFTS)))
    _, gain = speculation_gain(
        (_ACCEPTANCE,) * _DRAFTS, step_s=before, verify_s=verify, draft_s=_DRAFT_SHARE * before
    )
    return Advice(
        change=f"speculate {_DRAFTS} tokens at {_ACCEPTANCE:.0%} acceptance",
        gain=gain,
        what="decode",
        how="--speculation adaptive",
    )


def _prefixes(predictor: StepPredictor, context: int) -> Advice:
    whole = predictor.batch_seconds(prefill_batch(context))
    start = min(context - 1, int(context * _PREFIX_HIT))
    rest = predictor.batch_seconds(prefill_batch(context - start, start=start))
    return Advice(
        change=f"{_PREFIX_HIT:.0%} of the prompt found in the prefix cache",
        gain=whole / rest,
        what="time to first token",
        how="shared prefixes first in the prompt",
    )


def _is_quantized(model: PricedModel) -> bool:
    return any(form.is_quantized for form in model.weight_formats.values())


def _quantized(model: PricedModel, name: str) -> PricedModel:
    """The layers' matrices, and others that the executor stores alike, in another format."""
    form = number_format(name)
    if not model.weight_formats:
        return replace(model, weights=form)
    formats = {
        weight.name: form if _is_product(weight) else model.format_of(weight)
        for weight in weights_of(model)
    }
    return replace(model, weight_formats=formats)


def _is_product(weight: Weight) -> bool:
    is_vector = len(weight.shape) < 2 or weight.name.endswith(("_bias", "_norm"))
    return not is_vector and not weight.name.endswith("router")


def _with(predictor: StepPredictor, model: PricedModel) -> StepPredictor:
    return StepPredictor({ModelRole.TARGET: model}, predictor.calibration)


def sentences(predictor: StepPredictor, found: Sequence[Point]) -> list[str]:
    """What limits, in words."""
    model, ceilings = predictor.models[ModelRole.TARGET], predictor.calibration.ceilings
    peak = product_peak(model, predictor.calibration)
    ridge = peak / ceilings.memory.bytes_per_s
    lines = [
        f"The ridge is at {ridge:.1f} FLOPs per byte: {peak / 1e9:,.0f} GFLOP/s over "
        f"{ceilings.memory.bytes_per_s / 1e9:,.1f} GB/s."
    ]
    for phase in ("decode", "prefill"):
        first = next((point for point in found if point.phase == phase), None)
        if first is not None:
            lines.append(
                f"{first.name} has {first.intensity:.1f} FLOPs per byte and is bound by "
                f"{first.bound}; it is predicted to be {first.gap:.1f} times slower than the roof."
            )
    context = crossover_context(model, 1)
    lines.append(
        f"One sequence reads more K and V than weights beyond {context:,.0f} tokens of context."
    )
    return lines
