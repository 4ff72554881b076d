"""The draft model's passes: its own KV blocks, and chains of proposals in the target's plan."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from ridgeline.core.plan import ModelRole, Outputs, Pass, Segment, earlier_pass
from ridgeline.core.result import SegmentResult
from ridgeline.kvcache import PrefixCache
from ridgeline.scheduler.blocks import BlockTables
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


class DraftModel:
    """Plans what the draft model computes; one plan is in flight at a time.

    Each sequence that drafts has a twin, which shares its tokens but has the draft model's blocks
    and its own ``num_computed``. The gap that the draft model has to close before it can propose
    (at first, the prompt) is closed in chunks of ``max_pass_tokens`` in all. Sequences for which no
    block is free propose nothing.
    """

    def __init__(self, config: DraftModelConfig) -> None:
        self._config = config
        self.prefix_cache = PrefixCache(
            config.num_blocks, config.windows, config.block_tokens, ttl_s=config.kv_ttl_s
        )
        self._blocks = BlockTables(self.prefix_cache)
        self._twins: dict[Sequence, Sequence] = {}
        self._budget = config.max_pass_tokens
        self._behind: list[Segment] = []  # of this step: prompts that are being caught up with
        self._chains: dict[int, list[Segment]] = {}  # of this step, by the length of the chain
        self._in_flight: list[Sequence] = []  # those of the segments behind, until their result

    def start(self, sequence: Sequence) -> None:
        """The sequence is admitted: what it knows now may be in the draft model's prefix cache."""
        groups: Seq[int] = [0] * self._blocks.num_groups
        twin = replace(
            sequence,
            tables=[[] for _ in groups],
            num_computed=0,
            num_sent=list(groups),
            num_given_up=list(groups),
            nodes=[],
            collided=False,
            num_writable=0,
            note_at=0,
        )
        assert twin.token_ids is sequence.token_ids
        self._blocks.reuse_prefix(twin)
        self._twins[sequence] = twin

    def begin_step(self) -> None:
        self._budget = self._config.max_pass_tokens
        self._behind, self._chains = [], {}

    def propose(self, sequence: Sequence, num_tokens: int) -> int:
        """Ask for proposals after all known tokens; returns how many there will be, maybe none."""
        twin = self._twins.get(sequence)
        if twin is None:
            return 0
        num_tokens = min(num_tokens, self._config.max_model_len - len(sequence.token_ids))
        if num_tokens <= 0:
            return 0
        start, length = twin.num_computed, len(sequence.token_ids)
        stop = min(length, start + self._budget)
        stop = self._blocks.clip_to_windows(twin, start, stop, self._twins.values())
        is_ready = stop == length
        last = length + num_tokens - 1 if is_ready else stop
        if stop == start or not self._blocks.can_write(twin, start, last):
            return 0
        updates, copies = self._blocks.prepare_write(twin, start, last)
        assert not copies, "the draft model's blocks are shared only when full"
        assert sequence.slot is not None
        segment = Segment(
            slot=sequence.slot,
            start=start,
            stop=stop,
            token_ids=tuple(sequence.token_ids[start:stop]),
            block_updates=updates,
            outputs=Outputs(sample=is_ready),
        )
        self._budget -= stop - start
        if is_ready:
            self._chains.setdefault(num_tokens, []).append(segment)
            return num_tokens
        self._behind.append(segment)
        self._in_flight.append(sequence)
        twin.num_computed = stop
        return 0

    def passes(self) -> tuple[tuple[Pass, ...], dict[int, tuple[int, ...]]]:
        """This step's passes, which come before the target's, and references by slot."""
        passes: list[Pass] = []
        references: dict[int, tuple[int, ...]] = {}
        if self._behind:
            passes.append(Pass(segments=tuple(self._behind), role=ModelRole.DRAFT))
        output = 0
        for num_tokens, segments in self._chains.items():
            passes.append(
                Pass(segments=tuple(segments), role=ModelRole.DRAFT, num_steps=num_tokens)
            )
            for segment in segments:
                outputs = range(output, output + num_tokens)
                references[segment.slot] = tuple(map(earlier_pass, outputs))
                output += num_tokens
        return tuple(passes), references

    def note_computed(self) -> None:
        """A plan was computed: what was caught up with may be cached, and given up."""
        for sequence in self._in_flight:
            if (twin := self._twins.get(sequence)) is not None:
                self._blocks.note_computed(twin)
        self._in_flight.clear()

    def verified(self, sequence: Sequence, proposed: SegmentResult, num_accepted: int) -> None:
        """The step is done, the sequence has its new tokens, so many of the proposed among them."""
        twin = self._twins.get(sequence)
        if twin is None:
            return
        if not proposed.token_ids:
            self.fail(sequence)
            return
        # The chain's last token was proposed, but its KV not computed.
        computed = min(num_accepted, len(proposed.token_ids) - 1)
        twin.num_computed = len(twin.token_ids) - 1 - num_accepted + computed
        self._blocks.note_computed(twin)
        self._blocks.trim(twin)

    def fail(self, sequence: Sequence) -> None:
        """Propose nothing more for this sequence: the model has no token for it."""
        self.finish(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Give the sequence's blocks back."""
        twin = self._twins.pop(sequence, None)
        if twin is not None:
            self._blocks.release(twin)

    def check_integrity(self) -> None:
        """Assert that the draft model's blocks are accounted for."""
        self._blocks.check_integrity(self._twins.values())
