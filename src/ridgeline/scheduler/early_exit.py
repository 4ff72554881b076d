"""Draft passes of the target's own first layers, which write its KV as it does itself."""

from ridgeline.core.plan import BlockCopy, Outputs, Segment
from ridgeline.core.result import SegmentResult
from ridgeline.scheduler.draft_passes import DraftPasses
from ridgeline.scheduler.sequence import Sequence

_SAMPLE = Outputs(sample=True)


class EarlyExit(DraftPasses):
    """Drafts for sequences that lack their last token's KV alone (LayerSkip, arXiv 2404.16710).

    There is nothing to catch up with: the target has computed these layers for all tokens before.
    What a draft pass writes, the target writes again as it verifies, all layers of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._failed: set[Sequence] = set()

    def start(self, sequence: Sequence) -> None: ...

    def propose(
        self, sequence: Sequence, num_tokens: int, *, is_tree: bool, copies: list[BlockCopy]
    ) -> int:
        kv, length = sequence.kv, len(sequence.token_ids)
        if sequence in self._failed or kv.num_computed + 1 != length:
            return 0
        write = kv.prepare_write(length - 1, length + num_tokens)
        copies += write.copies
        assert sequence.slot is not None
        segment = Segment(
            slot=sequence.slot,
            start=length - 1,
            stop=length,
            token_ids=(sequence.token_ids[-1],),
            block_updates=write.block_updates,
            outputs=_SAMPLE,
        )
        self._proposals.setdefault((num_tokens, is_tree), []).append(segment)
        return num_tokens

    def verified(self, sequence: Sequence, proposed: SegmentResult, num_accepted: int) -> None:
        if not proposed.token_ids:
            self.fail(sequence)

    def fail(self, sequence: Sequence) -> None:
        self._failed.add(sequence)

    def finish(self, sequence: Sequence) -> None:
        self._failed.discard(sequence)
