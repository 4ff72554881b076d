"""The rank's end: runs the driver's plans on a local executor."""

import os
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import numpy as np

from ridgeline.core.arrays import Array
from ridgeline.core.channel import Channel
from ridgeline.core.plan import ModelRole, StepPlan
from ridgeline.core.protocols import Executor, StepHandle
from ridgeline.core.result import StepResult
from ridgeline.executors.distributed.links import SIZES, exchange_seconds
from ridgeline.executors.distributed.messages import (
    AbortStep,
    Alive,
    Allocate,
    Command,
    Done,
    Export,
    Import,
    Loaded,
    LoadedRole,
    Masks,
    Ran,
    RankFailed,
    RunPlan,
)
from ridgeline.executors.distributed.pipe import SocketPipe
from ridgeline.kernels.cpu.group import RankGroup

ALIVE_S = 0.5  # between two signs of life


@dataclass(slots=True)
class RankLinks:
    """What one rank exchanges with others through: ``group`` with those that have other parts of
    the same layers, ``pipe`` with other stages. ``steps_s`` is what its steps took so far, and
    ``expert_tokens`` what `Executor.expert_tokens` tells, once there is an executor."""

    group: RankGroup
    pipe: SocketPipe | None
    steps_s: float = 0.0
    expert_tokens: Callable[[], Mapping[str, Array]] = dict

    @property
    def is_last_stage(self) -> bool:
        return self.pipe is None or self.pipe.is_last

    def exchange_seconds(self, num_bytes: int) -> float:
        """What it takes to exchange so many bytes; all ranks measure together."""
        if self.pipe is not None and self.group.num_ranks == 1:
            return self.pipe.exchange_seconds(num_bytes)
        return exchange_seconds(self.group, num_bytes)

    def life(self) -> Alive:
        sent_bytes, num_exchanges = self.group.counts()
        waited_s = 0.0
        if self.pipe is not None:
            sent_bytes += self.pipe.sent_bytes
            num_exchanges += self.pipe.num_sent
            waited_s = self.pipe.waited_s
        return Alive(
            cpu_s=time.process_time(),
            busy_s=max(0.0, self.steps_s - waited_s),
            sent_bytes=sent_bytes,
            num_exchanges=num_exchanges,
            expert_tokens=self.expert_tokens(),
        )


class RankServer:
    """Serves one rank until its driver is gone, and then ends the process.

    Ranks whose driver is gone, or of which one failed, may be waiting for each other in native
    code: they end without unwinding, and nothing is left to save.
    """

    def __init__(self, channel: Channel[Command], executor: Executor, links: RankLinks) -> None:
        self._channel, self._executor, self._links = channel, executor, links
        if links.group.rank == 0:
            links.expert_tokens = executor.expert_tokens
        self._steps: dict[int, StepHandle] = {}
        # What takes its turn among the steps, or waits for them, is not for the thread that reads.
        self._waiting = ThreadPoolExecutor(max_workers=executor.max_in_flight + 1)

    def run(self, roles: Sequence[ModelRole]) -> NoReturn:
        """Say what was loaded, and serve."""
        self._tell(
            Loaded(
                kernels=self._executor.kernels,
                link_s=[self._links.exchange_seconds(size) for size in SIZES],
                roles={role: self._loaded(role) for role in roles},
            )
        )
        while (command := self._channel.receive()) is not None:
            self._guarded(partial(self._obey, command))
        os._exit(0)

    def _loaded(self, role: ModelRole) -> LoadedRole:
        layout = self._executor.kv_layout(role)
        formats = self._executor.weight_formats(role)
        return LoadedRole(
            block_bytes=layout.block_bytes, digest=layout.digest, formats=dict(formats)
        )

    def _obey(self, command: Command) -> None:
        match command:
            case RunPlan(plan=plan):
                self._steps[plan.step_id] = self._executor.submit(plan)
                if not is_masked(plan):
                    self._later(partial(self._await, plan.step_id))
            case Masks(step_id=step_id, segments=segments, masks=masks):
                # What came lies somewhere in a message: copies are aligned.
                copies = {place: mask.copy() for place, mask in zip(segments, masks, strict=True)}
                self._steps[step_id].set_masks(copies)
                self._later(partial(self._await, step_id))
            case AbortStep(step_id=step_id):
                self._steps[step_id].abort()
                self._later(partial(self._await, step_id))
            case Allocate(number=number, role=role, num_blocks=num_blocks):
                self._executor.allocate_kv(num_blocks, role)
                self._tell(Done(number=number))
            case Export() | Import():
                self._later(partial(self._move, command))
            case _:
                raise AssertionError(f"{type(command).__name__} is not for a rank that serves")

    def _await(self, step_id: int) -> None:
        result = self._steps.pop(step_id).result()
        self._links.steps_s += result.timings.total_s
        if not self._links.is_last_stage:
            return
        self._tell(
            Ran(
                step_id=step_id,
                checksum=checksum(result),
                result=result if self._links.group.rank == 0 else None,
            )
        )

    def _move(self, command: Export | Import) -> None:
        data = b""
        if isinstance(command, Export):
            data = self._executor.export_blocks(command.group, command.blocks, command.role)
        else:
            self._executor.import_blocks(command.group, command.blocks, command.data, command.role)
        self._tell(Done(number=command.number, data=data))

    def _later(self, call: Callable[[], None]) -> None:
        self._waiting.submit(self._guarded, call)

    def _guarded(self, call: Callable[[], None]) -> None:
        """A rank that fails ends: without it the others compute nothing."""
        try:
            call()
        except Exception as error:
            fail(self._channel, error)

    def _tell(self, report: object) -> None:
        try:
            self._channel.send(report)
        except OSError:  # the driver is gone
            os._exit(0)


def fail(channel: Channel[Command], error: Exception) -> NoReturn:
    """Tell the driver why the rank ends, and end."""
    with suppress(OSError):
        channel.send(RankFailed(error=type(error).__name__, message=str(error)))
    os._exit(1)


def show_life(channel: Channel[Command], links: RankLinks) -> None:
    """From a thread of its own, tell the driver now and then that this process runs."""

    def tell() -> NoReturn:
        while True:
            try:
                channel.send(links.life())
            except OSError:
                os._exit(0)
            time.sleep(ALIVE_S)

    threading.Thread(target=tell, daemon=True).start()


def is_masked(plan: StepPlan) -> bool:
    """Whether a plan waits for masks."""
    return any(segment.outputs.masked for a_pass in plan.passes for segment in a_pass.segments)


def checksum(result: StepResult) -> int:
    """Of all tokens of a step, by which ranks that disagree are found."""
    tokens = [
        token for segments in result.passes for each in segments for token in (*each.token_ids, -1)
    ]
    return zlib.crc32(np.array(tokens, dtype=np.int64).tobytes())
