"""Seconds of work on a device."""

import statistics
from collections.abc import Callable, Sequence
from math import ceil

import torch

from benchmarks.gpu.settings import Settings
from ridgeline.executors.cuda.device import Device

_CALLS = 16  # that a graph has at the least: what is between graphs counts little


def measure(device: Device, calls: Sequence[Callable[[], object]], settings: Settings) -> float:
    """Median seconds of one of some calls, which differ in their data.

    They are recorded, one after the other, so that what is timed is the device, and it works for a
    while before, so that its clocks are those of work. To be of main memory, the data of all calls
    together has to be larger than its caches.
    """
    each = ceil(_CALLS / len(calls))

    def body() -> None:
        for _ in range(each):
            for call in calls:
                call()

    with device.scope(), torch.inference_mode():
        graph = device.capture(body)

        def run(times: int) -> float:
            started = device.record(timed=True)
            for _ in range(times):
                graph.replay()
            finished = device.record(timed=True)
            finished.wait()
            return finished.seconds_since(started)

        passed = once = max(run(1), 1e-7)
        while passed < settings.spin_s:
            passed += run(ceil(settings.spin_s / once / 4))
        times = max(1, ceil(settings.window_s / max(run(1), 1e-7)))
        found = [run(times) for _ in range(settings.repeats)]
    return statistics.median(found) / (times * each * len(calls))
