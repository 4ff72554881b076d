"""Run cases in turns with the ceilings, and say what each reached of them."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ridgeline.bench.cases import Case, DecodeCase
from ridgeline.bench.ceilings import CeilingMeter, CeilingReport
from ridgeline.bench.workloads import Sample, Workload
from ridgeline.core.plan import ModelRole, StepPlan
from ridgeline.roofline import PricedModel, Work, price
from ridgeline.roofline.metrics import mbu, mfu
from ridgeline.roofline.work import total

_VISIT_S = 0.5

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A case's median over all rounds: seconds of a step (or a whole prompt); ``plans`` and
    ``work`` are those of a sample half-way, as contexts grow a little from step to step."""

    case: Case
    seconds: float
    plans: tuple[StepPlan, ...]
    work: Work
    num_samples: int

    @property
    def num_tokens(self) -> int:
        """Tokens that one sample computes."""
        case = self.case
        return case.batch if isinstance(case, DecodeCase) else case.prompt_tokens

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """What a measurement is of the ceilings.

    ``mbu`` counts weights and KV, against the rate of the level of memory that holds them; ``mfu``
    FLOPs of matrix products; ``bound`` is the ceiling that allows less.
    """

    mfu: float
    mbu: float
    bound: str


def run_rounds(
    workloads: Sequence[Workload],
    model: PricedModel,
    meter: CeilingMeter,
    *,
    rounds: int,
    progress: Progress | None = None,
) -> list[Measurement]:
    """Visit every case in each of ``rounds`` rounds, which begin with a sample of the ceilings."""
    num_visits = len(workloads) * (rounds + 1)
    for index, workload in enumerate(workloads):
        _tell(progress, index, num_visits, f"prepare {workload.case.name}")
        workload.prepare()
    samples: list[list[Sample]] = [[] for _ in workloads]
    for number in range(1, rounds + 1):
        _tell(progress, number * len(workloads), num_visits, "ceilings")
        meter.sample()
        for index, workload in enumerate(workloads):
            _tell(progress, number * len(workloads) + index, num_visits, workload.case.name)
            samples[index] += workload.visit(_VISIT_S)
    return [
        _measurement(workload.case, found, model)
        for workload, found in zip(workloads, samples, strict=True)
    ]


def reached(measurement: Measurement, ceilings: CeilingReport, number_format: str) -> Reached:
    """Shares of the bandwidth of memory, and of the peak of products in a format."""
    work, peak = measurement.work, peak_of(ceilings, number_format)
    moved = work.weight_bytes + work.kv_read_bytes + work.kv_write_bytes
    bandwidth = ceilings.ceilings().bytes_per_s(moved)
    is_memory = moved / bandwidth > work.flops / peak
    return Reached(
        mfu=mfu(work.flops, measurement.seconds, peak),
        mbu=mbu(moved, measurement.seconds, bandwidth),
        bound="memory" if is_memory else "compute",
    )


def peak_of(ceilings: CeilingReport, number_format: str) -> float:
    """Operations per second with weights of a format such as ``int4-g64`` or ``float16``; formats
    without arithmetic of their own are widened to float32."""
    name = number_format.partition("-")[0]
    return ceilings.operations.get(name, ceilings.operations["float32"]).rate


def _measurement(case: Case, samples: Sequence[Sample], model: PricedModel) -> Measurement:
    seconds = [sum(step.seconds for step in sample) for sample in samples]
    plans = tuple(step.plan for step in samples[len(samples) // 2])
    return Measurement(
        case=case,
        seconds=statistics.median(seconds),
        plans=plans,
        work=total([price({ModelRole.TARGET: model}, plan).work for plan in plans]),
        num_samples=len(samples),
    )


def _tell(progress: Progress | None, done: int, total: int, label: str) -> None:
    if progress is not None:
        progress(done, total, label)
