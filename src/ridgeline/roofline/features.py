"""What a step's seconds are made of, in named amounts: the model behind predictions.

``t = Σ c·x + Σ_kernels ‖(Σ c·memory, Σ c·arithmetic)‖``: some things take their time whatever else
happens; a kernel reads and computes at once, and takes as long as the slower of the two, or a bit
longer. An amount is seconds at the roof (bytes / bandwidth, instructions / peak) or a count. The
coefficient of roof seconds is a *slowness*, 1 / η: how many times longer a kernel takes than the
roof allows.
"""

from dataclasses import dataclass

from ridgeline.core.formats import NumberFormat
from ridgeline.core.op_facts import OpKind, Rows, Split
from ridgeline.core.ops import AttentionOp, Op, Weight
from ridgeline.core.weight_uses import experts_of, weight_uses
from ridgeline.roofline.batch import BatchShape
from ridgeline.roofline.ceilings import Ceilings
from ridgeline.roofline.model import PricedModel
from ridgeline.roofline.op_cost import adapter_work, expert_bytes, experts_touched, op_work
from ridgeline.roofline.price import op_costs, pass_work, remember, reuse_work
from ridgeline.roofline.work import Work

STEP, OP, SEGMENT, SEQUENCE, ROW, LINK, OTHER = (
    "step", "op", "segment", "sequence", "row", "link", "other",
)  # fmt: skip
STREAM, NEAR, UNPACK, PRODUCT, FILL = "stream", "near", "unpack", "product", "fill"
_FEW_TOKENS = 8  # of a segment that attention treats as decode
_IN_CACHE = 1.5  # times the main memory's rate: most of a working set is read from a cache

Amounts = dict[str, float]


@dataclass(frozen=True, slots=True)
class Overlap:
    """What kernels of one kind read, and what they compute meanwhile."""

    kind: str
    memory: Amounts
    arithmetic: Amounts


@dataclass(frozen=True, slots=True)
class Terms:
    """``alone`` adds up; of each overlap the slower side counts."""

    alone: Amounts
    overlaps: tuple[Overlap, ...]


def pass_terms(model: PricedModel, batch: BatchShape, ceilings: Ceilings) -> Terms:
    """The terms of one forward pass and the sampling after it."""
    rate = memory = ceilings.memory.bytes_per_s
    if len(ceilings.levels) > 1:
        working_set = pass_work(model, batch).num_bytes + _other_experts(model, batch)
        rate = ceilings.bytes_per_s(working_set)
    reading = NEAR if rate > _IN_CACHE * memory else STREAM
    terms = product_terms(model, batch, ceilings, rate, reading)
    alone, overlaps = terms.alone, [*terms.overlaps]
    alone[SEQUENCE] = float(batch.num_segments)
    alone[SEGMENT] = float(batch.num_segments * sum(n for _, n in model.attention_ops))
    if batch.num_reused:
        _add(alone, OTHER, reuse_work(model, batch).num_bytes / memory)
    peak = ceilings.peak_flops(model.activations)
    for op, count in model.state_ops:
        work = op_work(op, batch, model)
        _add(alone, OTHER, max(work.num_bytes / rate, work.flops / peak) * count)
    for part in _attention_parts(batch):
        overlaps.append(attention_overlap(model, part, ceilings, rate, alone))
    return Terms(alone, tuple(overlaps))


def product_terms(
    model: PricedModel,
    batch: BatchShape,
    ceilings: Ceilings,
    rate: float | None = None,
    reading: str = STREAM,
) -> Terms:
    """Those of ops on single tokens, whose matrices are read at a rate: main memory's, if none is
    given."""
    fixed, overlaps = _token_terms(model, batch, ceilings), []
    for name, num_bytes, arithmetic in fixed.products:
        family, _, form = name.partition("/")
        own = rate or ceilings.memory.bytes_per_s
        own = min(own, ceilings.kernel_bytes_per_s.get(form, own))
        overlaps.append(Overlap(family, {f"{reading}/{name}": num_bytes / own}, arithmetic))
    return Terms(dict(fixed.alone), tuple(overlaps))


