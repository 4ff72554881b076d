"""What runs plans. `create_executor` chooses by name, once, at start."""

from ridgeline.executors.registry import (
    create_executor,
    default_executor,
    executor_names,
    executor_traits,
)

__all__ = ["create_executor", "default_executor", "executor_names", "executor_traits"]
