"""Parts are measured in a process of their own, so that a broken device costs a single case.

After an error on the device no call of its process succeeds any more. The process then ends, and
another goes on behind the case that failed.
"""

import multiprocessing
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import NamedTuple

from benchmarks.gpu.progress import NO_TIME, Bench, Message, Progress
from benchmarks.gpu.settings import Settings
from ridgeline.executors.cuda.attention import AttentionBackends
from ridgeline.executors.cuda.device import Device
from ridgeline.executors.cuda.host_device import HostDevice
from ridgeline.executors.cuda.opening import gpu_attention, gpu_kernels, gpu_tuning, open_gpu
from ridgeline.executors.cuda.torch_kernels import TorchKernels
from ridgeline.executors.cuda.tuning import Tuning

_FINISHED = "finished"
_LOST = "lost"


class Part(NamedTuple):
    """Cases that share a model; ``measure(bench, *arguments)``, a module's own function, asks and
    tells ``bench.progress`` of each."""

    name: str
    measure: Callable[..., None]
    arguments: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a process does: ``parts`` in their order, but for the cases that are ``done``.

    Attributes:
        on_host: on the CPU in the place of a GPU.
        ends_at: after which no case begins (`time.time`).
        stops_at: when a process that still runs is ended.
        patience_s: after which a case counts as hanging.
    """

    parts: tuple[Part, ...]
    settings: Settings
    on_host: bool
    ends_at: float
    stops_at: float
    patience_s: float
    done: frozenset[str] = frozenset()


def conduct(job: Job, handle: Callable[[Message], None]) -> None:
    """Have every part measured, by as many processes as it takes, one at a time."""
    while job.parts:
        if time.time() >= job.ends_at:
            for part in job.parts:
                handle(Message("left out", part.name, NO_TIME))
            return
        run = _Run(job, handle)
        if run.follow():
            return
        behind = job.parts[run.num_finished :]
        if run.case is None or run.is_late:  # the part cannot even begin, or go on
            behind = behind[1:]
        job = replace(job, parts=behind, done=job.done | run.done)


class _Run:
    """One process. ``case`` is which was begun last in the part that it is at; ``is_late``: it was
    stopped because the time is over."""

    def __init__(self, job: Job, handle: Callable[[Message], None]) -> None:
        self._job, self._handle = job, handle
        self.num_finished = 0
        self.done: set[str] = set()
        self.case: str | None = None
        self.is_late = False

    def follow(self) -> bool:
        """Hand on what the process tells; whether it came to its end."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(self._job, theirs), daemon=False)
        process.start()
        theirs.close()
        try:
            problem = self._receive(ours)
        finally:
            process.kill()
            process.join()
            ours.close()
        if problem:
            self._handle(self._outcome(problem))
        return self.num_finished == len(self._job.parts)

    def _outcome(self, problem: str) -> Message:
        """What became of the case, or of the part if none was begun."""
        part = self._job.parts[self.num_finished].name
        if not self.is_late:
            return Message("failed", self.case or part, problem)
        behind = f", with what was behind it in {part}" if self.case else ""
        return Message("left out", self.case or part, f"stopped as the time was over{behind}")

    def _receive(self, connection: Connection) -> str:
        """What went wrong that the process could not tell of itself."""
        job = self._job
        while self.num_finished < len(job.parts):
            left_s = job.stops_at - time.time()
            if not connection.poll(max(0.0, min(job.patience_s, left_s))):
                self.is_late = left_s < job.patience_s
                return f"it was stopped after {job.patience_s:.0f} s"
            try:
                message = connection.recv()
            except EOFError:
                return "its process ended"
            match message.kind:
                case "began":
                    self.case = message.what
                    self.done.add(message.what)
                case "left out":
                    self.done.add(message.what)
                case "finished":
                    self.num_finished += 1
                    self.case = None
                case "lost":
                    return ""
            self._handle(message)
        return ""


def _work(job: Job, connection: Connection) -> None:
    """What the process does."""
    tell = connection.send
    device: Device
    attention: AttentionBackends | None = None
    tuning: Tuning | None = None
    if job.on_host:
        device, kernels = HostDevice(), TorchKernels
    else:
        device, _ = open_gpu()
        kernels = partial(gpu_kernels, device)  # type: ignore[assignment]
        attention, tuning = gpu_attention(), gpu_tuning()
    progress = Progress(tell, done=job.done, ends_at=job.ends_at)
    bench = Bench(
        device=device,
        kernels=kernels,
        settings=job.settings,
        progress=progress,
        attention=attention,
        tuning=tuning,
    )
    tell(Message("device", device.name, device.memory().total))
    for part in job.parts:
        if progress.is_over:
            tell(Message("left out", part.name, NO_TIME))
            tell(Message(_FINISHED, part.name))
            continue
        while not _measure(part, bench, tell):
            if not _works(device):
                tell(Message(_LOST, part.name))
                return
            device.release()
        tell(Message(_FINISHED, part.name))


def _measure(part: Part, bench: Bench, tell: Callable[[Message], None]) -> bool:
    """Whether nothing is left of the part: it is begun again behind a case that failed."""
    progress = bench.progress
    progress.case = None
    try:
        part.measure(bench, *part.arguments)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})"
        tell(Message("failed", progress.case or part.name, why))
        traceback.print_exc()
        return progress.case is None and _works(bench.device)
    return True


def _works(device: Device) -> bool:
    """Whether the device still answers."""
    try:
        device.synchronize()
    except RuntimeError:
        return False
    return True