def roof_seconds(model: PricedModel, batch: BatchShape, ceilings: Ceilings) -> float:
    """Seconds that the roof alone allows: of each op, those of its slower side."""
    costs = op_costs(model, batch)
    rate = ceilings.bytes_per_s(sum(cost.work.num_bytes * cost.count for cost in costs))
    total = 0.0
    for cost in costs:
        peak = ceilings.peak_flops(model.product_format(main_weight(cost.op)))
        total += max(cost.work.flops / peak, cost.work.num_bytes / rate) * cost.count
    return total


@dataclass(frozen=True, slots=True)
class _TokenTerms:
    """Of ops on single tokens: (kernel, bytes, arithmetic of the first panels) of the products."""

    alone: Amounts
    products: tuple[tuple[str, float, Amounts], ...]


def _token_terms(model: PricedModel, batch: BatchShape, ceilings: Ceilings) -> _TokenTerms:
    """Computed once for each number of tokens and rows."""
    key = ("terms", id(ceilings), batch.num_tokens, batch.logit_rows, batch.adapters)
    found: tuple[Ceilings, _TokenTerms] | None = model.memo.get(key)
    if found is None:  # the ceilings are kept too, so that no others get their id
        found = ceilings, _compute_token_terms(model, batch, ceilings)
        remember(model, key, found)
    return found[1]


def _compute_token_terms(model: PricedModel, batch: BatchShape, ceilings: Ceilings) -> _TokenTerms:
    num_ops = sum(count for _, count in model.grouped_ops)
    alone: Amounts = {STEP: 1.0, ROW: float(batch.logit_rows), OP: float(num_ops)}
    products: dict[tuple[str, float], tuple[float, Amounts]] = {}

    def add_product(
        work: Work,
        tokens: float,
        form: NumberFormat,
        lanes: NumberFormat,
        inputs: float = 0.0,
        count: int = 1,
        experts: tuple[int, int] | None = None,
    ) -> None:
        """``count`` products of ``tokens`` rows of a matrix; ``inputs`` elements are rearranged for
        them. Of a mixture's ``experts`` (how many, and how many a token meets) ``tokens`` are the
        mean."""
        kernel = model.kernels.of(form, tokens=tokens, of_experts=experts is not None)
        name = f"{kernel.family}/{form.name}"
        num_bytes, first = products.setdefault((name, tokens), (0.0, {}))
        products[name, tokens] = (num_bytes + work.weight_bytes * count, first)
        # Of one token through all the weights, at one instruction each.
        peak = ceilings.peak_flops(model.kernels.lanes or lanes)
        lane_s = work.flops / tokens / peak * count
        _add(alone, f"{FILL}/{kernel.family}", inputs * count / (peak / 2))
        panels, computed = kernel.panels(tokens), kernel.computed(tokens)
        if experts is not None:
            panels = kernel.expert_panels(batch.num_tokens, experts[1] / experts[0])
        at_first = computed / panels
        _add(first, f"{UNPACK}/{name}", lane_s * kernel.unpack)
        _add(first, f"{PRODUCT}/{name}", lane_s * kernel.product * at_first)
        if panels > 1:
            _add(alone, f"{UNPACK}/{name}", lane_s * kernel.unpack * (panels - 1))
            _add(alone, f"{PRODUCT}/{name}", lane_s * kernel.product * (computed - at_first))

    for op, count in model.token_ops:
        work = op_work(op, batch, model)
        if work.link_messages:
            _add(alone, LINK, _link_seconds(work, ceilings) * count)
        memory_s = work.activation_bytes / ceilings.memory.bytes_per_s * count
        if op.facts.kind is OpKind.OTHER:
            memory_s += work.weight_bytes / ceilings.memory.bytes_per_s * count
        _add(alone, OTHER, memory_s)
        if op.facts.kind is OpKind.OTHER or not work.flops:
            continue
        weight = main_weight(op)
        assert weight is not None
        form, lanes = model.format_of(weight), model.product_format(weight)
        experts = experts_of(op) if op.facts.kind is OpKind.EXPERTS else None
        if experts is not None:
            met = experts_touched(*experts, batch.num_tokens)
            alone[OP] += model.kernels.expert_ops * met * count
        add_product(work, _tokens(op, batch), form, lanes, _inputs(op, batch), count, experts)
    plain = model.activations
    for adapter, tokens in batch.adapters:
        add_product(adapter_work(adapter, tokens, model), tokens, plain, plain)
    found = tuple((name, size, first) for (name, _), (size, first) in products.items())
    return _TokenTerms(alone, found)


