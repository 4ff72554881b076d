"""One sample of a request, as the scheduler sees it."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from ridgeline.core.protocols import Draft, Grammar
from ridgeline.core.request import FinishReason, Request
from ridgeline.core.result import SegmentResult
from ridgeline.kvcache import SequenceKV

Lane = tuple[int, str]  # a priority, and a tenant


class SequenceStatus(StrEnum):
    """Where a sequence is on its way."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class DraftCounts:
    """Drafts that were verified, and their tokens; of a sequence no accepted ones after its end.

    ``drafted_at[i]`` drafts had tokens at depth i, and of ``accepted_at[i]`` one of them was
    accepted. ``drafted_by_rank[r]`` tokens were the r-th of those that follow one token, and
    ``accepted_by_rank[r]`` of them were accepted; in chains all are the first.
    """

    num_drafts: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    drafted_by_rank: list[int] = field(default_factory=list)
    accepted_by_rank: list[int] = field(default_factory=list)

    def add(self, draft: Draft, accepted: Seq[int]) -> None:
        """One more draft, and the indices of its accepted tokens."""
        self.num_drafts += 1
        _count(self.drafted_at, range(draft.num_steps))
        _count(self.accepted_at, range(len(accepted)), width=draft.num_steps)
        ranks = draft.ranks()
        _count(self.drafted_by_rank, ranks)
        _count(
            self.accepted_by_rank,
            [ranks[node] for node in accepted],
            width=len(self.drafted_by_rank),
        )


def _count(counts: list[int], places: Iterable[int], *, width: int = 0) -> None:
    counts.extend([0] * (width - len(counts)))
    for place in places:
        counts.extend([0] * (place + 1 - len(counts)))
        counts[place] += 1


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """One sample of a request, from its arrival to its end. Mutated by the scheduler alone.

    A step closes part of the gap between the tokens whose KV is in the cache (``kv.num_computed``)
    and the tokens known.

    Attributes:
        request: what it is a sample of.
        sample_index: which of the request's samples.
        token_ids: the prompt and the output so far.
        kv: the blocks that it holds of the target; a waiting fork already holds the prompt's.
        max_length: tokens, prompt included, with which it ends.
        lane: where it waits (`QueuePolicy`).
        grammar: held as long as the sequence is, so that it is compiled once whatever happens.
        num_prompt_tokens: those of ``token_ids`` that are the prompt's.
        is_plain: nothing but samples is wanted of it, without masks, and what it sees is the same
            in every step.
        may_end_early: a token or a text can end it before ``max_length``.
        stop_token_ids: the tokens that do.
        order: numbers requests as they arrive.
        postponed: its deadline cannot be met any more.
        may_look: the tiers have not looked for its prefix.
        may_load: the tiers were not asked for its prefix since it waits.
        num_planned: as ``kv.num_computed``, with the tokens of plans in flight.
        num_known: as ``len(token_ids)``, with the tokens that plans in flight promise.
        num_in_flight: plans in flight that have a part of it.
        promised_step: the plan that promises the last known token, if one does.
        promised_output: which output of that plan it is.
        slot: the executor's place for it while it runs.
        status: where it is in its life.
        finish_reason: why it ended.
        stop_reason: the stop token that ended it, if one did.
        drafts: what was verified.
    """

    request: Request
    sample_index: int
    token_ids: list[int]
    kv: SequenceKV
    max_length: int
    lane: Lane
    grammar: Grammar | None = None
    num_prompt_tokens: int = field(init=False)
    is_plain: bool = field(init=False)
    may_end_early: bool = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)
    order: int = 0
    postponed: bool = False
    may_look: bool = True
    may_load: bool = True
    num_planned: int = 0
    num_known: int = 0
    num_in_flight: int = 0
    promised_step: int = 0
    promised_output: int = 0
    slot: int | None = None
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    drafts: DraftCounts = field(default_factory=DraftCounts)

    def __post_init__(self) -> None:
        request = self.request
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.stop_token_ids = frozenset((*request.eos_token_ids, *request.params.stop_token_ids))
        self.may_end_early = bool(self.stop_token_ids or request.params.stop or self.grammar)
        self.is_plain = (
            request.generates
            and request.params.prompt_logprobs is None
            and request.params.structured_outputs is None
            and self.kv.selection is None
        )

    @property
    def num_to_compute(self) -> int:
        """Of the tokens known, those that are neither in the cache nor taken of documents."""
        kv, documents = self.kv, self.kv.documents
        num_taken = 0 if documents is None else documents.num_taken(kv.num_computed)
        return len(self.token_ids) - kv.num_computed - num_taken

    @property
    def was_admitted(self) -> bool:
        """Whether it has run, now or before a preemption."""
        return self.kv.num_cached is not None

    @property
    def num_cached_tokens(self) -> int | None:
        """Tokens found in the prefix cache when it was first admitted."""
        return self.kv.num_cached

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def settle(self) -> None:
        """Go on from what is computed and known: no plan in flight has a part of it."""
        self.num_planned = self.kv.num_computed
        self.num_known = len(self.token_ids)

    def promise_nothing(self) -> None:
        """What plans in flight were to yield does not come, or not all of it."""
        self.num_known = len(self.token_ids)

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED


class SequenceUpdate(NamedTuple):
    """What a step did for one sequence: new output tokens, and the segment's result as it came.

    ``start`` is the first position that the segment computed.
    """

    sequence: Sequence
    start: int
    new_token_ids: tuple[int, ...]
    result: SegmentResult
