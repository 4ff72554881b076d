"""An executor without tensors: predicted seconds of a plan, on a virtual clock."""

from ridgeline.executors.simulated.clock import VirtualClock
from ridgeline.executors.simulated.executor import SimulatedExecutor

__all__ = ["SimulatedExecutor", "VirtualClock"]
