"""Which settings serve a load best: predicted by the simulator, raced and proven on the machine."""

from ridgeline.optimize.judging import Judge
from ridgeline.optimize.kept import Journal
from ridgeline.optimize.load import PATTERNS, TrafficPattern, pattern_arrivals
from ridgeline.optimize.measuring import EngineMeasurer, Measurer, Visit
from ridgeline.optimize.objective import Objective, Outcome, QualityLimits, parse_quality
from ridgeline.optimize.optimizer import Optimizer
from ridgeline.optimize.result import settings_yaml, to_json, verdict
from ridgeline.optimize.screening import CandidatePredictor
from ridgeline.optimize.space import DEFAULT, Candidate, Space, declared_space
from ridgeline.optimize.task import Found, Task

__all__ = [
    "DEFAULT",
    "PATTERNS",
    "Candidate",
    "CandidatePredictor",
    "EngineMeasurer",
    "Found",
    "Journal",
    "Judge",
    "Measurer",
    "Objective",
    "Optimizer",
    "Outcome",
    "QualityLimits",
    "Space",
    "Task",
    "TrafficPattern",
    "Visit",
    "declared_space",
    "parse_quality",
    "pattern_arrivals",
    "settings_yaml",
    "to_json",
    "verdict",
]
