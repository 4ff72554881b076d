"""Seconds of work on a device."""

import statistics
from collections.abc import Callable, Sequence

import torch

from ridgeline.executors.cuda.device import Device

_AT_LEAST_S = 0.002  # of work between two events


def measure(device: Device, calls: Sequence[Callable[[], object]], *, repeats: int) -> float:
    """Median seconds of one of some calls, which differ in their data.

    They are recorded, one after the other, so that what is timed is the device. To be of main
    memory, the data of all of them together has to be larger than its caches.
    """

    def body() -> None:
        for call in calls:
            call()

    with device.scope(), torch.inference_mode():
        graph = device.capture(body)

        def run(times: int) -> float:
            started = device.record()
            for _ in range(times):
                graph.replay()
            finished = device.record()
            finished.wait()
            return finished.seconds_since(started) / times

        times = max(1, int(_AT_LEAST_S / max(run(1), 1e-7)))
        return statistics.median(run(times) for _ in range(repeats)) / len(calls)
