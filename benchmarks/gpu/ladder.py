"""From plain PyTorch to this engine, one change at a time, on one shape."""

from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.gpu.progress import Bench
from benchmarks.gpu.steps import StepBench, StepTime, random_model
from ridgeline.executors.cuda.torch_kernels import TorchKernels

_COMPILE_S = 75.0  # that PyTorch may take to compile a step of 16 layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """What a rung changes, and how the executor is made for it."""

    name: str
    own_kernels: bool
    execution: str
    format: str = "bfloat16"
    batch: int = 1
    replay: int = 1
    ahead: bool = False


RUNGS = (
    Rung(name="PyTorch, op by op", own_kernels=False, execution="eager"),
    Rung(name="our kernels", own_kernels=True, execution="eager"),
    Rung(name="a graph for the step", own_kernels=True, execution="graphs"),
    Rung(name="steps ahead", own_kernels=True, execution="graphs", replay=8, ahead=True),
    Rung(
        name="int4 weights", own_kernels=True, execution="graphs", format="int4", replay=8,
        ahead=True,
    ),
    Rung(
        name="batch of 8", own_kernels=True, execution="graphs", format="int4", replay=8,
        ahead=True, batch=8,
    ),
    Rung(name="beside: torch.compile, in a graph", own_kernels=False, execution="compile"),
)  # fmt: skip


# What graphs alone bring, and what takes minutes, are measured by themselves.
LADDERS = {"whole": RUNGS[:-1], "graphs": RUNGS[1:3], "compiled": RUNGS[-1:]}


class Climbed(NamedTuple):
    """A rung's decode step."""

    rung: Rung
    time: StepTime


def climb(bench: Bench, shape: str, which: str) -> None:
    """Each rung's decode step at the first context of the settings."""
    for rung in LADDERS[which]:
        compiles = rung.execution == "compile"
        if compiles and not bench.settings.compiles:
            continue
        name = f"ladder of {shape}: {rung.name}"
        if not bench.progress.allows(name, _COMPILE_S if compiles else 0.0):
            continue
        try:
            time = _time(bench, shape, rung)
        except Exception as error:
            if not compiles:
                raise
            bench.progress.give_up(f"{type(error).__name__}: {error}")
        else:
            bench.progress.result("rung", (shape, Climbed(rung, time)))


def _time(bench: Bench, shape: str, rung: Rung) -> StepTime:
    settings, context = bench.settings, bench.settings.decode[0][1]
    own = StepBench(
        bench.device,
        bench.kernels() if rung.own_kernels else TorchKernels(),
        shape,
        random_model(bench.device, settings.shapes[shape]),
        rung.format,
        max_batch=rung.batch,
        settings=settings,
        execution=rung.execution,
    )
    try:
        own.open(own.blocks_of(rung.batch, context))
        return own.decode(rung.batch, context, replay=rung.replay, ahead=rung.ahead)
    finally:
        own.close()
