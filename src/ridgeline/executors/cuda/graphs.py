"""Decode steps as graphs: a whole step, sampling included, for each size of batch.

A step's inputs lie in tensors that stay where they are. At its end it makes the next step's inputs
of its own tokens, so that a graph that is replayed n times decodes n tokens of each sequence.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ridgeline.core.rounding import ceil_div, round_up
from ridgeline.executors.cuda.device import Device, Event, Graph
from ridgeline.executors.cuda.kernels import Draw, Kernels
from ridgeline.executors.cuda.staging import Staging
from ridgeline.kernels.triton import StepRows

MAX_STEPS = 64  # of a replay
_BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_STEP_BEYOND = 64
_AHEAD = 2  # steps of a replay that are issued and may not have begun
_CONTEXT_STEP = 128  # tokens, where a recorded step depends on the longest context


class TokenLog:
    """Tokens that the device has drawn and the host may not have seen.

    A step writes its tokens here, and the step after it may refer to them: reference r < 0 is
    element −1 − r. The last element is a token that was never drawn: −1.
    """

    def __init__(self, device: Device, num_rows: int) -> None:
        size = MAX_STEPS * num_rows
        self.values = torch.full((size + 1,), -1, dtype=torch.int64, device=device.torch_device)
        self.never = -1 - size  # the reference to what was never drawn


class GraphKey(NamedTuple):
    """What is fixed when a step is recorded: rows, entries of their block tables, the most that any
    row asks of a draw, and whether the logits of one are adjusted."""

    rows: int
    blocks: int
    how: Draw
    adjusts: bool = False


# What a step does with its rows: the tokens drawn.
StepBody = Callable[[StepRows, GraphKey], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Step:
    inputs: torch.Tensor  # int64: sources, positions, slots [B] each, and the number of the step
    graph: Graph | None  # None: run op by op


class DecodeSteps:
    """The steps of one model: recorded by `warm_up`, and those that it left out when they are first
    needed.

    Args:
        tables_GRM: block tables of the model, by KV group and slot; the last slot is padding's.
        body: what a step does; it waits for nothing.
        adjusts: whether some steps adjust logits, which warming up then records as well.
        record: false to run op by op, as the ladder's lower rungs do.
    """

    def __init__(
        self,
        device: Device,
        staging: Staging,
        kernels: Kernels,
        log: TokenLog,
        tables_GRM: torch.Tensor,
        body: StepBody,
        *,
        block_tokens: int,
        adjusts: bool,
        record: bool,
    ) -> None:
        self._device, self._staging, self._kernels = device, staging, kernels
        self._log, self._tables, self._body = log, tables_GRM, body
        self._block_tokens, self._adjusts, self._record = block_tokens, adjusts, record
        _, num_rows, self._longest = tables_GRM.shape
        self._num_slots = num_rows - 1
        self._pool = device.graph_pool() if record else None  # one step runs at a time
        self._steps: dict[GraphKey, _Step] = {}
        self.waited_s = 0.0  # for the device, in the last `run`

    def close(self) -> None:
        """Let go of what was recorded, and of the body, which refers to the model."""
        self._steps.clear()
        del self._body

    @property
    def num_recorded(self) -> int:
        return len(self._steps)

    def variant(self, num_rows: int, context: int, *, how: Draw, adjusts: bool = False) -> GraphKey:
        """The smallest variant that serves so many sequences of up to ``context`` tokens.

        Steps that adjust logits draw in every way, so that there are few of them.
        """
        how = Draw.TRUNCATED if adjusts else how
        rows = min(batch_bucket(num_rows), max(self._num_slots, num_rows))
        if self._kernels.decides_on_device:
            return GraphKey(rows, self._longest, max(how, Draw.NOISE), adjusts)
        step = _CONTEXT_STEP if self._record else self._block_tokens
        tokens = round_up(context, step)
        blocks = min(ceil_div(tokens, self._block_tokens), self._longest)
        return GraphKey(rows, blocks, how, adjusts)

    def warm_up(self) -> None:
        """Record steps of every size of batch, before one is waited for; where steps depend on
        contexts, those of short ones.

        The largest come first, since the smaller find room in what those have taken.
        """
        for num_rows in range(self._num_slots, 0, -1):
            if self._adjusts:
                self._step(self.variant(num_rows, 1, how=Draw.TRUNCATED, adjusts=True))
            for how in reversed(Draw):
                self._step(self.variant(num_rows, 1, how=how))

    def run(
        self,
        variant: GraphKey,
        sources: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        slots: npt.NDArray[np.int64],
        *,
        num_steps: int,
        is_aborted: Callable[[], bool],
    ) -> int:
        """Issue up to ``num_steps`` steps; returns how many. Padding is void and writes nothing.

        Few are issued ahead of the device, so that those after an abort are left out.
        """
        step = self._step(variant)
        count, rows = len(sources), variant.rows
        packed = np.zeros(3 * rows + 1, dtype=np.int64)
        packed[:rows] = self._log.never
        packed[:count] = sources
        packed[rows : rows + count] = positions
        packed[2 * rows : 2 * rows + count] = slots
        self._staging.send(packed, step.inputs)
        done = 0
        issued: deque[Event] = deque()
        self.waited_s = 0.0
        while done < num_steps:
            if len(issued) == _AHEAD:
                began = perf_counter()
                issued.popleft().wait()
                self.waited_s += perf_counter() - began
            if done and is_aborted():
                break
            if step.graph is None:
                self._issue(variant, step.inputs)
            else:
                step.graph.replay()
            done += 1
            if done < num_steps:
                issued.append(self._device.record())
        return done

    def _step(self, variant: GraphKey) -> _Step:
        if variant not in self._steps:
            self._steps[variant] = self._made(variant)
        return self._steps[variant]

    def _made(self, variant: GraphKey) -> _Step:
        at = self._device.torch_device
        inputs = torch.zeros(3 * variant.rows + 1, dtype=torch.int64, device=at)
        if not self._record:
            return _Step(inputs, None)
        # Recording runs the step, on padding alone; what steps before have drawn stays.
        kept = self._log.values.clone()
        inputs[: variant.rows].fill_(self._log.never)
        graph = self._device.capture(lambda: self._issue(variant, inputs), self._pool)
        self._log.values.copy_(kept)
        return _Step(inputs, graph)

    def _issue(self, variant: GraphKey, inputs: torch.Tensor) -> None:
        count, log = variant.rows, self._log.values
        sources, positions, slots = inputs[: 3 * count].view(3, count).unbind()
        number = inputs[3 * count :]
        rows = self._kernels.begin_step(
            sources, positions, slots, log, self._tables, block_tokens=self._block_tokens
        )
        drawn = self._body(rows, variant)
        self._kernels.end_step(
            sources, positions, number, rows, drawn, log, padding=self._num_slots
        )


def batch_bucket(num_rows: int) -> int:
    """The number of rows that a step of ``num_rows`` is padded to."""
    for size in _BATCHES:
        if num_rows <= size:
            return size
    return round_up(num_rows, _STEP_BEYOND)
