"""What is asked of a run, and what comes of it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import median

from ridgeline.core.config import EngineConfig
from ridgeline.evaluation import Quality
from ridgeline.optimize.belief import Estimate
from ridgeline.optimize.kept import KeptVisit
from ridgeline.optimize.load import TrafficPattern
from ridgeline.optimize.objective import Objective, Outcome, QualityLimits, value
from ridgeline.optimize.proof import Ratio
from ridgeline.optimize.screening import Screened
from ridgeline.optimize.space import Candidate, Space
from ridgeline.planning import Arrival
from ridgeline.roofline.slo import Slo


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is asked.

    ``base`` are the settings of the default, of which those ``given`` are not changed. The load is
    a ``trace`` or a ``pattern``, at ``rate_rps`` or, without it, at one that rises to more than the
    default can answer. ``budget_s`` are the seconds that all of it may take.
    """

    base: EngineConfig
    space: Space
    workload: str
    pattern: TrafficPattern | None
    trace: Sequence[Arrival] = ()
    rate_rps: float | None = None
    slo: Slo = field(default_factory=Slo)
    objective: Objective = Objective.GOODPUT
    quality: QualityLimits = field(default_factory=lambda: QualityLimits(kl=0.02))
    budget_s: float = 900.0
    given: Collection[str] = ()


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change on the way from the default to the winner: the logarithm of value that it adds, as
    predicted and as believed once everything was measured, and that which taking it back alone
    would cost, as predicted. ``is_measured``: both ends of the step were."""

    name: str
    value: object
    predicted: float
    believed: float
    deviation: float
    is_measured: bool
    predicted_alone_last: float


@dataclass(frozen=True, kw_only=True)
class Found:
    """What came of it. ``winner`` is `DEFAULT` where nothing was proven to be better.

    ``ratios`` are of the challengers over the default and ``same`` that of the default over itself,
    each in the same turns; none where nothing was challenged. ``rejected`` says why candidates are
    out.
    """

    task: Task
    arrivals: Sequence[Arrival]
    rate_rps: float | None
    level: float
    screened: Screened
    estimates: dict[Candidate, Estimate]
    ratios: dict[Candidate, Ratio]
    same: Ratio | None
    winner: Candidate
    steps: Sequence[Change]
    qualities: dict[Candidate, Quality]
    rejected: dict[Candidate, str]
    visits: Sequence[KeptVisit]
    risk: float
    spent_s: float

    def outcomes(self, candidate: Candidate, *stages: str) -> list[Sequence[Outcome]]:
        """Of each of its visits."""
        return [
            each.visit.outcomes
            for each in self.visits
            if each.candidate == candidate and each.stage in (stages or ("race", "proof", "steps"))
        ]

    def measured(self, candidate: Candidate, *stages: str) -> float | None:
        """The median value of its visits."""
        found = self.outcomes(candidate, *stages)
        task = self.task
        return median(value(task.objective, each, task.slo) for each in found) if found else None
