"""A profile: where the seconds of recorded steps went, op by op, beside what the roof allows.

Every second of the recorded steps is in one row: an op's (or sampling's, …), the host's within
steps, or that between steps. What a row moves and computes is its price (`op_cost`).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.ops import Op
from ridgeline.core.plan import ModelRole
from ridgeline.core.recorded_step import OpSpan, RecordedPass, RecordedStep
from ridgeline.core.weight_uses import op_weights
from ridgeline.roofline.batch import BatchShape, batches_of
from ridgeline.roofline.ceilings import Ceilings
from ridgeline.roofline.dataflow import passed_on
from ridgeline.roofline.features import main_weight
from ridgeline.roofline.model import PricedModel
from ridgeline.roofline.op_cost import op_work
from ridgeline.roofline.price import pass_work
from ridgeline.roofline.work import NOTHING, Work

LEAST_GAP_S = 3e-6  # between two ops that is worth telling
_LEAST_SHARE = 1e-3  # of a step that a fusion has to save by its bytes
_LAYER = re.compile(r"layers\.(\d+)\.")
_Key = tuple[str, int | None]  # of a row: name, layer


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRow:
    """Ops of one kind; all figures are of one step, on average.

    Attributes:
        layer: whose they are, in profiles by layer.
        count: of them.
        seconds: on the thread that calls them: ``work_s + wait_s + serial_s``.
        work_s: threads compute, at once. Means over threads, as ``wait_s``.
        wait_s: threads wait, for work or at the barrier.
        serial_s: one thread computes, the others have nothing to do.
        roof_s: the least that the ceilings allow; ``None`` where these are not known, as the
            ceilings themselves.
    """

    name: str
    layer: int | None
    count: float
    seconds: float
    share: float
    work_s: float
    wait_s: float
    serial_s: float
    num_bytes: float
    flops: float
    bytes_per_s: float
    flops_per_s: float
    ceiling_bytes_per_s: float | None
    ceiling_flops_per_s: float | None
    roof_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """Two ops in a row, ``count`` times a step, and what one kernel for both would save.

    ``bytes_s``: what the first writes and the second reads, ÷ bandwidth. ``gap_s``: from the end
    of the first's work to the start of the second's, if that is over `LEAST_GAP_S` on average.
    """

    first: str
    second: str
    count: float
    num_bytes: float
    bytes_s: float | None
    gap_s: float

    @property
    def seconds(self) -> float:
        return (self.bytes_s or 0.0) + self.gap_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Means over the recorded steps.

    Attributes:
        num_plans: that were recorded. One may repeat its step.
        num_steps: the target's forward passes in them.
        num_tokens: computed in a step.
        seconds: of a step, from one's begin to the next's.
        sum_s: of all rows; the rest was not accounted for, or twice.
        host_s: Python within steps. ``gap_s``: between steps.
    """

    num_plans: int
    num_steps: int
    num_tokens: float
    seconds: float
    sum_s: float
    host_s: float
    gap_s: float
    rows: tuple[ProfileRow, ...]
    fusions: tuple[Fusion, ...]
    ceilings: Ceilings | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values; rows and candidates are those that take most first."""
        ceilings = None
        if self.ceilings is not None:
            ceilings = {
                "name": self.ceilings.name,
                "memory_bytes_per_s": self.ceilings.memory.bytes_per_s,
                "flops_per_s": dict(self.ceilings.flops_per_s),
                "conditions": dict(self.ceilings.conditions),
            }
        return {
            "num_plans": self.num_plans,
            "num_steps": self.num_steps,
            "num_tokens": self.num_tokens,
            "seconds": self.seconds,
            "sum_s": self.sum_s,
            "host_s": self.host_s,
            "gap_s": self.gap_s,
            "work_s": sum(row.work_s for row in self.rows),
            "wait_s": sum(row.wait_s for row in self.rows),
            "serial_s": sum(row.serial_s for row in self.rows),
            "ops": [asdict(row) for row in self.rows],
            "fusion_candidates": [
                asdict(each) | {"seconds": each.seconds} for each in self.fusions
            ],
            "ceilings": ceilings,
        }


@dataclass(slots=True)
class _Sums:
    count: int = 0
    seconds: float = 0.0
    work_s: float = 0.0
    wait_s: float = 0.0
    serial_s: float = 0.0
    work: Work = NOTHING
    memory_s: float | None = None
    compute_s: float | None = None
    roof_s: float | None = None


@dataclass(slots=True)
class _Pair:
    count: int = 0
    num_bytes: float = 0.0
    bytes_s: float | None = None
    gap_s: float = 0.0


@dataclass(slots=True)
class _Profiler:
    models: Mapping[ModelRole, PricedModel]
    ceilings: Ceilings | None
    by_layer: bool
    sums: dict[_Key, _Sums] = field(default_factory=dict)
    pairs: dict[tuple[str, str], _Pair] = field(default_factory=dict)

    def add_pass(self, a_pass: RecordedPass, batch: BatchShape) -> None:
        model = self.models[a_pass.role]
        layers = _layers(model.ops)
        prefix = "draft " if a_pass.role is ModelRole.DRAFT else ""
        rate = None
        if self.ceilings is not None:
            rate = self.ceilings.bytes_per_s(pass_work(model, batch).num_bytes)
        before: OpSpan | None = None
        for span in a_pass.spans:
            layer = layers[span.ops[0]] if self.by_layer and span.ops else None
            self._add_span((prefix + span.name, layer), span, model, batch, rate)
            if before is not None and span.ops and before.ops:
                self._add_pair(prefix, before, span, model, batch)
            before = span

    def _add_span(
        self, key: _Key, span: OpSpan, model: PricedModel, batch: BatchShape, rate: float | None
    ) -> None:
        row = self.sums.setdefault(key, _Sums())
        row.count += 1
        row.seconds += span.seconds
        row.work_s += span.work_s
        row.wait_s += span.wait_s
        row.serial_s += span.serial_s
        for place in span.ops:
            op = model.ops[place]
            work = op_work(op, batch, model)
            row.work = row.work + work
            if self.ceilings is None or rate is None:
                continue
            moving = work.num_bytes / rate
            computing = work.flops / self._peak(model, op) if work.flops else 0.0
            row.memory_s = (row.memory_s or 0.0) + moving
            row.compute_s = (row.compute_s or 0.0) + computing
            row.roof_s = (row.roof_s or 0.0) + max(moving, computing)

    def _peak(self, model: PricedModel, op: Op) -> float:
        assert self.ceilings is not None
        try:
            return self.ceilings.peak_flops(model.product_format(main_weight(op)))
        except InvalidRequestError:  # no rate was measured for the format
            return float("inf")

    def _add_pair(
        self, prefix: str, first: OpSpan, second: OpSpan, model: PricedModel, batch: BatchShape
    ) -> None:
        pair = self.pairs.setdefault((prefix + first.name, prefix + second.name), _Pair())
        pair.count += 1
        pair.gap_s += max(0.0, second.work_begin_s - first.work_end_s)
        ends = model.ops[first.ops[-1]], model.ops[second.ops[0]]
        elements = passed_on(*ends, model.spec.hidden_size) * batch.num_tokens
        size = 2 * elements * model.activation_bytes  # written, and read
        pair.num_bytes += size
        if self.ceilings is not None and size:
            pair.bytes_s = (pair.bytes_s or 0.0) + size / self.ceilings.bytes_per_s(size)


def make_profile(
    steps: Sequence[RecordedStep],
    models: Mapping[ModelRole, PricedModel],
    ceilings: Ceilings | None = None,
    *,
    by_layer: bool = False,
) -> Profile:
    """What consecutive steps took; with ``by_layer`` ops of one kind have a row in each layer.

    Raises:
        InvalidRequestError: there are no steps.
    """
    if not steps:
        raise InvalidRequestError("No step ran while steps were recorded.")
    profiler = _Profiler(models, ceilings, by_layer)
    host_s, num_steps = 0.0, 0
    for step in steps:
        host_s += _outside_ops(step)
        for a_pass in step.passes:
            batches = batches_of(step.plan.passes[a_pass.pass_index])
            profiler.add_pass(a_pass, batches[min(a_pass.step, len(batches) - 1)])
            num_steps += a_pass.role is ModelRole.TARGET
    gap_s = sum(max(0.0, later.begin_s - earlier.end_s) for earlier, later in pairwise(steps))
    count = max(num_steps, 1)
    seconds = (steps[-1].end_s - steps[0].begin_s) / count
    rows = tuple(sorted(_rows(profiler.sums, count, seconds), key=lambda row: -row.seconds))
    return Profile(
        num_plans=len(steps),
        num_steps=num_steps,
        num_tokens=sum(_tokens(step) for step in steps) / count,
        seconds=seconds,
        sum_s=sum(row.seconds for row in rows) + (host_s + gap_s) / count,
        host_s=host_s / count,
        gap_s=gap_s / count,
        rows=rows,
        fusions=tuple(_fusions(profiler.pairs, count, seconds)),
        ceilings=ceilings,
    )


def _outside_ops(step: RecordedStep) -> float:
    """Seconds before, between and after the ops of a step."""
    at, found = step.begin_s, 0.0
    for a_pass in step.passes:
        for span in a_pass.spans:
            found += max(0.0, span.begin_s - at)
            at = max(at, span.end_s)
    return found + max(0.0, step.end_s - at)


def _tokens(step: RecordedStep) -> int:
    return sum(
        batches_of(step.plan.passes[each.pass_index])[each.step].num_tokens
        for each in step.passes
        if each.role is ModelRole.TARGET
    )


def _rows(sums: Mapping[_Key, _Sums], count: int, step_s: float) -> Iterator[ProfileRow]:
    for (name, layer), row in sums.items():
        size, flops, seconds = row.work.num_bytes, row.work.flops, row.seconds
        yield ProfileRow(
            name=name,
            layer=layer,
            count=row.count / count,
            seconds=seconds / count,
            share=seconds / count / step_s,
            work_s=row.work_s / count,
            wait_s=row.wait_s / count,
            serial_s=row.serial_s / count,
            num_bytes=size / count,
            flops=flops / count,
            bytes_per_s=size / seconds if seconds else 0.0,
            flops_per_s=flops / seconds if seconds else 0.0,
            ceiling_bytes_per_s=size / row.memory_s if row.memory_s else None,
            ceiling_flops_per_s=flops / row.compute_s if row.compute_s else None,
            roof_s=None if row.roof_s is None else row.roof_s / count,
        )


def _fusions(pairs: Mapping[tuple[str, str], _Pair], count: int, step_s: float) -> Sequence[Fusion]:
    """Those that are worth something, the best first."""
    found = []
    for (first, second), pair in pairs.items():
        gap_s = pair.gap_s if pair.gap_s > LEAST_GAP_S * pair.count else 0.0
        bytes_s = None if pair.bytes_s is None else pair.bytes_s / count
        if gap_s or (bytes_s or 0.0) >= _LEAST_SHARE * step_s:
            found.append(
                Fusion(
                    first=first,
                    second=second,
                    count=pair.count / count,
                    num_bytes=pair.num_bytes / count,
                    bytes_s=bytes_s,
                    gap_s=gap_s / count,
                )
            )
    return sorted(found, key=lambda each: -each.seconds)


def _layers(model_ops: Sequence[Op]) -> list[int | None]:
    """The layer of each op, by its weights' names; those without any are where the last one was."""
    found: list[int | None] = []
    layer: int | None = None
    for op in model_ops:
        names = [weight.name for weight in op_weights(op)]
        if names:
            match = _LAYER.match(names[0])
            layer = int(match[1]) if match else None
        found.append(layer)
    return found
