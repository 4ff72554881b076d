"""The kernels of all models and formats, compiled by many processes before anything is measured.

Compilers would take a fourth of the benchmark's time one after the other, the GPU idle. What they
make is kept on disk (Triton's cache), where the processes that measure find it.
"""

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Lock

from benchmarks.gpu.processes import Job, Part, conduct
from benchmarks.gpu.progress import Bench, Message
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.steps import StepBench, random_model

_MOST_PROCESSES = 15
_AT_MOST_S = 60.0
_CONTEXT = 32  # tokens; kernels are the same for all


def compile_ahead(settings: Settings, *, on_host: bool, tell: Callable[[Message], None]) -> None:
    """Have the kernels of decode steps and prompts compiled. What fails or takes too long is told
    as left out: it is compiled where it is measured."""
    count = 1 if on_host else min(_MOST_PROCESSES, len(os.sched_getaffinity(0)) - 1)
    wanted = [(shape, form) for form in settings.formats for shape in settings.shapes]
    ends_at = time.time() + _AT_MOST_S
    lock = Lock()

    def handle(message: Message) -> None:
        if message.kind in ("failed", "left out"):
            with lock:
                tell(Message("left out", message.what, message.value))

    def some(number: int) -> None:
        job = Job(
            parts=tuple(
                Part(_name(*each), bench_compilation, each) for each in wanted[number::count]
            ),
            settings=replace(settings, repeats=1, steps_s=0.0),
            on_host=on_host,
            ends_at=ends_at,
            stops_at=ends_at,
            patience_s=_AT_MOST_S,
        )
        conduct(job, handle)

    with ThreadPoolExecutor(max(1, count)) as threads:
        list(threads.map(some, range(min(count, len(wanted)))))


def bench_compilation(bench: Bench, shape: str, form: str) -> None:
    """Steps of one layer of the shape, which have the kernels of all, for every batch."""
    settings = bench.settings
    if not bench.progress.allows(_name(shape, form)):
        return
    batches = dict.fromkeys(batch for batch, _ in settings.decode)
    prompt = min(settings.prompts)
    own = StepBench(
        bench.device,
        bench.kernels(),
        shape,
        random_model(bench.device, one_layer(settings.shapes[shape])),
        form,
        max_batch=max(batches),
        settings=settings,
        execution="eager",
    )
    try:
        own.open(max(own.blocks_of(max(batches), _CONTEXT), own.blocks_of(1, prompt)))
        own.prefill(prompt)
        for batch in batches:
            own.decode(batch, _CONTEXT, replay=1)
        for batch, _ in settings.sampled:
            own.decode(batch, _CONTEXT, replay=1, sampled=True)
    finally:
        own.close()


def one_layer(config: Mapping[str, object]) -> dict[str, object]:
    """The shape with one layer, whose kernels are those of the others."""
    return {**config, "num_hidden_layers": 1}


def _name(shape: str, form: str) -> str:
    return f"kernels of {shape} in {form}, ahead"
