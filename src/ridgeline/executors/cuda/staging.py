"""Small arrays on their way to the device, through pinned memory and without waiting."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ridgeline.executors.cuda.device import Device, Event

_BUFFERS = 8  # copies that may be under way; more wait for the oldest


class Staging:
    """A ring of pinned buffers that grow with what is sent."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffers: list[torch.Tensor | None] = [None] * _BUFFERS
        self._events: list[Event | None] = [None] * _BUFFERS
        self._next = 0

    def send(self, values: npt.NDArray[Any], out: torch.Tensor | None = None) -> torch.Tensor:
        """Copy an array into ``out``, or a new tensor; both keep its type and shape."""
        source = torch.from_numpy(np.ascontiguousarray(values))
        if out is None:
            out = torch.empty(source.shape, dtype=source.dtype, device=self._device.torch_device)
        pinned = self._buffer(source.nbytes)[: source.nbytes].view(source.dtype)
        pinned = pinned.view(source.shape)
        pinned.copy_(source)
        out.copy_(pinned, non_blocking=True)
        self._events[self._next] = self._device.record()
        self._next = (self._next + 1) % _BUFFERS
        return out

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        event, buffer = self._events[self._next], self._buffers[self._next]
        if event is not None:
            event.wait()  # of _BUFFERS copies ago
        if buffer is None or len(buffer) < num_bytes:
            size = max(4096, 1 << (num_bytes - 1).bit_length())
            buffer = self._device.staging((size,), torch.uint8)
            self._buffers[self._next] = buffer
        return buffer


class Writes:
    """Single elements of a tensor that are to change, issued together."""

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target.view(-1)
        self._indices: list[int] = []
        self._values: list[float] = []

    def add(self, index: int, *values: float) -> None:
        """Elements from ``index`` on become ``values``."""
        self._indices.extend(range(index, index + len(values)))
        self._values.extend(values)

    def flush(self, staging: Staging) -> None:
        """Issue what was added; where an element was written twice, the last value counts."""
        if not self._indices:
            return
        last = dict(zip(self._indices, self._values, strict=True))
        indices = staging.send(np.fromiter(last.keys(), dtype=np.int64, count=len(last)))
        dtype = np.float64 if self._target.is_floating_point() else np.int64
        values = staging.send(np.fromiter(last.values(), dtype=dtype, count=len(last)))
        self._target.index_copy_(0, indices, values.to(self._target.dtype))
        self._indices, self._values = [], []
