"""From plain PyTorch to this engine, one change at a time, on one shape."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ridgeline.bench.gpu.settings import Deadline, Settings
from ridgeline.bench.gpu.steps import StepBench, StepTime, random_model
from ridgeline.executors.cuda.device import Device
from ridgeline.executors.cuda.kernels import Kernels
from ridgeline.executors.cuda.torch_kernels import TorchKernels

_COMPILE_S = 150.0  # that PyTorch may take to compile a step


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
    Rung(name="beside: torch.compile", own_kernels=False, execution="compile"),
)  # fmt: skip


GRAPH_RUNGS = RUNGS[1:3]  # what graphs alone bring


def climb(
    device: Device,
    kernels: Callable[[], Kernels],
    settings: Settings,
    deadline: Deadline,
    *,
    shape: str,
    rungs: Sequence[Rung] = RUNGS,
) -> Iterator[tuple[Rung, StepTime]]:
    """Each rung's decode step at the first context of the settings."""
    config = settings.shapes[shape]
    context = settings.decode[0][1]
    for rung in rungs:
        compiles = rung.execution == "compile"
        if compiles and not settings.compiles:
            continue
        if not deadline.allows(f"ladder: {rung.name}", _COMPILE_S if compiles else 0.0):
            continue
        model = random_model(device, config)
        own = kernels() if rung.own_kernels else TorchKernels()
        bench = StepBench(
            device,
            own,
            shape,
            model,
            rung.format,
            max_batch=rung.batch,
            repeats=settings.repeats,
            execution=rung.execution,
        )
        try:
            bench.open(bench.blocks_of(rung.batch, context))
            time = bench.decode(rung.batch, context, replay=rung.replay, ahead=rung.ahead)
        finally:
            bench.close()
        yield rung, time
