"""What runs plans. `create_executor` chooses by name, once, at start."""

from ridgeline.executors.model import ExecutorModel
from ridgeline.executors.registry import create_executor, default_executor, executor_names

__all__ = ["ExecutorModel", "create_executor", "default_executor", "executor_names"]
