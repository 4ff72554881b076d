"""Seconds of a call on the device, for choices that are made on load."""

import statistics
from collections.abc import Callable
from math import ceil
from typing import Protocol

from ridgeline.executors.cuda.device import Device

_CALLS = 8  # of one graph
_WINDOW_S = 2e-3
_WINDOWS = 5


class Timer(Protocol):
    """How long a call takes; ``recorded`` as part of a graph, without the time of the host."""

    def __call__(self, device: Device, call: Callable[[], object], *, recorded: bool) -> float: ...


def seconds_on(device: Device, call: Callable[[], object], *, recorded: bool) -> float:
    """The median of some windows, in which the call is repeated. See `Timer`."""

    def several() -> None:
        for _ in range(_CALLS):
            call()

    several()  # kernels are compiled
    run = device.capture(several).replay if recorded else several

    def window(times: int) -> float:
        started = device.record(timed=True)
        for _ in range(times):
            run()
        finished = device.record(timed=True)
        finished.wait()
        return finished.seconds_since(started)

    once = max(min(window(1), window(1)), 1e-7)
    times = ceil(_WINDOW_S / once)
    return statistics.median(window(times) for _ in range(_WINDOWS)) / (times * _CALLS)
