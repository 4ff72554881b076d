"""What is computed next: queue, token budget, blocks and preemption."""

from ridgeline.scheduler.draft_model import DraftModel, DraftModelConfig
from ridgeline.scheduler.scheduler import Scheduler, SchedulerConfig
from ridgeline.scheduler.sequence import Sequence, SequenceStatus, SequenceUpdate
from ridgeline.scheduler.speculation import Speculation

__all__ = [
    "DraftModel",
    "DraftModelConfig",
    "Scheduler",
    "SchedulerConfig",
    "Sequence",
    "SequenceStatus",
    "SequenceUpdate",
    "Speculation",
]
