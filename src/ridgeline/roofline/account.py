"""`account`: the price of a step corrected by what only its outcome tells."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ridgeline.core.op_facts import OpKind
from ridgeline.core.plan import ModelRole, Pass, Segment, StepPlan, is_reference
from ridgeline.core.result import SegmentResult, StepResult
from ridgeline.core.weight_uses import experts_of
from ridgeline.roofline.batch import NO_ADAPTERS, batch_of, batches_of
from ridgeline.roofline.model import PricedModel
from ridgeline.roofline.op_cost import expert_bytes, experts_touched
from ridgeline.roofline.price import (
    Phase,
    StepCost,
    add_costs,
    pass_work,
    phase_of,
    price_segments,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAccount:
    """What a step did. ``cost`` is that of what was computed; ``useful_flops`` leave out rejected
    drafts and draft models. ``drafted`` and ``accepted`` count tokens, ``yielded`` those that
    requests got. ``bytes_at_once`` are what one run of each pass reads, of those that are run again
    and again."""

    cost: StepCost
    bytes_at_once: float
    useful_flops: Mapping[Phase, float]
    drafted: int
    accepted: int
    yielded: int


def account(
    models: Mapping[ModelRole, PricedModel],
    plan: StepPlan,
    result: StepResult,
    adapters: Mapping[int, int] = NO_ADAPTERS,
) -> StepAccount:
    """The price corrected by what only the outcome tells; ``adapters`` are those of slots that have
    one.

    Void segments and the missing steps of a replay that was cut short cost nothing; rejected drafts
    cost their bytes, and are not useful; experts are those that were read, where the executor
    reports it (``StepResult.experts_read``).
    """
    costs, useful, target = list[StepCost](), dict.fromkeys(Phase, 0.0), list[Pass]()
    drafted = accepted = yielded = 0
    at_once = 0.0
    for a_pass, outcomes in zip(plan.passes, result.passes, strict=True):
        model = models[a_pass.role]
        ran = [
            (segment, outcome)
            for segment, outcome in zip(a_pass.segments, outcomes, strict=True)
            if not _is_void(segment, outcome)
        ]
        if not ran:
            continue
        segments = [segment for segment, _ in ran]
        steps = (
            max(1, *(len(outcome.token_ids) for _, outcome in ran)) if a_pass.num_steps > 1 else 1
        )
        run = replace(a_pass, segments=tuple(segments), num_steps=steps)
        cost = price_segments(model, run, segments, adapters)
        costs.append(cost)
        at_once += cost.work.num_bytes / steps
        if a_pass.role is not ModelRole.TARGET:
            continue
        target.append(run)
        wasted = _rejected(model, ran, adapters)
        for phase, work in cost.by_phase.items():
            useful[phase] += work.flops - wasted.get(phase, 0.0)
        drafted += sum(segment.num_drafts for segment in segments)
        accepted += sum(len(outcome.accepted) for _, outcome in ran)
        yielded += sum(len(outcome.token_ids) for _, outcome in ran)
    priced = cost = add_costs(costs)
    if result.experts_read is not None:
        cost = _with_experts(models[ModelRole.TARGET], target, cost, result.experts_read)
    if at_once:
        at_once *= cost.work.num_bytes / priced.work.num_bytes
    return StepAccount(
        cost=cost,
        bytes_at_once=at_once,
        useful_flops=useful,
        drafted=drafted,
        accepted=accepted,
        yielded=yielded,
    )


def _is_void(segment: Segment, outcome: SegmentResult) -> bool:
    """Nothing came out because a token that the segment refers to was not yielded."""
    refers = any(map(is_reference, segment.token_ids))
    return refers and segment.outputs.sample and not outcome.token_ids


def _rejected(
    model: PricedModel,
    ran: Sequence[tuple[Segment, SegmentResult]],
    adapters: Mapping[int, int],
) -> dict[Phase, float]:
    """FLOPs of drafted tokens that were not accepted, by phase."""
    wasted: dict[Phase, float] = {}
    for segment, outcome in ran:
        rejected = segment.num_drafts - len(outcome.accepted)
        if rejected:
            kept = segment._replace(
                stop=segment.stop - rejected,
                token_ids=segment.token_ids[: segment.num_tokens - rejected],
                num_drafts=segment.num_drafts - rejected,
                parents=(),
            )
            flops, useful = (
                pass_work(model, batch_of([each], adapters)).flops for each in (segment, kept)
            )
            phase = phase_of(segment)
            wasted[phase] = wasted.get(phase, 0.0) + flops - useful
    return wasted


def _with_experts(
    model: PricedModel, ran: Sequence[Pass], cost: StepCost, experts_read: int
) -> StepCost:
    """Exchange the expected number of experts for the number that the passes read."""
    correction = 0.0
    layers = [each for each in model.grouped_ops if each[0].facts.kind is OpKind.EXPERTS]
    read = experts_read / sum(count for _, count in layers) if layers else 0.0
    for op, count in layers:
        expected = sum(
            experts_touched(*experts_of(op), batch.num_tokens)
            for a_pass in ran
            for batch in batches_of(a_pass)
        )
        correction += count * expert_bytes(op, model) * (read - expected)
    if not correction:
        return cost
    share = {
        phase: correction * count / sum(cost.tokens.values())
        for phase, count in cost.tokens.items()
    }
    by_phase = {
        phase: replace(work, weight_bytes=work.weight_bytes + share[phase])
        for phase, work in cost.by_phase.items()
    }
    work = replace(cost.work, weight_bytes=cost.work.weight_bytes + correction)
    return replace(cost, work=work, by_phase=by_phase)
