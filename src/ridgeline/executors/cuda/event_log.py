"""`EventLog`: what the ops of a pass took on the device, by events between them."""

import time
from collections.abc import Sequence

from ridgeline.core.ops import Op
from ridgeline.core.recorded_step import OpSpan
from ridgeline.executors.cuda.device import Device, Event


class EventLog:
    """One pass, op by op. Events are asked for their times once the recording has ended."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._events: list[tuple[tuple[int, ...], Event]] = []
        self._begin_s = 0.0

    def begin(self) -> None:
        """The pass begins, with nothing before it on the device."""
        self._device.synchronize()
        self._begin_s = time.perf_counter()
        self._events.append(((), self._device.record(timed=True)))

    def note(self, places: tuple[int, ...]) -> None:
        """The ops at these places of the model have been issued."""
        self._events.append((places, self._device.record(timed=True)))

    def passes(self, model_ops: Sequence[Op]) -> tuple[tuple[OpSpan, ...], ...]:
        """The pass's spans; the device's clock begins at that of the host."""
        _, first = self._events[0]
        spans, end_s = [], self._begin_s
        for places, event in self._events[1:]:
            event.wait()
            begin_s, end_s = end_s, self._begin_s + event.seconds_since(first)
            name = "+".join(type(model_ops[place]).__name__ for place in places)
            spans.append(OpSpan(name=name, ops=places, begin_s=begin_s, end_s=end_s))
        return (tuple(spans),)
