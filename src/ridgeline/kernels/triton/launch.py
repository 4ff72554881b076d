"""What launches need to know of the device."""

import os
from functools import cache

import torch

_INTERPRETED_MULTIPROCESSORS = 4  # few, so that tests split reductions in few parts
_HOPPER_SHARED_BYTES = 227 << 10


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def next_power_of_2(count: int) -> int:
    """The least power of two that is not less than ``count``, at least 1."""
    return 1 << max(0, count - 1).bit_length()


def num_multiprocessors(device: torch.device) -> int:
    """Of a CUDA device; a few where kernels are interpreted."""
    return (
        _multiprocessors(device.index or 0)
        if device.type == "cuda"
        else (_INTERPRETED_MULTIPROCESSORS)
    )


def shared_bytes(device: torch.device) -> int:
    """Shared memory that a block of a CUDA device may have; Hopper's where there is none."""
    return _shared_bytes(device.index or 0) if device.type == "cuda" else _HOPPER_SHARED_BYTES


@cache
def _shared_bytes(index: int) -> int:
    properties = torch.cuda.get_device_properties(index)
    # PyTorch's stubs do not list it.
    return int(getattr(properties, "shared_memory_per_block_optin", _HOPPER_SHARED_BYTES))


@cache
def _multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)
