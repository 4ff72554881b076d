"""What a step's seconds are made of, as named terms: the linear model behind predictions.

``t = Σ coefficient · term``. A term is roof seconds, max(FLOPs / peak, bytes / bandwidth), of the
ops of one kind in one shape bucket, or a count. The coefficient of roof seconds is a *slowness*,
1 / η: how many times longer a kernel takes than the roof allows. Buckets overlap: a shape between
two knots is shared between them by the logarithm, so that predictions are continuous.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from math import log2

from ridgeline.core.ops import Head, MoE, Op, Weight, op_weights
from ridgeline.roofline.batch import Batch
from ridgeline.roofline.ceilings import Ceilings
from ridgeline.roofline.model import PricedModel
from ridgeline.roofline.op_cost import experts_touched, op_work
from ridgeline.roofline.price import OpKind, kind_of, pass_work, remember
from ridgeline.roofline.work import Work

TOKEN_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048)
CONTEXT_KNOTS = (64, 512, 4096)
STEP, OP, SEGMENT, ROW, LINK, OTHER = "step", "op", "segment", "row", "link", "other"
_FEW_TOKENS = 8  # of a segment that attention treats as decode

Terms = dict[str, float]


def pass_terms(model: PricedModel, batch: Batch, ceilings: Ceilings) -> Terms:
    """The terms of one forward pass and the sampling after it."""
    memory = ceilings.memory.bytes_per_s
    if len(ceilings.levels) > 1:
        memory = ceilings.bytes_per_s(pass_work(model, batch).num_bytes)
    terms = dict(_token_terms(model, batch, ceilings, memory))
    peak = ceilings.peak_flops(model.compute_format)
    for op, count in model.attention_ops:
        terms[SEGMENT] += count * batch.num_segments
        for name, part, rows in _attention_parts(batch):
            work = op_work(op, part, model)
            roof = max(work.flops / peak, work.num_bytes / memory) * count
            _spread(terms, name, CONTEXT_KNOTS, rows, roof)
            if work.link_messages:
                terms[LINK] = terms.get(LINK, 0.0) + _link_seconds(work, ceilings) * count
    return terms


def _token_terms(
    model: PricedModel, batch: Batch, ceilings: Ceilings, memory: float
) -> Mapping[str, float]:
    """The terms of all ops but attention; computed once for each number of tokens and rows."""
    key = ("terms", id(ceilings), memory, batch.num_tokens, batch.logit_rows)
    found = model.memo.get(key)
    if found is None:
        found = _compute_token_terms(model, batch, ceilings, memory)
        remember(model, key, found)
    terms: Mapping[str, float] = found
    return terms


def _compute_token_terms(
    model: PricedModel, batch: Batch, ceilings: Ceilings, memory: float
) -> Terms:
    num_ops = sum(count for _, count in model.grouped_ops)
    terms: Terms = {STEP: 1.0, ROW: float(batch.logit_rows), OP: float(num_ops), SEGMENT: 0.0}
    link = 0.0
    for op, count in model.token_ops:
        kind, work = kind_of(op), op_work(op, batch, model)
        link += _link_seconds(work, ceilings) * count
        weight = main_weight(op)
        form = model.format_of(weight).name if weight is not None else model.activations.name
        bandwidth = min(memory, ceilings.kernel_bytes_per_s.get(form, memory))
        peak = ceilings.peak_flops(model.product_format(weight))
        roof = max(work.flops / peak, work.num_bytes / bandwidth) * count
        if kind is OpKind.OTHER:
            terms[OTHER] = terms.get(OTHER, 0.0) + roof
            continue
        tokens = float(batch.logit_rows if isinstance(op, Head) else batch.num_tokens)
        if isinstance(op, MoE):
            routed = tokens * op.routing.top_k
            tokens = routed / experts_touched(op.gate.shape[0], op.routing.top_k, tokens)
        if roof:
            _spread(terms, f"{kind}/{form}", TOKEN_KNOTS, tokens, roof)
    if link:
        terms[LINK] = link
    return terms


def main_weight(op: Op) -> Weight | None:
    """The weight whose format decides how an op is computed: a matrix, if it has one."""
    return max(op_weights(op), key=lambda weight: len(weight.shape), default=None)


def _link_seconds(work: Work, ceilings: Ceilings) -> float:
    if not work.link_messages:
        return 0.0
    if not ceilings.link_bytes_per_s:
        return float("inf")
    latency = work.link_messages * ceilings.link_latency_s
    return work.link_bytes / ceilings.link_bytes_per_s + latency


def _attention_parts(batch: Batch) -> list[tuple[str, Batch, float]]:
    """Decode-like and prefill-like segments apart, each with its mean context."""
    few = (batch.stops - batch.starts) <= _FEW_TOKENS
    if few.all():
        return [("attention/decode", batch, _mean_context(batch))]
    if not few.any():
        return [("attention/prefill", batch, _mean_context(batch))]
    parts = []
    for name, chosen in (("attention/decode", few), ("attention/prefill", ~few)):
        part = Batch(starts=batch.starts[chosen], stops=batch.stops[chosen], logit_rows=0)
        parts.append((name, part, _mean_context(part)))
    return parts


def _mean_context(batch: Batch) -> float:
    return int(batch.stops.sum()) / batch.num_segments


def _spread(terms: Terms, name: str, knots: Sequence[int], at: float, value: float) -> None:
    """Add ``value`` to the one or two buckets next to ``at``."""
    index = bisect_right(knots, at)
    if index in (0, len(knots)):
        key = f"{name}@{knots[min(index, len(knots) - 1)]}"
        terms[key] = terms.get(key, 0.0) + value
        return
    low, high = knots[index - 1], knots[index]
    part = (log2(at) - log2(low)) / (log2(high) - log2(low))
    for knot, share in ((low, 1 - part), (high, part)):
        if share:
            key = f"{name}@{knot}"
            terms[key] = terms.get(key, 0.0) + share * value


def add_terms(parts: Sequence[Terms]) -> Terms:
    """The sum."""
    result: Terms = {}
    for part in parts:
        for name, value in part.items():
            result[name] = result.get(name, 0.0) + value
    return result
