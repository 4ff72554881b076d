"""Small arrays on their way to the device, through pinned memory and without waiting."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ridgeline.executors.cuda.device import Device, Event

# Copies that may be under way, of two steps and more; another would wait for the oldest, and so for
# the steps before it.
_BUFFERS = 64


_TYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.bool_): torch.bool,
}


class Staging:
    """A ring of pinned buffers that grow with what is sent."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffers = [device.staging((0,), torch.uint8) for _ in range(_BUFFERS)]
        self._events: list[Event | None] = [None] * _BUFFERS
        self._next = 0

    def send(self, values: npt.NDArray[Any], out: torch.Tensor | None = None) -> torch.Tensor:
        """Copy an array into ``out``, or a new tensor; both keep its type and shape."""
        kind = _TYPES[values.dtype]
        if out is None:
            out = torch.empty(values.shape, dtype=kind, device=self._device.torch_device)
        buffer = self._buffer(values.nbytes)
        buffer.numpy()[: values.nbytes] = np.ascontiguousarray(values).view(np.uint8).ravel()
        out.copy_(buffer[: values.nbytes].view(kind).view(values.shape), non_blocking=True)
        self._events[self._next] = self._device.record()
        self._next = (self._next + 1) % _BUFFERS
        return out

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        """The next buffer, once what it held has been copied."""
        event = self._events[self._next]
        if event is not None:
            event.wait()
        if len(self._buffers[self._next]) < num_bytes:
            size = max(4096, 1 << (num_bytes - 1).bit_length())
            self._buffers[self._next] = self._device.staging((size,), torch.uint8)
        return self._buffers[self._next]


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
