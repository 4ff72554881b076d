"""`price`: the bytes and FLOPs of a plan before it runs.

Work is told apart by kind of op, and by phase. A segment is *decode* if at most one of its tokens
is not a draft, else *prefill*. Of bytes that segments share (weights), each phase has the share of
its tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from ridgeline.core.ops import Op
from ridgeline.core.plan import ModelRole, Pass, Segment, StepPlan
from ridgeline.roofline.batch import NO_ADAPTERS, BatchShape, batch_of, batches_of
from ridgeline.roofline.model import PricedModel
from ridgeline.roofline.op_cost import adapter_work, op_work
from ridgeline.roofline.work import NOTHING, Work, total


class Phase(StrEnum):
    """What a segment is to its request."""

    PREFILL = "prefill"
    DECODE = "decode"


_MEMO_SIZE = 1_000  # about 2 MB


def phase_of(segment: Segment) -> Phase:
    """A segment's phase; the plan itself knows none."""
    return Phase.PREFILL if segment.num_tokens - segment.num_drafts > 1 else Phase.DECODE


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCost:
    """``count`` ops that cost ``work`` each."""

    op: Op
    count: int
    work: Work


def op_costs(model: PricedModel, batch: BatchShape) -> tuple[OpCost, ...]:
    """The price of one forward pass, by op, on one rank of one pipeline (all stages)."""
    return tuple(
        OpCost(op=op, count=count, work=op_work(op, batch, model))
        for op, count in model.grouped_ops
    )


def pass_work(model: PricedModel, batch: BatchShape) -> Work:
    """The price of one forward pass."""
    work = _token_work(model, batch)
    for op, count in (*model.attention_ops, *model.state_ops):
        work = work + op_work(op, batch, model) * count
    return work + reuse_work(model, batch)


def reuse_work(model: PricedModel, batch: BatchShape) -> Work:
    """What it takes to take K and V over: each is read and written once, on one rank."""
    if not batch.num_reused:
        return NOTHING
    of_token = sum(len(each.layers) * model.kv_token_bytes(each) for each in model.groups)
    num_bytes = batch.num_reused * of_token
    return Work(kv_read_bytes=num_bytes, kv_write_bytes=num_bytes)


def _token_work(model: PricedModel, batch: BatchShape) -> Work:
    """That of all ops on single tokens; computed once for each number of tokens and rows."""
    key = ("work", batch.num_tokens, batch.logit_rows, batch.adapters)
    found = model.memo.get(key)
    if found is None:
        parts = [op_work(op, batch, model) * count for op, count in model.token_ops]
        found = total(parts + [adapter_work(*each, model) for each in batch.adapters])
        remember(model, key, found)
    work: Work = found
    return work


def remember(model: PricedModel, key: object, value: object) -> None:
    """Keep a value in the model's memo, which is emptied when it is full."""
    if len(model.memo) >= _MEMO_SIZE:
        model.memo.clear()
    model.memo[key] = value


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """A step's work, and each phase's part of it. ``tokens`` are those computed, by phase."""

    work: Work
    by_phase: Mapping[Phase, Work]
    tokens: Mapping[Phase, int]

    @property
    def phase(self) -> Phase | None:
        """The step's only phase, or ``None`` if it mixes them."""
        return next(iter(self.by_phase)) if len(self.by_phase) == 1 else None


def price(
    models: Mapping[ModelRole, PricedModel],
    plan: StepPlan,
    adapters: Mapping[int, int] = NO_ADAPTERS,
) -> StepCost:
    """What a plan will move and compute; ``adapters`` are those of slots that have one."""
    return add_costs(price_segments(models[a.role], a, a.segments, adapters) for a in plan.passes)


def price_segments(
    model: PricedModel,
    a_pass: Pass,
    segments: Sequence[Segment],
    adapters: Mapping[int, int] = NO_ADAPTERS,
) -> StepCost:
    """The price of a pass over some of its segments, and of each phase's part."""
    members: dict[Phase, list[Segment]] = {}
    for segment in segments:
        members.setdefault(phase_of(segment), []).append(segment)
    first, *replayed = batches_of(replace(a_pass, segments=tuple(segments)), adapters)
    work = pass_work(model, first)
    tokens = {phase: sum(s.num_tokens for s in part) for phase, part in members.items()}
    by_phase = dict.fromkeys(members, work)
    if len(members) > 1:
        by_phase = _split(model, members, tokens, work, adapters)
    if replayed:
        later = total([pass_work(model, batch) for batch in replayed])
        work = work + later
        by_phase[Phase.DECODE] = by_phase.get(Phase.DECODE, NOTHING) + later
        decoded = len(segments) * len(replayed)
        tokens[Phase.DECODE] = tokens.get(Phase.DECODE, 0) + decoded
    return StepCost(work=work, by_phase=by_phase, tokens=tokens)


def _split(
    model: PricedModel,
    members: Mapping[Phase, Sequence[Segment]],
    tokens: Mapping[Phase, int],
    whole: Work,
    adapters: Mapping[int, int],
) -> dict[Phase, Work]:
    num_tokens = sum(tokens.values())
    return {
        phase: replace(
            pass_work(model, batch_of(part, adapters)),
            weight_bytes=whole.weight_bytes * tokens[phase] / num_tokens,
            link_messages=whole.link_messages * tokens[phase] / num_tokens,
        )
        for phase, part in members.items()
    }


def add_costs(costs: Iterable[StepCost]) -> StepCost:
    """The sum."""
    work, by_phase, tokens = NOTHING, dict[Phase, Work](), dict[Phase, int]()
    for cost in costs:
        work = work + cost.work
        for phase, part in cost.by_phase.items():
            by_phase[phase] = by_phase.get(phase, NOTHING) + part
        for phase, count in cost.tokens.items():
            tokens[phase] = tokens.get(phase, 0) + count
    return StepCost(work=work, by_phase=by_phase, tokens=tokens)
