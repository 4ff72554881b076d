"""One sample of a request, as the scheduler sees it."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from ridgeline.core.protocols import Grammar
from ridgeline.core.request import FinishReason, Request
from ridgeline.core.result import SegmentResult
from ridgeline.kvcache import SequenceKV

Lane = tuple[int, str]  # a priority, and a tenant


class SequenceStatus(StrEnum):
    """Where a sequence is on its way."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """Mutated by the scheduler alone.

    A step closes part of the gap between the tokens whose KV is in the cache (``kv.num_computed``)
    and the tokens known. ``num_planned`` counts those of the plans in flight as well, of which
    ``num_in_flight`` have a part of it. ``num_known`` counts ``token_ids`` and what plans in flight
    promise; if the last of these is such a token, it is output ``promised_output`` of the plan
    ``promised_step``.

    ``kv`` are the blocks that it holds of the target; a waiting fork already holds the prompt's.
    ``grammar`` is held as long as the sequence is, so that it is compiled once whatever happens.
    It ends when it has ``max_length`` tokens, prompt included; ``may_end_early`` where a token or a
    text can end it before. ``is_plain``: nothing but samples is wanted of it, without masks.
    It waits in ``lane`` (`QueuePolicy`); ``order`` numbers requests as they arrive;
    ``postponed``: its deadline cannot be met any more.
    ``may_load``: the tiers were not asked since it waits. ``num_drafted[i]`` tokens were drafted at
    position i of a draft, and ``num_accepted[i]`` of them accepted.
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
    num_drafted: list[int] = field(default_factory=list)
    num_accepted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        request = self.request
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.stop_token_ids = frozenset((*request.eos_token_ids, *request.params.stop_token_ids))
        self.may_end_early = bool(self.stop_token_ids or request.params.stop or self.grammar)
        self.is_plain = (
            request.generates
            and request.params.prompt_logprobs is None
            and request.params.structured_outputs is None
        )

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

    def count_drafts(self, num_drafted: int, num_accepted: int) -> None:
        """Note the outcome of one draft."""
        count_draft(self.num_drafted, self.num_accepted, num_drafted, num_accepted)

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED


def count_draft(
    drafted_at: list[int], accepted_at: list[int], num_drafted: int, num_accepted: int
) -> None:
    """Add one draft to counts by position."""
    for counts in (drafted_at, accepted_at):
        counts.extend([0] * (num_drafted - len(counts)))
    for position in range(num_drafted):
        drafted_at[position] += 1
        accepted_at[position] += position < num_accepted


class SequenceUpdate(NamedTuple):
    """What a step did for one sequence: new output tokens, and the segment's result as it came.

    ``start`` is the first position that the segment computed.
    """

    sequence: Sequence
    start: int
    new_token_ids: tuple[int, ...]
    result: SegmentResult
