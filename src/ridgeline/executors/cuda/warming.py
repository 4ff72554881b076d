"""What is done once models and KV pools are there, and before a request waits for it."""

import logging
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ridgeline.core.errors import MachineError, OutOfMemoryError
from ridgeline.executors.cuda.device import Device
from ridgeline.executors.cuda.kernels import Kernels
from ridgeline.executors.cuda.model import DeviceModel
from ridgeline.executors.cuda.triton_kernels import TritonKernels
from ridgeline.executors.cuda.tuning import Tuning
from ridgeline.kernels.triton import compile_ahead, kernel_problem

_log = logging.getLogger(__name__)

_MOST_THREADS = 15


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
    device: Device,
    models: Collection[DeviceModel],
    send: Callable[[Any], torch.Tensor],
    *,
    kernels: Kernels,
    most_tokens: int,
) -> None:
    """Compile every kernel that steps of up to ``most_tokens`` tokens may need, several at a time,
    and record decode steps.

    Raises:
        OutOfMemoryError: there is no memory left for what is recorded; says what helps.
    """
    try:
        if isinstance(kernels, TritonKernels):
            _compile(models, send, most_tokens)
        for model in models:
            model.warm_up(send)
    except torch.OutOfMemoryError:
        raise OutOfMemoryError(
            f"Decode steps cannot be recorded in the {device.memory().free / 1e9:.2f} GB that "
            f"{device.name} has left; lower gpu_memory_utilization or max_num_seqs."
        ) from None
    device.synchronize()


def _compile(
    models: Collection[DeviceModel], send: Callable[[Any], torch.Tensor], most_tokens: int
) -> None:
    began = time.monotonic()
    num_threads = max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) - 1))
    asks = [model.asks(send, most_tokens) for model in models]

    def ask() -> None:
        for each in asks:
            each()

    count = compile_ahead(ask, num_threads)
    _log.info(
        "%d kernels are there after %.1f s, by %d compilers at once.",
        count,
        time.monotonic() - began,
        num_threads,
    )
