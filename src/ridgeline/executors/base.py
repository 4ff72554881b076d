"""What the executors that hold models have in common: a KV pool of each, and who asks for it."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

from ridgeline.core.arrays import Array
from ridgeline.core.plan import BlockCopy, ModelRole, Pass, Segment
from ridgeline.core.protocols import Executor, KVLayout
from ridgeline.core.result import SegmentResult
from ridgeline.core.spec import ModelSpec
from ridgeline.executors.growing import GrowingTree
from ridgeline.executors.handle import Handle, Mask
from ridgeline.executors.outputs import SegmentContext, SegmentRows, segment_result
from ridgeline.executors.pipeline import AwaitedPasses, StagePipe
from ridgeline.executors.runner import Clock, StepRunner
from ridgeline.executors.state import SequenceState


class KVPool(Protocol):
    """The paged KV of one model, as `PoolExecutor` needs it."""

    @property
    def layout(self) -> KVLayout: ...

    def allocate(self, num_blocks: Sequence[int]) -> None: ...

    def copy_block(self, group: int, source: int, target: int) -> None: ...

    def export_blocks(self, group: int, blocks: Sequence[int]) -> bytes: ...

    def import_blocks(self, group: int, blocks: Sequence[int], data: bytes) -> None: ...


Pool = TypeVar("Pool", bound=KVPool)
Result = TypeVar("Result")


class PoolExecutor(StepRunner, Executor, Generic[Pool]):
    """What `ridgeline.core.protocols.Executor` says of specs and KV; from rows to results.

    ``pools`` is filled by the subclass. Blocks are exported and imported on the thread that runs
    the steps, and so take their turn among them. ``kernels`` names what computes: by other kernels
    the KV of the same weights and tokens is another. ``shares``: the draft model has the target's
    pool (`ExecutorModel.shares_kv`).
    """

    def __init__(
        self,
        name: str,
        specs: Mapping[ModelRole, ModelSpec],
        *,
        kernels: str,
        pipe: StagePipe | None = None,
        shares: bool = False,
    ) -> None:
        super().__init__(name, num_stages=pipe.num_stages if pipe else 1)
        self._pipe = pipe
        if pipe is not None and not pipe.is_last:
            self.awaited = AwaitedPasses(pipe, self._record)
        self._kernels_name = kernels
        self.pools: dict[ModelRole, Pool] = {}
        self._specs = dict(specs)
        self.shares = shares

    @property
    def kernels(self) -> str:
        return self._kernels_name

    def spec(self, role: ModelRole = ModelRole.TARGET) -> ModelSpec:
        return self._specs[role]

    def kv_layout(self, role: ModelRole = ModelRole.TARGET) -> KVLayout:
        return self.pools[role].layout

    def allocate_kv(self, num_blocks: Sequence[int], role: ModelRole = ModelRole.TARGET) -> None:
        self.pools[role].allocate(num_blocks)

    def export_blocks(
        self, group: int, blocks: Sequence[int], role: ModelRole = ModelRole.TARGET
    ) -> bytes:
        return self.in_turn(lambda: self.pools[role].export_blocks(group, blocks))

    def import_blocks(
        self, group: int, blocks: Sequence[int], data: bytes, role: ModelRole = ModelRole.TARGET
    ) -> None:
        self.in_turn(lambda: self.pools[role].import_blocks(group, blocks, data))

    def in_turn(self, call: Callable[[], Result]) -> Result:
        """Call on the thread that runs the steps, after those that were submitted."""

        def settled() -> Result:
            self.settle()
            return call()

        return self.thread.submit(settled).result()

    @abstractmethod
    def move_kv(
        self, role: ModelRole, state: SequenceState, sources: Sequence[int], first: int
    ) -> None:
        """Move a sequence's KV at the positions ``sources`` to those from ``first`` on."""

    @abstractmethod
    def draft_logits(
        self, segments: Sequence[Segment], role: ModelRole, clock: Clock
    ) -> list[tuple[SegmentContext, Array]]:
        """One forward pass: each segment, and the logits ``[1 + drafts, V]`` of its last rows."""

    def grow(
        self, segments: Sequence[Segment], a_pass: Pass, handle: Handle, clock: Clock
    ) -> tuple[SegmentResult, ...]:
        growing = [GrowingTree(segment, a_pass) for segment in segments]
        for _ in range(a_pass.num_steps):
            live = [each for each in growing if each.segment is not None]
            if not live or handle.aborted.is_set():
                break
            asked = [each.segment for each in live if each.segment is not None]
            for tree, found in zip(live, self.draft_logits(asked, a_pass.role, clock), strict=True):
                tree.take(*found)
            clock.lap("sample_s")
        return tuple(tree.result() for tree in growing)

    def results(
        self,
        items: Sequence[SegmentContext],
        role: ModelRole,
        masks: Sequence[Mask | None],
        drawn: Sequence[list[int] | None],
        rows_of: Callable[[int], SegmentRows],
    ) -> list[SegmentResult]:
        """What came of each segment, recorded in its state; ``drawn`` as `draw_tokens` gives it."""
        results = []
        for number, item in enumerate(items):
            tokens = drawn[number]
            if tokens is not None and item.wants_drawn_only:
                result = SegmentResult(token_ids=() if tokens[0] < 0 else (tokens[0],))
            else:
                result = segment_result(
                    item, partial(rows_of, number), masks[number], role=role, drawn=tokens
                )
            self._record(item, role, result)
            results.append(result)
        if self._pipe is not None and role is ModelRole.TARGET:
            self._pipe.tell([(result.token_ids, result.accepted) for result in results])
        return results

    def _record(self, item: SegmentContext, role: ModelRole, result: SegmentResult) -> None:
        """Note what came of a segment in the state of its sequence."""
        segment, state = item.segment, item.state
        first_draft = segment.stop - segment.num_drafts
        if segment.parents and result.accepted:
            sources = [first_draft + node for node in result.accepted]
            self.move_kv(role, state, sources, first_draft)
        state.set_tokens(role, first_draft, result.token_ids)
        if role is ModelRole.TARGET:
            state.proposals.clear()
            state.features.verified(segment, result.accepted)

    def replayed(
        self, segments: Sequence[Segment], role: ModelRole, tokens_NS: Iterable[Sequence[int]]
    ) -> list[tuple[SegmentResult, ...]]:
        """What came of decode steps, recorded: of each, the token of each segment; −1 is none."""
        steps = []
        for step, tokens in enumerate(tokens_NS):
            results = []
            for segment, token in zip(segments, tokens, strict=True):
                drawn = (token,) if token >= 0 else ()
                if drawn:
                    self.states[segment.slot].set_tokens(role, segment.stop + step, drawn)
                results.append(SegmentResult(token_ids=drawn))
            steps.append(tuple(results))
        return steps

    def copy_block(self, copy: BlockCopy) -> None:
        self.pools[copy.role].copy_block(copy.group, copy.source, copy.target)

    def close(self) -> None:
        """Abort what runs, and free everything."""
        self.stop()
        self.free()
        self.pools.clear()

    def free(self) -> None:
        """Give back what the subclass holds, once nothing runs any more."""
