"""Steps that have been issued to the device and may still run."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ridgeline.core.plan import ModelRole, Segment
from ridgeline.core.result import SegmentResult, StepResult, StepTimings
from ridgeline.executors.cuda.device import Event
from ridgeline.executors.handle import Handle
from ridgeline.executors.state import SequenceState


@dataclass(slots=True, kw_only=True)
class DrawnTokens:
    """What a step drew, by output number, for the step after it.

    ``places[n]`` is where the token log has output n (−1: nowhere) as long as no other step has
    written there; ``tokens`` are known once the step is done, −1 where none was drawn.
    """

    places: Sequence[int] = ()
    tokens: Sequence[int] | None = None

    def source(self, output: int, never: int) -> int:
        """What stands for output ``output`` in a step's inputs: a token, or its place in the log;
        ``never`` for one that was not drawn."""
        if self.tokens is not None:
            return self.tokens[output] if self.tokens[output] >= 0 else never
        return -1 - self.places[output] if self.places[output] >= 0 else never


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedStep:
    """A deferrable step that has one pass, and where its tokens arrive.

    ``arrived`` is pinned memory: of each of ``num_steps`` steps ``num_rows`` tokens. ``rows[s]`` is
    segment s's place among them, ``None`` if it does not sample. ``states`` are the sequences',
    which may have been released since.
    """

    handle: Handle
    role: ModelRole
    segments: tuple[Segment, ...]
    states: tuple[SequenceState, ...]
    rows: tuple[int | None, ...]
    num_rows: int
    num_steps: int
    arrived: torch.Tensor
    drawn: DrawnTokens
    started: Event
    finished: Event
    prepare_s: float

    def wait(self) -> StepResult:
        """The result; records the tokens in the sequences' states."""
        self.finished.wait()
        values = self.arrived.tolist()
        results = [self._result(index, values) for index in range(len(self.segments))]
        plan = self.handle.plan
        wanted = plan.passes[0].num_steps
        tokens: list[int] = []
        for segment, result in zip(self.segments, results, strict=True):
            if segment.outputs.sample:
                tokens += [*result.token_ids, *[-1] * (wanted - len(result.token_ids))]
        self.drawn.tokens = tokens
        seconds = self.finished.seconds_since(self.started)
        return StepResult(
            step_id=plan.step_id,
            passes=(tuple(results),),
            timings=StepTimings(
                prepare_s=self.prepare_s, forward_s=seconds, total_s=max(seconds, self.prepare_s)
            ),
            aborted=self.num_steps < wanted,
        )

    def _result(self, index: int, values: Sequence[int]) -> SegmentResult:
        row, segment = self.rows[index], self.segments[index]
        if row is None:
            return SegmentResult()
        drawn = values[row :: self.num_rows]
        tokens = tuple(drawn[: drawn.index(-1)] if -1 in drawn else drawn)
        if tokens:
            self.states[index].set_tokens(self.role, segment.stop, tokens)
        return SegmentResult(token_ids=tokens)
