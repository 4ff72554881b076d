"""``python -m ridgeline.bench.gpu``: measure, print a table, write a file."""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from ridgeline.bench.gpu.checks import check_all
from ridgeline.bench.gpu.run import run
from ridgeline.bench.gpu.settings import FULL, MINIATURE
from ridgeline.executors.cuda import gpu_kernels, open_gpu
from ridgeline.executors.cuda.device import Device
from ridgeline.executors.cuda.host_device import HostDevice
from ridgeline.executors.cuda.kernels import Kernels
from ridgeline.executors.cuda.torch_kernels import TorchKernels
from ridgeline.kernels.gpu import missing_for_gpu


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 1 where there is no GPU, or something failed."""
    parser = argparse.ArgumentParser(prog="python -m ridgeline.bench.gpu", description=__doc__)
    parser.add_argument("--minutes", type=float, help="no other case is begun after these")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder")
    parser.add_argument("--shapes", nargs="+", choices=tuple(FULL.shapes), help="only these")
    parser.add_argument("--formats", nargs="+", choices=FULL.formats, help="only these")
    parser.add_argument(
        "--host", action="store_true", help="a miniature on the CPU, to see that all of it runs"
    )
    parser.add_argument(
        "--check", action="store_true", help="compare with the reference executor, measure nothing"
    )
    options = parser.parse_args(arguments)
    if options.host and options.shapes:
        parser.error("--host has a shape of its own; leave --shapes out")
    settings = MINIATURE if options.host else FULL
    if options.minutes is not None:
        settings = replace(settings, minutes=options.minutes)
    if options.formats:
        settings = replace(settings, formats=tuple(options.formats))
    if options.shapes:
        shapes = {name: FULL.shapes[name] for name in options.shapes}
        settings = replace(settings, shapes=shapes)
    began = time.monotonic()

    def tell(what: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {what}", file=sys.stderr, flush=True)

    device: Device
    kernels: Callable[[], Kernels]
    if options.host:
        device, kernels = HostDevice(), TorchKernels
    else:
        reason = missing_for_gpu()
        if reason is not None:
            if options.check:
                print(f"skipped: {reason}")
                return 0
            print(f"No GPU can be measured here: {reason}", file=sys.stderr)
            return 1
        device, _ = open_gpu()
        kernels = partial(gpu_kernels, device)
    if options.check:
        return _check(device, kernels)
    report = run(device, kernels, settings, tell)
    print(report.text())
    print(f"\nwritten to {report.write(options.out)}")
    return 1 if report.failed else 0


def _check(device: Device, kernels: Callable[[], Kernels]) -> int:
    failed = 0
    for check in check_all(device, kernels):
        print(check.text(), flush=True)
        failed += not check.passed
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