def _inputs(op: Op, batch: BatchShape) -> float:
    """Activations that an op's products read: they are rearranged, and perhaps quantized, for the
    kernel. Matrices by columns read what others of the op made. Of a mixture of experts, once for
    each expert that a token goes to."""
    read = {
        (use.weight.shape[-1], use.split in (Split.COLUMNS, Split.EXPERT_COLUMNS))
        for use in weight_uses(op)
        if use.role.is_matrix
    }
    return sum(width for width, _ in read) * _rows(op, batch) * experts_of(op)[1]


def _other_experts(model: PricedModel, batch: BatchShape) -> float:
    """Bytes of experts that no token is expected to go to: the next pass may need them, so caches
    share their room among all."""
    found = 0.0
    for op, count in model.token_ops:
        if op.facts.kind is OpKind.EXPERTS:
            num_experts, top_k = experts_of(op)
            met = experts_touched(num_experts, top_k, batch.num_tokens)
            found += (num_experts - met) * expert_bytes(op, model) * count
    return found


def _tokens(op: Op, batch: BatchShape) -> float:
    """Rows that each of an op's matrices is multiplied with; of experts' those of the ones
    touched."""
    rows, (count, met) = _rows(op, batch), experts_of(op)
    return rows * met / experts_touched(count, met, rows)


def _rows(op: Op, batch: BatchShape) -> float:
    match op.facts.rows:
        case Rows.LOGITS:
            return float(batch.logit_rows)
        case Rows.TOKENS | Rows.ROUTED:
            return float(batch.num_tokens)


def main_weight(op: Op) -> Weight | None:
    """The weight whose format decides how an op is computed: a matrix, if it has one."""
    matrices = [use.weight for use in weight_uses(op) if use.role.is_matrix]
    return max(matrices, key=lambda weight: len(weight.shape), default=None)


def _link_seconds(work: Work, ceilings: Ceilings) -> float:
    if not ceilings.link_bytes_per_s:
        return float("inf")
    latency = work.link_messages * ceilings.link_latency_s
    return work.link_bytes / ceilings.link_bytes_per_s + latency


def attention_overlap(
    model: PricedModel, batch: BatchShape, ceilings: Ceilings, rate: float, alone: Amounts
) -> Overlap:
    """K and V are read once for each segment, and loaded once for a few rows of queries."""
    peak = ceilings.peak_flops(model.activations)
    read_s = product_s = load_s = 0.0
    for op, count in model.attention_ops:
        work = op_work(op, batch, model)
        read_s += work.num_bytes / rate * count
        product_s += work.flops / peak * count
        if model.kernels.attention_rows:
            load_s += _loaded_elements(op, batch, model) / (peak / 2) * count
        if work.link_messages:
            _add(alone, LINK, _link_seconds(work, ceilings) * count)
    arithmetic = {f"attention/{PRODUCT}": product_s}
    if load_s:
        arithmetic["attention/load"] = load_s
    return Overlap("attention", {"attention/read": read_s}, arithmetic)


def _loaded_elements(op: AttentionOp, batch: BatchShape, model: PricedModel) -> float:
    """Elements of K and V, each counted once for the rows of queries that share its load."""
    sharing = op.num_heads // op.num_kv_heads
    rows = model.kernels.attention_rows
    loaded = batch.loaded_rows(op.window, sharing, rows, chunked=op.chunked)
    return float(loaded * op.num_kv_heads * op.loaded_width)


def _attention_parts(batch: BatchShape) -> list[BatchShape]:
    """Decode-like and prefill-like segments apart: one side may wait for memory, the other not."""
    few = (batch.stops - batch.starts) <= _FEW_TOKENS
    if few.all() or not few.any():
        return [batch]
    return [
        BatchShape(starts=batch.starts[chosen], stops=batch.stops[chosen], logit_rows=0)
        for chosen in (few, ~few)
    ]


def _add(amounts: Amounts, name: str, value: float) -> None:
    amounts[name] = amounts.get(name, 0.0) + value
