"""Draft passes in the target's plan, whichever model computes them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq

from ridgeline.core.plan import BlockCopy, ModelRole, Pass, Segment, earlier_pass, tree_depth
from ridgeline.core.result import SegmentResult
from ridgeline.scheduler.sequence import Sequence


class DraftPasses(ABC):
    """What `Speculation` asks of a model that drafts; one plan is in flight at a time."""

    def __init__(self) -> None:
        # Of this step, by the number of proposals and whether they are a tree.
        self._proposals: dict[tuple[int, bool], list[Segment]] = {}

    @abstractmethod
    def start(self, sequence: Sequence) -> None:
        """The sequence is admitted."""

    def begin_step(self, *, is_resting: bool) -> None:
        """A step is about to be planned; ``is_resting``: nothing is proposed in it, and it may be
        planned before the results of the step before, or repeated."""
        self._proposals = {}

    @abstractmethod
    def propose(
        self, sequence: Sequence, num_tokens: int, *, is_tree: bool, copies: list[BlockCopy]
    ) -> int:
        """Ask for proposals after all known tokens; returns how many there will be, maybe none.

        Adds to ``copies`` what has to be copied before the step.
        """

    def passes(self) -> tuple[tuple[Pass, ...], dict[int, tuple[int, ...]]]:
        """This step's passes, which come before the target's, and references by slot."""
        if not self._proposals:
            return (), {}
        passes: list[Pass] = []
        references: dict[int, tuple[int, ...]] = {}
        output = 0
        for (num_tokens, is_tree), segments in self._proposals.items():
            passes.append(
                Pass(
                    segments=tuple(segments),
                    role=ModelRole.DRAFT,
                    num_steps=tree_depth(num_tokens) if is_tree else num_tokens,
                    num_nodes=num_tokens if is_tree else 0,
                )
            )
            for segment in segments:
                outputs = range(output, output + num_tokens)
                references[segment.slot] = tuple(map(earlier_pass, outputs))
                output += num_tokens
        return tuple(passes), references

    def passes_behind(self, segments: Seq[Segment]) -> tuple[Pass, ...]:
        """This step's passes that come after the target's over ``segments``."""
        return ()

    def note_computed(self) -> None:
        """A plan was computed."""
        return

    @abstractmethod
    def verified(self, sequence: Sequence, proposed: SegmentResult, num_accepted: int) -> None:
        """The step is done, the sequence has its new tokens, so many of the proposed among them."""

    @abstractmethod
    def fail(self, sequence: Sequence) -> None:
        """Propose nothing more for this sequence: the model has no token for it."""

    @abstractmethod
    def finish(self, sequence: Sequence) -> None:
        """The sequence loses its slot."""

    def tick(self, now_s: float) -> None:
        """Tell the time, and forget KV that has expired."""
        return

    def delete_tenant(self, tenant: str) -> None:
        """Forget the KV that is cached of a tenant."""
        return

    def check_integrity(self) -> None:
        """Assert that every block is accounted for."""
        return
