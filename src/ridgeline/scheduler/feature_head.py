"""Draft passes of a drafter that reads the target's hidden states, with KV in its blocks."""

from collections.abc import Sequence as Seq

from ridgeline.core.plan import BlockCopy, BlockTableUpdate, ModelRole, Outputs, Pass, Segment
from ridgeline.core.result import SegmentResult
from ridgeline.scheduler.draft_passes import DraftPasses
from ridgeline.scheduler.sequence import Sequence


class FeatureHead(DraftPasses):
    """Keeps the drafter one token behind the target (EAGLE-3, arXiv 2503.01840).

    Its row of a token has the features of the position before, and its KV there. The executor keeps
    features until the target's next pass of the sequence, so whatever tokens are known by then are
    computed before: those of a prompt right behind the target's pass, and those that were sampled
    or accepted before the next, where the drafter goes on from them. KV that a prefix brings, or
    the prompt of another sample, is the drafter's as well. While it rests, it computes prompts
    alone, and what it skips of outputs lacks its KV: that makes guesses worse, and no output
    another. Without KV of its own (Medusa) it computes nothing but drafts.
    """

    def __init__(self, *, has_kv: bool = True) -> None:
        super().__init__()
        self._has_kv = has_kv
        self._computed: dict[Sequence, int] = {}  # positions of which the drafter has KV
        self._planned: list[tuple[Sequence, int]] = []  # those, once this step is done
        self._proposing: set[Sequence] = set()  # in this step
        self._failed: set[Sequence] = set()
        self._is_resting = False
        self._skipping: set[Sequence] = set()  # since steps began that it did not take part in

    def start(self, sequence: Sequence) -> None:
        if sequence.kv.takes_drafts and sequence.request.generates:
            self._computed[sequence] = sequence.kv.num_computed

    def begin_step(self, *, is_resting: bool) -> None:
        super().begin_step(is_resting=is_resting)
        self._planned.clear()
        self._proposing.clear()
        self._is_resting = is_resting
        if is_resting:
            self._skipping.update(self._computed)
            return
        for sequence in self._skipping & self._computed.keys():
            # Features are kept of the last pass alone, which had one token at the least.
            last = sequence.kv.num_computed - 1
            self._computed[sequence] = max(self._computed[sequence], last)
        self._skipping.clear()

    def propose(
        self, sequence: Sequence, num_tokens: int, *, is_tree: bool, copies: list[BlockCopy]
    ) -> int:
        kv, length = sequence.kv, len(sequence.token_ids)
        computed = self._computed.get(sequence, length)
        if sequence in self._failed or not computed < kv.num_computed == length - 1:
            return 0
        write = kv.prepare_write(length - 1, length + num_tokens)
        copies += write.copies
        start = computed if self._has_kv else length - 2
        segment = self._segment(
            sequence, length - 1, write.block_updates, Outputs(sample=True), start=start
        )
        self._proposals.setdefault((num_tokens, is_tree), []).append(segment)
        self._proposing.add(sequence)
        return num_tokens

    def passes(self) -> tuple[tuple[Pass, ...], dict[int, tuple[int, ...]]]:
        passes, references = super().passes()
        behind = tuple(
            self._segment(sequence, sequence.kv.num_computed)
            for sequence, computed in self._computed.items()
            if computed < sequence.kv.num_computed and sequence not in self._proposing
            if self._has_kv and not self._is_resting
        )
        return (*_draft_pass(behind), *passes), references

    def passes_behind(self, segments: Seq[Segment]) -> tuple[Pass, ...]:
        """What is computed of prompts once the target has features of them."""
        if not self._has_kv:
            return ()
        sequences = {sequence.slot: sequence for sequence in self._computed}
        known = []
        for segment in segments:
            sequence = sequences.get(segment.slot)
            if sequence is not None:
                stop = min(segment.stop - segment.num_drafts, len(sequence.token_ids) - 1)
                if segment.start < stop:
                    known.append(self._segment(sequence, stop, start=segment.start))
        return _draft_pass(tuple(known))

    def note_computed(self) -> None:
        for sequence, num_computed in self._planned:
            if sequence in self._computed:
                self._computed[sequence] = num_computed

    def verified(self, sequence: Sequence, proposed: SegmentResult, num_accepted: int) -> None:
        if not proposed.token_ids:
            self.fail(sequence)

    def fail(self, sequence: Sequence) -> None:
        self._failed.add(sequence)

    def finish(self, sequence: Sequence) -> None:
        self._computed.pop(sequence, None)
        self._failed.discard(sequence)

    def _segment(
        self,
        sequence: Sequence,
        stop: int,
        updates: tuple[BlockTableUpdate, ...] = (),
        outputs: Outputs = Outputs(),
        *,
        start: int | None = None,
    ) -> Segment:
        """The tokens after the positions from ``start``, if not from all that are computed, to
        ``stop``."""
        start = self._computed[sequence] if start is None else start
        self._planned.append((sequence, stop))
        assert sequence.slot is not None
        return Segment(
            slot=sequence.slot,
            start=start + 1,
            stop=stop + 1,
            token_ids=tuple(sequence.token_ids[start + 1 : stop + 1]),
            block_updates=updates,
            outputs=outputs,
        )


def _draft_pass(segments: tuple[Segment, ...]) -> tuple[Pass, ...]:
    return (Pass(segments=segments, role=ModelRole.DRAFT),) if segments else ()
