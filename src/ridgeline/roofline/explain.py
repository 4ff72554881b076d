"""What limits a model on a machine and what each change would gain, in numbers and sentences."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, hypot, log

from ridgeline.core.plan import ModelRole
from ridgeline.roofline.batch import BatchShape, decode_batch, make_batch, prefill_batch
from ridgeline.roofline.calibration import Calibration
from ridgeline.roofline.features import main_weight
from ridgeline.roofline.memory import MemoryFit
from ridgeline.roofline.model import PricedModel
from ridgeline.roofline.predict import Bound, StepPredictor
from ridgeline.roofline.price import OpCost, op_costs, pass_work
from ridgeline.roofline.speculation import speculation_gain
from ridgeline.roofline.work import Work

_DRAFTS, _ACCEPTANCE = 4, 0.6
_DRAFT_SHARE = 0.05  # seconds of a drafted token, as a share of a step of the model
_PREFIX_HIT = 0.5
_LARGER = 8  # times the batch


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflinePoint:
    """One forward pass in the roofline: FLOPs per byte, and FLOP/s that it is predicted to reach.

    ``roof_flops_per_s`` is what the roof allows its ops, one after the other, each at its own
    intensity: less than at the intensity of the whole. ``gap`` is how many times slower than that
    the prediction is.
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
    """A change, and how many times faster decode, prefill or the whole would be.

    From ``low`` to ``high`` in 80 of 100 cases. None of them is above the ratio of the bytes, or of
    the roof's seconds where that is larger.
    """

    change: str
    gain: float
    low: float
    high: float
    what: str
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatChange:
    """The model in other formats, and the option that makes it so."""

    change: str
    how: str
    model: PricedModel


def points(
    predictor: StepPredictor, batches: Sequence[int], contexts: Sequence[int]
) -> list[RooflinePoint]:
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


def _point(predictor: StepPredictor, name: str, batch: BatchShape, phase: str) -> RooflinePoint:
    model = predictor.models[ModelRole.TARGET]
    work, seconds = pass_work(model, batch), predictor.batch_seconds(batch)
    interval = predictor.interval(seconds, phase)
    return RooflinePoint(
        name=name,
        phase=phase,
        tokens=batch.num_tokens,
        context=int(batch.stops.max()),
        intensity=work.intensity,
        flops_per_s=work.flops / seconds,
        roof_flops_per_s=work.flops / sum(max(both) for _, *both in _op_roofs(predictor, batch)),
        seconds=seconds,
        low_s=interval.low_s,
        high_s=interval.high_s,
        bound=predictor.bound(batch),
    )


def _roof_seconds(predictor: StepPredictor, work: Work) -> float:
    model, ceilings = predictor.models[ModelRole.TARGET], predictor.calibration.ceilings
    return max(
        work.flops / product_peak(model, predictor.calibration),
        work.num_bytes / ceilings.bytes_per_s(work.num_bytes),
    )


def _op_roofs(predictor: StepPredictor, batch: BatchShape) -> Iterator[tuple[OpCost, float, float]]:
    """Of each op of a forward pass: the roof's seconds of its arithmetic, and of its bytes."""
    model, ceilings = predictor.models[ModelRole.TARGET], predictor.calibration.ceilings
    rate = ceilings.bytes_per_s(pass_work(model, batch).num_bytes)
    for cost in op_costs(model, batch):
        peak = ceilings.peak_flops(model.product_format(main_weight(cost.op)))
        yield (
            cost,
            cost.work.flops / peak * cost.count,
            cost.work.num_bytes / rate * cost.count,
        )


def product_peak(model: PricedModel, calibration: Calibration) -> float:
    """The arithmetic peak of the format that most of the model's products run in."""
    return calibration.ceilings.peak_flops(model.main_product_format)


def ops(predictor: StepPredictor, batch: BatchShape) -> list[OpPoint]:
    """A forward pass by op, the slowest first."""
    rows: dict[str, tuple[int, float, float, float, float]] = {}
    for cost, compute, moving in _op_roofs(predictor, batch):
        name = type(cost.op).__name__
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


def crossover_context(model: PricedModel, batch_size: int) -> int | None:
    """The least context at which reading K and V takes as many bytes as reading the weights;
    ``None`` if that is beyond the model's longest, or its windows are full before."""

    def reads_more_kv(context: int) -> bool:
        work = pass_work(model, decode_batch(batch_size, context))
        return work.kv_read_bytes >= work.weight_bytes

    contexts = range(1, model.spec.max_position + 1)
    at = bisect_left(contexts, True, key=reads_more_kv)
    return contexts[at] if at < len(contexts) else None


def advise(
    predictor: StepPredictor,
    *,
    batch_size: int,
    context: int,
    max_batch: int,
    variants: Sequence[FormatChange] = (),
) -> list[Advice]:
    """What to try next, the largest predicted gain first; what gains nothing is left out.

    ``max_batch`` sequences of that context have room, and ``variants`` are the model otherwise.
    """
    batch = decode_batch(batch_size, context)
    found = [
        Advice(
            **_gain(predictor, batch, _with(predictor, variant.model), batch),
            change=variant.change,
            what="decode",
            how=variant.how,
        )
        for variant in variants
    ]
    larger = min(_LARGER * batch_size, max_batch)
    if larger > batch_size:
        more = decode_batch(larger, context)
        found.append(
            Advice(
                **_gain(predictor, batch, predictor, more, times=larger / batch_size),
                change=f"batch {larger} instead of {batch_size}",
                what="decode throughput",
                how="more requests at once",
            )
        )
    found += [_speculation(predictor, batch_size, context), _prefixes(predictor, context)]
    useful = [advice for advice in found if advice.gain > 1.02]
    return sorted(useful, key=lambda advice: advice.gain, reverse=True)


