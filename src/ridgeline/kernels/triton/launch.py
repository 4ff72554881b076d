"""What launches need to know of the device."""

import os
from dataclasses import dataclass
from functools import cache

import torch

_INTERPRETED_MULTIPROCESSORS = 4  # few, so that tests split reductions in few parts


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimits:
    """What a device is to the compiler, and the shared memory that a program may have."""

    capability: tuple[int, int]
    shared_bytes: int

    @property
    def multiplies_from_shared(self) -> bool:
        """Whether tensor cores read operands where asynchronous loads have left them."""
        return self.capability[0] in (9, 10, 11)


_HOPPER = DeviceLimits(capability=(9, 0), shared_bytes=227 << 10)


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


def device_limits(device: torch.device) -> DeviceLimits:
    """Of a CUDA device; Hopper's where kernels are interpreted."""
    return _limits(device.index or 0) if device.type == "cuda" else _HOPPER


@cache
def _limits(index: int) -> DeviceLimits:
    properties = torch.cuda.get_device_properties(index)
    return DeviceLimits(
        capability=(properties.major, properties.minor),
        shared_bytes=properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
    )


@cache
def _multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)
