"""Stages of a pipeline: what one of them gets from the others, and when it has to have it.

Each stage computes its layers of a pass. The last one draws tokens from the logits, and tells the
others what came of the pass; they go on with the next plan meanwhile, and wait for it only where a
pass has a sequence whose outcome they have not heard.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ridgeline.core.arrays import Array
from ridgeline.core.errors import EngineError
from ridgeline.core.plan import ModelRole
from ridgeline.core.result import SegmentResult
from ridgeline.executors.outputs import SegmentContext

Outcome = tuple[tuple[int, ...], tuple[int, ...]]  # tokens, and accepted drafts, of a segment


class StagePipe(Protocol):
    """One stage's end. All stages make passes in the same order; whatever is waited for comes, or
    the process is ended."""

    num_stages: int
    is_last: bool

    def send(self, rows: Array) -> None:
        """Hidden states ``[T, D]`` for the next stage."""

    def receive(self, shape: tuple[int, int], dtype: str) -> Array:
        """Those of the stage before."""

    def tell(self, outcomes: Sequence[Outcome]) -> None:
        """What came of a pass, for all other stages; by the last one."""

    def hear(self) -> list[Outcome]:
        """The outcome of the next pass that was not heard of."""


@dataclass(slots=True)
class AwaitedPass:
    """A pass whose outcome a later stage will tell; then its tokens are put into ``outputs``, from
    ``places[s]`` on for segment s."""

    items: Sequence[SegmentContext]
    role: ModelRole
    outputs: list[int] = field(default_factory=list)
    places: Sequence[int] = ()
    results: tuple[SegmentResult, ...] = ()

    @property
    def slots(self) -> set[int]:
        return {item.segment.slot for item in self.items}


class AwaitedPasses:
    """Those of a stage that is not the last, in their order.

    ``record`` notes a segment's result in the state of its sequence.
    """

    def __init__(
        self, pipe: StagePipe, record: Callable[[SegmentContext, ModelRole, SegmentResult], None]
    ) -> None:
        self._pipe, self._record = pipe, record
        self._passes: deque[AwaitedPass] = deque()

    def add(self, items: Sequence[SegmentContext], role: ModelRole) -> AwaitedPass:
        """A pass was computed as far as this stage goes."""
        awaited = AwaitedPass(items, role)
        awaited.results = (SegmentResult(),) * len(items)
        self._passes.append(awaited)
        return awaited

    def settle(self, slots: Collection[int] | None = None) -> None:
        """Wait for the outcomes of all passes that have one of these slots, or of all."""
        while self._passes and (
            slots is None or any(not each.slots.isdisjoint(slots) for each in self._passes)
        ):
            self._settle_first()

    def _settle_first(self) -> None:
        awaited = self._passes.popleft()
        outcomes = self._pipe.hear()
        if len(outcomes) != len(awaited.items):
            raise EngineError("The stages of a pipeline are not at the same pass.")
        awaited.results = tuple(SegmentResult(*outcome) for outcome in outcomes)
        for item, result in zip(awaited.items, awaited.results, strict=True):
            self._record(item, awaited.role, result)
        for place, result in zip(awaited.places, awaited.results, strict=False):
            awaited.outputs[place : place + len(result.token_ids)] = result.token_ids
