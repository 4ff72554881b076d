"""Run cases in turns with the ceilings, and say what each reached of them."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ridgeline.bench.cases import Case, DecodeCase
from ridgeline.bench.ceilings import CeilingMeter, CeilingReport
from ridgeline.bench.workloads import Sample, Workload
from ridgeline.core.plan import ModelRole
from ridgeline.roofline import PricedModel, Work, price
from ridgeline.roofline.metrics import mbu, mfu
from ridgeline.roofline.work import NOTHING

_VISIT_S = 0.5

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A case's medians over all rounds: seconds of a step (or a whole prompt) and its work."""

    case: Case
    seconds: float
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
    """What a measurement is of the ceilings. ``mbu`` counts weights and KV, ``mfu`` FLOPs of
    matrix products; ``bound`` is the ceiling that allows less."""

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
    total = len(workloads) * (rounds + 1)
    for index, workload in enumerate(workloads):
        _tell(progress, index, total, f"prepare {workload.case.name}")
        workload.prepare()
    samples: list[list[Sample]] = [[] for _ in workloads]
    for number in range(1, rounds + 1):
        _tell(progress, number * len(workloads), total, "ceilings")
        meter.sample()
        for index, workload in enumerate(workloads):
            _tell(progress, number * len(workloads) + index, total, workload.case.name)
            samples[index] += workload.visit(_VISIT_S)
    return [
        _measurement(workload.case, found, model)
        for workload, found in zip(workloads, samples, strict=True)
    ]


def reached(measurement: Measurement, ceilings: CeilingReport, number_format: str) -> Reached:
    """Shares of the bandwidth of main memory, and of the peak of products in a format."""
    work, peak = measurement.work, ceilings.operations[number_format].rate
    bandwidth = ceilings.memory_bytes_per_s
    moved = work.weight_bytes + work.kv_read_bytes + work.kv_write_bytes
    is_memory = moved / bandwidth > work.flops / peak
    return Reached(
        mfu=mfu(work.flops, measurement.seconds, peak),
        mbu=mbu(moved, measurement.seconds, bandwidth),
        bound="memory" if is_memory else "compute",
    )


def _measurement(case: Case, samples: Sequence[Sample], model: PricedModel) -> Measurement:
    seconds = [sum(step.seconds for step in sample) for sample in samples]
    middle = samples[len(samples) // 2]
    work = NOTHING
    for step in middle:
        work = work + price({ModelRole.TARGET: model}, step.plan).work
    return Measurement(
        case=case, seconds=statistics.median(seconds), work=work, num_samples=len(samples)
    )


def _tell(progress: Progress | None, done: int, total: int, label: str) -> None:
    if progress is not None:
        progress(done, total, label)
