"""Weights on their way to the device: read, copied and converted at the same time.

The host reads a part of a tensor into one pinned buffer while the device copies the part before out
of the other, and converts or quantizes the one before that. A part goes from its pinned buffer into
memory of its own on the device, by the stream of copies, and from there into the tensor, by the
stream of work. So nothing that was allocated for one stream is touched by the other, but that
memory, whose uses events keep apart.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle

import torch

from ridgeline.executors.cuda.device import Device, Event

_PART_BYTES = 32 << 20
_LANES = 2


@dataclass(slots=True)
class _Lane:
    """A buffer on either side. The host may write ``pinned`` once ``copied`` has passed (``None``:
    at once), and copies may write ``landed`` once ``read`` has."""

    pinned: torch.Tensor
    landed: torch.Tensor
    read: Event
    copied: Event | None = None


class Uploads:
    """Takes twice two buffers of ``part_bytes``, which go with it.

    It is used, by one thread, within `Device.scope`.
    """

    def __init__(self, device: Device, *, part_bytes: int = _PART_BYTES) -> None:
        self._device, self._copies, self._part_bytes = device, device.copy_stream(), part_bytes
        self._lanes = cycle([self._lane() for _ in range(_LANES)])

    def send(self, values: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor of the host on the device, of type ``dtype`` or its own, for what is issued from
        now on. ``values`` have been read when this returns, and the copy need not be done.

        What is on a GPU already is converted there.
        """
        at, dtype = self._device.torch_device, dtype or values.dtype
        if values.device.type != "cpu":
            return values.to(at, dtype)
        out = torch.empty(values.shape, dtype=dtype, device=at)
        if values.numel() == 0:
            return out
        source, target = values.contiguous().view(-1), out.view(-1)
        for part in self._parts(source):
            self._send(source[part], target[part])
        return out

    def _send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        lane = next(self._lanes)
        if lane.copied is not None:
            lane.copied.wait()
        pinned = lane.pinned[: source.nbytes]
        pinned.copy_(source.view(torch.uint8))
        with self._copies.scope():
            self._copies.wait_for(lane.read)
            lane.landed[: source.nbytes].copy_(pinned, non_blocking=True)
            lane.copied = self._copies.record()
        self._device.wait_for(lane.copied)
        target.copy_(lane.landed[: source.nbytes].view(source.dtype))
        lane.read = self._device.record()

    def _parts(self, source: torch.Tensor) -> Iterator[slice]:
        each = self._part_bytes // source.element_size()
        for first in range(0, len(source), each):
            yield slice(first, first + each)

    def _lane(self) -> _Lane:
        size, at = (self._part_bytes,), self._device.torch_device
        landed = torch.empty(size, dtype=torch.uint8, device=at)
        # Its memory may have been another's, whose work has been issued and is not done.
        return _Lane(self._device.staging(size, torch.uint8), landed, self._device.record())
