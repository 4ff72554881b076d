"""What is computed next: queue, token budget, blocks and preemption."""

from ridgeline.scheduler.config import SchedulerConfig
from ridgeline.scheduler.draft_model import DraftModel, DraftModelConfig
from ridgeline.scheduler.draft_passes import DraftPasses
from ridgeline.scheduler.early_exit import EarlyExit
from ridgeline.scheduler.feature_head import FeatureHead
from ridgeline.scheduler.prediction import DEFAULT_PREDICTOR, LinearPredictor
from ridgeline.scheduler.scheduler import Scheduler
from ridgeline.scheduler.sequence import Sequence, SequenceStatus, SequenceUpdate
from ridgeline.scheduler.speculation import Speculation

__all__ = [
    "DEFAULT_PREDICTOR",
    "DraftModel",
    "DraftModelConfig",
    "DraftPasses",
    "EarlyExit",
    "FeatureHead",
    "LinearPredictor",
    "Scheduler",
    "SchedulerConfig",
    "Sequence",
    "SequenceStatus",
    "SequenceUpdate",
    "Speculation",
]
