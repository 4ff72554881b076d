"""What is done once models and KV pools are there, and before a request waits for it."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ridgeline.core.errors import MachineError, OutOfMemoryError
from ridgeline.executors.cuda.device import Device
from ridgeline.executors.cuda.model import DeviceModel
from ridgeline.executors.cuda.tuning import Tuning
from ridgeline.kernels.triton import kernel_problem


@contextmanager
def fitting(device: Device) -> Iterator[None]:
    """Where kernels are launched first.

    Raises:
        MachineError: the device cannot have one of them; says which and why.
    """
    try:
        yield
    except Exception as error:
        problem = kernel_problem(error, device.name)
        if problem is None:
            raise
        raise MachineError(problem) from error


def tune(device: Device, models: Collection[DeviceModel], tuning: Tuning) -> None:
    """Find the tiles of products, where the device is one whose time they take."""
    if device.torch_device.type != "cpu":
        for model in models:
            model.tune(tuning)


def warm_up(
    device: Device, models: Collection[DeviceModel], send: Callable[[Any], torch.Tensor]
) -> None:
    """Compile kernels and record decode steps.

    Raises:
        OutOfMemoryError: there is no memory left for what is recorded; says what helps.
    """
    try:
        for model in models:
            model.warm_up(send)
    except torch.OutOfMemoryError:
        raise OutOfMemoryError(
            f"Decode steps cannot be recorded in the {device.memory().free / 1e9:.2f} GB that "
            f"{device.name} has left; lower gpu_memory_utilization or max_num_seqs."
        ) from None
    device.synchronize()
