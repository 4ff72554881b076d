"""What is computed next: queue, token budget, blocks and preemption."""

from ridgeline.scheduler.scheduler import Scheduler, SchedulerConfig
from ridgeline.scheduler.sequence import Sequence, SequenceStatus, SequenceUpdate

__all__ = ["Scheduler", "SchedulerConfig", "Sequence", "SequenceStatus", "SequenceUpdate"]
