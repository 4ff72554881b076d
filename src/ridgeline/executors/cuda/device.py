"""What the executor asks of a device: work in order, events, graphs, memory.

`CUDADevice` is a GPU. `HostDevice` runs the same PyTorch ops on the CPU, where graphs are recorded
op by op and refuse what a CUDA graph refuses; the executor's logic is tested on it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes of a device: ``free`` for this process now, of ``total``."""

    free: int
    total: int


class Event(Protocol):
    """A point in the device's work."""

    def wait(self) -> None:
        """Block until the device has come to it."""

    def seconds_since(self, earlier: "Event") -> float:
        """Seconds that the device took from ``earlier`` to here; both are timed, and have been
        waited for."""


class Graph(Protocol):
    """Work that was recorded once, on tensors that stay where they are."""

    def replay(self) -> None:
        """Issue it again, without Python between its ops."""


class Stream(Protocol):
    """A queue of work of a device: what is issued to it is done in order."""

    def scope(self) -> AbstractContextManager[object]:
        """Within it the calling thread's PyTorch ops are issued to the stream."""

    def record(self, *, timed: bool = False) -> Event:
        """An event after all that has been issued so far; only those that are ``timed`` say how
        long something took."""

    def wait_for(self, event: Event) -> None:
        """Have the device begin what is issued from now on once it has come to an event of another
        stream; the host goes on."""


class Device(Stream, Protocol):
    """One device and one stream of work on it. ``name`` is the hardware's own."""

    @property
    def name(self) -> str: ...

    @property
    def torch_device(self) -> torch.device: ...

    def copy_stream(self) -> Stream:
        """A stream for copies to the device, beside the one of work: in no order with it but by
        events, and not with memory that was allocated for the other."""

    def memory(self) -> DeviceMemory:
        """What is free, counting what PyTorch keeps for itself and does not use."""

    def synchronize(self) -> None:
        """Block until all that has been issued is done."""

    def staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that the device copies from and to without the host waiting."""

    def release(self) -> None:
        """Give memory that nothing uses any more back to the device, for other processes."""

    def graph_pool(self) -> object:
        """Memory for graphs of which one runs at a time; it is theirs alone, and goes with them."""

    def capture(self, body: Callable[[], None], pool: object = None) -> Graph:
        """Record what ``body`` issues, with memory from ``pool`` or of its own. It is run once
        as well, and so must do no harm.

        Raises whatever ``body`` raises, and an error if it waits for the device.
        """
