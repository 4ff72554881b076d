"""Everything, in the order of its weight, until the time is over."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from ridgeline.bench.gpu.ceilings import datasheet, measured_ceilings
from ridgeline.bench.gpu.kernels import bench_kernels
from ridgeline.bench.gpu.ladder import GRAPH_RUNGS, RUNGS, Rung, climb
from ridgeline.bench.gpu.peers import transformers_tokens_per_s
from ridgeline.bench.gpu.predictions import predictions
from ridgeline.bench.gpu.report import Report
from ridgeline.bench.gpu.settings import Deadline, Settings
from ridgeline.bench.gpu.steps import StepBench, bench_steps, random_model
from ridgeline.executors.cuda.device import Device
from ridgeline.executors.cuda.kernels import Kernels

# The first steps of each model and format, which the figures to be shown are about.
_FIRST_STEPS = 4
_COMPILE_S = 60.0  # that transformers takes at the least


def run(
    device: Device,
    kernels: Callable[[], Kernels],
    settings: Settings,
    tell: Callable[[str], None],
) -> Report:
    """``kernels`` makes those to be measured. What fails is told, and does not stop the rest."""
    deadline = Deadline(settings.minutes)
    tell("ceilings")
    with device.scope(), torch.inference_mode():
        measured, rates = measured_ceilings(
            device,
            matrix=settings.matrix,
            stream_bytes=settings.stream_bytes,
            repeats=settings.repeats,
        )
    report = Report(
        device=device.name, measured=measured, rates=rates, datasheet=datasheet(device.name)
    )
    report.left_out = deadline.left_out
    guarded = _guard(report, tell)
    first, *others = settings.shapes
    early, late = settings.formats[:2], settings.formats[2:]

    def steps(shapes: Sequence[str], formats: Sequence[str]) -> None:
        for shape in shapes:
            for form in formats:
                with guarded(f"steps of {shape} in {form}"):
                    if deadline.allows(f"steps of {shape} in {form}"):
                        _steps(device, kernels, settings, shape, form, deadline, report)

    def ladder(shape: str, rungs: Sequence[Rung]) -> None:
        with guarded(f"the ladder of {shape}"):
            for rung, time in climb(device, kernels, settings, deadline, shape=shape, rungs=rungs):
                tell(f"{rung.name}: {time.tokens_per_s:.1f} tokens/s")
                report.ladders.setdefault(shape, []).append((rung, time))

    steps([first, *others[:1]], early)
    ladder(first, RUNGS[:-1])
    for other in others[:1]:
        ladder(other, GRAPH_RUNGS)
    with guarded("single kernels"):
        model = random_model(device, settings.shapes[first])
        own = kernels()
        with device.scope(), torch.inference_mode():
            for each in bench_kernels(device, own, model, settings, deadline):
                report.kernels.append(each)
    steps([first, *others[:1]], late)
    steps(others[1:], settings.formats)
    ladder(first, RUNGS[-1:])
    with guarded("transformers"):
        shape = min(settings.shapes, key=lambda name: _layers(settings, name))
        if settings.compiles and deadline.allows("transformers", _COMPILE_S):
            report.transformers[shape] = transformers_tokens_per_s(
                settings.shapes[shape], device.torch_device
            )
    with guarded("predictions"):
        report.predictions = predictions(report.steps, measured)
    report.seconds = deadline.elapsed_s
    return report


def _steps(
    device: Device,
    kernels: Callable[[], Kernels],
    settings: Settings,
    shape: str,
    form: str,
    deadline: Deadline,
    report: Report,
) -> None:
    model = random_model(device, settings.shapes[shape])
    bench = StepBench(
        device,
        kernels(),
        shape,
        model,
        form,
        max_batch=max(batch for batch, _ in settings.decode),
        repeats=settings.repeats,
    )
    most = None if shape == next(iter(settings.shapes)) else _FIRST_STEPS
    try:
        for step in bench_steps(bench, settings, deadline, most=most):
            report.steps.append(step)
    finally:
        bench.close()


Guard = Callable[[str], AbstractContextManager[None]]


def _guard(report: Report, tell: Callable[[str], None]) -> Guard:
    @contextmanager
    def guarded(what: str) -> Iterator[None]:
        """One part that fails is noted, with where it failed, and the others go on."""
        tell(what)
        try:
            yield
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            report.failed.append(
                f"{what}: {type(error).__name__}: {error} ({where.name}, line {where.lineno})"
            )
            tell(traceback.format_exc())

    return guarded


def _layers(settings: Settings, name: str) -> int:
    layers = settings.shapes[name]["num_hidden_layers"]
    assert isinstance(layers, int)
    return layers
