"""Run cases in turns with the ceilings, and say what each reached of them."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ridgeline.bench.cases import Case, PrefillCase
from ridgeline.bench.ceilings import CeilingMeter
from ridgeline.bench.energy import UNKNOWN, Energy, EnergyMeter, add_energies
from ridgeline.bench.workloads import PreparedCase, Sample
from ridgeline.core.formats import NumberFormat
from ridgeline.core.plan import ModelRole, StepPlan
from ridgeline.roofline import PricedModel, Work, price
from ridgeline.roofline.ceilings import Ceilings
from ridgeline.roofline.metrics import mbu, mfu
from ridgeline.roofline.work import total

_VISIT_S = 0.5

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A case's median over all rounds: seconds of a step (or a whole prompt); ``plans`` and
    ``work`` are those of a sample half-way, as contexts grow a little from step to step.

    ``energy`` is that of the whole ``visited_s`` seconds, between the steps too.
    """

    case: Case
    seconds: float
    plans: tuple[StepPlan, ...]
    work: Work
    num_samples: int
    energy: Energy = UNKNOWN
    visited_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens that one sample is for: those of a prompt, or one of each sequence."""
        case = self.case
        return case.prompt_tokens if isinstance(case, PrefillCase) else case.batch

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def joules_per_token(self) -> float | None:
        """The mean power of the processors over the rate; ``None`` where no counter is read."""
        return self.energy.per_token(self.visited_s * self.tokens_per_s)


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
    workloads: Sequence[PreparedCase],
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
    energies: list[list[Energy]] = [[] for _ in workloads]
    visited_s = [0.0] * len(workloads)
    counter = EnergyMeter(gpus=False)
    for number in range(1, rounds + 1):
        _tell(progress, number * len(workloads), num_visits, "ceilings")
        meter.sample()
        for index, workload in enumerate(workloads):
            _tell(progress, number * len(workloads) + index, num_visits, workload.case.name)
            counter.start()
            start = time.perf_counter()
            samples[index] += workload.visit(_VISIT_S)
            visited_s[index] += time.perf_counter() - start
            energies[index].append(counter.stop())
    return [
        replace(
            _measurement(workload.case, samples[index], model),
            energy=add_energies(energies[index]),
            visited_s=visited_s[index],
        )
        for index, workload in enumerate(workloads)
    ]


def reached(measurement: Measurement, ceilings: Ceilings, form: NumberFormat) -> Reached:
    """Shares of the bandwidth of memory, and of the peak of products in a format."""
    work, peak = measurement.work, ceilings.peak_flops(form)
    moved = work.weight_bytes + work.kv_read_bytes + work.kv_write_bytes
    bandwidth = ceilings.bytes_per_s(moved)
    is_memory = moved / bandwidth > work.flops / peak
    return Reached(
        mfu=mfu(work.flops, measurement.seconds, peak),
        mbu=mbu(moved, measurement.seconds, bandwidth),
        bound="memory" if is_memory else "compute",
    )


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
