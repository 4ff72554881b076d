"""Everything, in the order of its weight, until the time is over."""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from benchmarks.gpu.ceilings import bench_ceilings
from benchmarks.gpu.checks import bench_checks, case_names
from benchmarks.gpu.compilation import compile_ahead
from benchmarks.gpu.kernels import bench_kernels
from benchmarks.gpu.ladder import climb
from benchmarks.gpu.peers import bench_transformers
from benchmarks.gpu.predictions import predictions
from benchmarks.gpu.processes import Job, Part, conduct
from benchmarks.gpu.progress import Message
from benchmarks.gpu.report import Report
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.steps import bench_steps
from benchmarks.gpu.tuned import bench_tuning

# Of the first model, and of the others in the first formats, all steps are measured; else the
# first, which the figures to be shown are about.
_FIRST_STEPS = 4
_GRACE_S = 45.0  # that the last case has
_CHECK_MINUTES = 5.0
_MOST_CHECKING = 8  # processes


def run(
    settings: Settings, *, on_host: bool, folder: Path, tell: Callable[[str], None]
) -> tuple[Report, Path]:
    """The report, and where it was written: anew after each case, so that nothing is lost."""
    began, ends_at = time.monotonic(), time.time() + 60 * settings.minutes
    report = Report()

    def handle(message: Message) -> None:
        if message.kind in ("began", "failed"):
            tell(f"{message.what}" + (f": {message.value}" if message.value else ""))
        report.add(message)
        report.seconds = time.monotonic() - began
        if report.device:
            report.write(folder)

    tell("kernels are compiled")
    compile_ahead(settings, on_host=on_host, tell=handle)
    job = Job(
        parts=parts(settings),
        settings=settings,
        on_host=on_host,
        ends_at=ends_at,
        stops_at=ends_at + _GRACE_S,
        patience_s=settings.patience_s,
    )
    conduct(job, handle)
    try:
        ceilings = report.measured
        steps = [step for step in report.steps if not step.sampled]
        report.predictions = None if ceilings is None else predictions(steps, ceilings)
    except Exception as error:
        handle(Message("failed", "predictions", f"{type(error).__name__}: {error}"))
    report.seconds = time.monotonic() - began
    return report, report.write(folder)


def check(settings: Settings, *, on_host: bool) -> int:
    """Print what came of each check, and return 1 if one of them failed.

    Several processes share a GPU, since most of the time is that of compilers.
    """
    names = case_names()
    count = 1 if on_host else min(_MOST_CHECKING, len(os.sched_getaffinity(0)) // 2 or 1)
    told: dict[str, bool] = {}
    lock = Lock()
    ends_at = time.time() + 60 * _CHECK_MINUTES

    def handle(message: Message) -> None:
        with lock:
            if message.kind == "check":
                told[message.what] = message.value.passed
                print(message.value.text(), flush=True)
            elif message.kind in ("failed", "left out") and message.what not in told:
                told[message.what] = False
                print(f"FAILED  {message.what}: {message.value}", flush=True)

    def some(number: int) -> None:
        part = Part(f"checks {number + 1} of {count}", bench_checks, names[number::count])
        job = Job(
            parts=(part,),
            settings=settings,
            on_host=on_host,
            ends_at=ends_at,
            stops_at=ends_at + _GRACE_S,
            patience_s=settings.patience_s,
        )
        conduct(job, handle)

    with ThreadPoolExecutor(count) as threads:
        list(threads.map(some, range(count)))
    passed = [told.get(name, False) for name in names]
    print(f"{sum(passed)} of {len(names)} checks passed")
    return 0 if all(passed) else 1


def parts(settings: Settings) -> tuple[Part, ...]:
    """What is measured, in order."""
    first, *others = settings.shapes
    early, late = settings.formats[:2], settings.formats[2:]

    def steps(shapes: Sequence[str], formats: Sequence[str]) -> list[Part]:
        return [
            Part(
                f"steps of {shape} in {form}",
                bench_steps,
                (shape, form, None if shape == first or form in early else _FIRST_STEPS),
            )
            for shape in shapes
            for form in formats
        ]

    def ladder(shape: str, which: str) -> Part:
        return Part(f"the ladder of {shape}, {which}", climb, (shape, which))

    return (
        Part("ceilings", bench_ceilings),
        *(Part(f"tuning of {first} in {form}", bench_tuning, (first, form)) for form in early),
        *steps([first, *others[:1]], early),
        ladder(first, "whole"),
        *(ladder(other, "graphs") for other in others[:1]),
        Part("single kernels", bench_kernels, (first,)),
        *steps([first, *others[:1]], late[:1]),
        *steps(others[1:], early),
        ladder((others or [first])[0], "compiled"),
        *steps([first, *others[:1]], late[1:]),
        *steps(others[1:], late),
        Part("transformers", bench_transformers),
    )
