"""The draft model's passes: its own KV blocks, and proposals in the target's plan."""

from dataclasses import dataclass

from ridgeline.core.plan import BlockCopy, ModelRole, Outputs, Pass, Segment
from ridgeline.core.result import SegmentResult
from ridgeline.kvcache import KVCacheManager, PrefixCache, SequenceKV
from ridgeline.scheduler.draft_passes import DraftPasses
from ridgeline.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelConfig:
    """The draft model's KV pools, as in `SchedulerConfig`, the tokens of a pass, its positions.

    ``kv_ttl_s``: cached KV that was not used for these seconds is forgotten.
    """

    num_blocks: tuple[int, ...]
    windows: tuple[int | None, ...]
    block_tokens: int
    max_pass_tokens: int
    max_model_len: int
    kv_ttl_s: float | None = None


class DraftModel(DraftPasses):
    """Plans what a draft model computes that has KV of its own.

    Each sequence that drafts has KV blocks of the draft model's, too. The gap that the draft model
    has to close before it can propose (at first, the prompt) is closed in chunks of
    ``max_pass_tokens`` in all. Sequences for which no block is free propose nothing.
    """

    def __init__(self, config: DraftModelConfig) -> None:
        super().__init__()
        self._config = config
        self.prefix_cache = PrefixCache(
            config.num_blocks, config.windows, config.block_tokens, ttl_s=config.kv_ttl_s
        )
        self._manager = KVCacheManager(self.prefix_cache, max_length=config.max_model_len)
        self._kv: dict[Sequence, SequenceKV] = {}
        self._budget = config.max_pass_tokens
        self._behind: list[Segment] = []  # of this step: prompts that are being caught up with
        self._in_flight: list[tuple[Sequence, SequenceKV, int]] = []  # those behind come so far

    def start(self, sequence: Sequence) -> None:
        """What the sequence knows now may be in the draft model's prefix cache."""
        request = sequence.request
        kv = self._manager.new_sequence(
            request.cache_key, tenant=request.tenant, max_length=sequence.max_length
        )
        kv.reuse_prefix(sequence.token_ids)
        self._kv[sequence] = kv

    def begin_step(self, *, is_resting: bool) -> None:
        super().begin_step(is_resting=is_resting)
        self._budget = self._config.max_pass_tokens
        self._behind = []

    def propose(
        self, sequence: Sequence, num_tokens: int, *, is_tree: bool, copies: list[BlockCopy]
    ) -> int:
        kv = self._kv.get(sequence)
        if kv is None:
            return 0
        num_tokens = min(num_tokens, self._config.max_model_len - len(sequence.token_ids))
        if num_tokens <= 0:
            return 0
        start, length = kv.num_computed, len(sequence.token_ids)
        stop = min(length, start + self._budget)
        stop = kv.clip_to_windows(start, stop, length, self._kv.values())
        is_ready = stop == length
        last = length + num_tokens - 1 if is_ready else stop
        if stop == start or not kv.can_write(start, last):
            return 0
        write = kv.prepare_write(start, last)
        assert not write.copies, "the draft model's blocks are shared only when full"
        assert sequence.slot is not None
        segment = Segment(
            slot=sequence.slot,
            start=start,
            stop=stop,
            token_ids=tuple(sequence.token_ids[start:stop]),
            block_updates=write.block_updates,
            outputs=Outputs(sample=is_ready),
        )
        self._budget -= stop - start
        if is_ready:
            self._proposals.setdefault((num_tokens, is_tree), []).append(segment)
            return num_tokens
        self._behind.append(segment)
        self._in_flight.append((sequence, kv, stop))
        return 0

    def passes(self) -> tuple[tuple[Pass, ...], dict[int, tuple[int, ...]]]:
        passes, references = super().passes()
        if self._behind:
            passes = (Pass(segments=tuple(self._behind), role=ModelRole.DRAFT), *passes)
        return passes, references

    def note_computed(self) -> None:
        """What was caught up with may be cached, and given up."""
        for sequence, kv, num_computed in self._in_flight:
            if self._kv.get(sequence) is kv:
                kv.advance(num_computed, sequence.token_ids)
        self._in_flight.clear()

    def verified(self, sequence: Sequence, proposed: SegmentResult, num_accepted: int) -> None:
        kv = self._kv.get(sequence)
        if kv is None:
            return
        if not proposed.token_ids:
            self.fail(sequence)
            return
        # The chain's last token was proposed, but its KV not computed; a tree's is out of order.
        computed = 0 if proposed.parents else min(num_accepted, len(proposed.token_ids) - 1)
        length = len(sequence.token_ids)
        kv.advance(length - 1 - num_accepted + computed, sequence.token_ids)
        kv.trim(length)

    def fail(self, sequence: Sequence) -> None:
        self.finish(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Give the sequence's blocks back."""
        kv = self._kv.pop(sequence, None)
        if kv is not None:
            kv.release()

    def tick(self, now_s: float) -> None:
        self.prefix_cache.tick(now_s)

    def delete_tenant(self, tenant: str) -> None:
        self.prefix_cache.delete_tenant(tenant)

    def check_integrity(self) -> None:
        self._manager.check_integrity(self._kv.values())