def _gain(
    predictor: StepPredictor,
    before: BatchShape,
    changed: StepPredictor,
    after: BatchShape,
    *,
    phase: str = "decode",
    times: float = 1.0,
    added_s: float = 0.0,
) -> dict[str, float]:
    """How many times faster, and its interval: errors before and after are taken as independent.

    ``times`` as many tokens come of a pass afterwards, which ``added_s`` follow.
    """
    passes = [(predictor, before), (changed, after)]
    (old, new), (old_work, new_work) = (
        [each.interval(each.batch_seconds(batch), phase) for each, batch in passes],
        [pass_work(each.models[ModelRole.TARGET], batch) for each, batch in passes],
    )
    roof = _roof_seconds(predictor, old_work) / _roof_seconds(changed, new_work)
    limit = times * max(old_work.num_bytes / new_work.num_bytes, roof)
    gain = times * old.seconds / (new.seconds + added_s)
    down = hypot(log(old.seconds / old.low_s), log(new.high_s / new.seconds))
    up = hypot(log(old.high_s / old.seconds), log(new.seconds / new.low_s))
    return {
        "gain": min(limit, gain),
        "low": min(limit, gain * exp(-down)),
        "high": min(limit, gain * exp(up)),
    }


def _speculation(predictor: StepPredictor, batch_size: int, context: int) -> Advice:
    batch = decode_batch(batch_size, context)
    ranges = [(context - 1, context + _DRAFTS)] * batch_size
    verify = make_batch(ranges, batch_size * (1 + _DRAFTS))
    step_s = predictor.batch_seconds(batch)
    tokens, _ = speculation_gain(
        (_ACCEPTANCE,) * _DRAFTS, step_s=step_s, verify_s=step_s, draft_s=0.0
    )
    drafts_s = _DRAFTS * _DRAFT_SHARE * step_s
    return Advice(
        **_gain(predictor, batch, predictor, verify, times=tokens, added_s=drafts_s),
        change=f"speculate {_DRAFTS} tokens at {_ACCEPTANCE:.0%} acceptance",
        what="decode",
        how="--speculation adaptive",
    )


def _prefixes(predictor: StepPredictor, context: int) -> Advice:
    start = min(context - 1, int(context * _PREFIX_HIT))
    whole, rest = prefill_batch(context), prefill_batch(context - start, start=start)
    return Advice(
        **_gain(predictor, whole, predictor, rest, phase="prefill"),
        change=f"{_PREFIX_HIT:.0%} of the prompt found in the prefix cache",
        what="time to first token",
        how="shared prefixes first in the prompt",
    )


def _with(predictor: StepPredictor, model: PricedModel) -> StepPredictor:
    return StepPredictor({ModelRole.TARGET: model}, predictor.calibration)


def sentences(predictor: StepPredictor, found: Sequence[RooflinePoint]) -> list[str]:
    """What limits, in words."""
    model, ceilings = predictor.models[ModelRole.TARGET], predictor.calibration.ceilings
    peak = product_peak(model, predictor.calibration)
    *near, (name, memory) = ridges(model, predictor.calibration).items()
    nearer = "".join(f"; {ridge:.1f} from {level}" for level, ridge in near)
    lines = [
        f"The ridge is at {memory:.1f} FLOPs per byte from {name}: {peak / 1e9:,.0f} GFLOP/s over "
        f"{ceilings.memory.bytes_per_s / 1e9:,.1f} GB/s{nearer}."
    ]
    for phase in ("decode", "prefill"):
        first = next((point for point in found if point.phase == phase), None)
        if first is not None:
            lines.append(
                f"{first.name} has {first.intensity:.1f} FLOPs per byte and is bound by "
                f"{first.bound}; it is predicted to be {first.gap:.1f} times slower than the roof."
            )
    beyond = (p for p in found if p.bound is Bound.MEMORY and p.intensity > memory)
    if (point := next(beyond, None)) is not None:
        is_prefill = point.phase == "prefill"
        batch = (
            prefill_batch(point.context)
            if is_prefill
            else decode_batch(point.tokens, point.context)
        )
        each = ops(predictor, batch)
        slow = next((op for op in each if op.bound is Bound.MEMORY), each[0])
        lines.append(
            f"{point.name} has {point.intensity:.1f} FLOPs per byte, beyond the ridge, and most of "
            "its predicted seconds still go to memory: ops run one after the other, and "
            f"{slow.name} has {slow.intensity:.1f}."
        )
    context, longest = crossover_context(model, 1), model.spec.max_position
    lines.append(
        f"One sequence never reads more K and V than weights: its context ends at {longest:,} "
        "tokens."
        if context is None
        else f"One sequence reads more K and V than weights from {context:,} tokens of context on."
    )
    return lines


def ridges(model: PricedModel, calibration: Calibration) -> dict[str, float]:
    """FLOPs per byte at which arithmetic begins to bind, by the memory level of the data."""
    peak = product_peak(model, calibration)
    return {level.name: peak / level.bytes_per_s for level in calibration.ceilings.levels}


def fit_sentence(found: MemoryFit, context: int) -> str:
    """Whether sequences of ``context`` tokens have room, in words."""
    held, memory = found.weights_bytes / 1e9, found.memory_bytes / 1e9
    pool = found.kv_pool_bytes / 1e9
    share = f", {pool / (memory - held):.0%} of the rest" if pool > 0 else ""
    beside = f"of {memory:,.0f} GB weights take {held:,.1f}, and KV has {pool:,.1f}{share}"
    if found.fits:
        return f"{found.max_batch:,} sequences of {context:,} tokens fit: {beside}."
    return f"One sequence of {context:,} tokens does not fit: {beside}."
