"""What runs plans. `create_executor` chooses by name, once, at start."""

from ridgeline.executors.base import device_kv_bytes, kernels_of
from ridgeline.executors.model import ExecutorModel
from ridgeline.executors.registry import (
    create_executor,
    default_executor,
    executor_names,
    missing_for,
)

__all__ = [
    "ExecutorModel",
    "create_executor",
    "default_executor",
    "device_kv_bytes",
    "executor_names",
    "kernels_of",
    "missing_for",
]
