"""What is done once models and KV pools are there, and before a request waits for it."""

from collections.abc import Callable, Collection
from typing import Any

import torch

from ridgeline.core.errors import OutOfMemoryError
from ridgeline.executors.cuda.device import Device
from ridgeline.executors.cuda.model import DeviceModel
from ridgeline.executors.cuda.tuning import Tuning


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
