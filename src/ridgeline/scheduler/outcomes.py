"""What becomes of a sequence once a step has computed its part."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from ridgeline.core.plan import Segment
from ridgeline.core.request import FinishReason
from ridgeline.core.result import SegmentResult
from ridgeline.scheduler.blocks import BlockTables
from ridgeline.scheduler.policies import QueuePolicy
from ridgeline.scheduler.sequence import Sequence, SequenceStatus, SequenceUpdate
from ridgeline.scheduler.speculation import Speculation
from ridgeline.scheduler.waiting import Waiting

_End = tuple[FinishReason, int | None]


class Outcomes:
    """Applies results to sequences; ``finish`` is how the scheduler ends one."""

    def __init__(
        self,
        blocks: BlockTables,
        policy: QueuePolicy,
        speculation: Speculation,
        waiting: Waiting,
        finish: Callable[[Sequence, FinishReason, int | None], None],
    ) -> None:
        self._blocks = blocks
        self._policy = policy
        self._speculation = speculation
        self._waiting = waiting
        self._finish = finish

    def apply(
        self, sequences: Seq[Sequence], outcomes: Iterable[tuple[Segment, SegmentResult]]
    ) -> list[SequenceUpdate]:
        """Advance sequences by their parts of a step, and end those that are through.

        Sequences that were aborted while the step ran are passed over.
        """
        updates = []
        is_plain = self._speculation.drafter is None and not self._waiting.has_forks
        for sequence, (segment, outcome) in zip(sequences, outcomes, strict=True):
            sequence.num_in_flight -= 1
            status = sequence.status
            if status is SequenceStatus.FINISHED:
                continue
            is_decode = (
                is_plain
                and sequence.is_plain
                and status is SequenceStatus.RUNNING
                and len(outcome.token_ids) == 1
                and len(sequence.token_ids) == segment.stop
            )
            apply = self._apply_token if is_decode else self._apply
            updates.append(apply(sequence, segment, outcome))
        return updates

    def _apply_token(
        self, sequence: Sequence, segment: Segment, outcome: SegmentResult
    ) -> SequenceUpdate:
        """The same as `_apply` for the one kind of outcome that there may be hundreds of."""
        (token,), stop = outcome.token_ids, segment.stop
        sequence.token_ids.append(token)
        sequence.num_computed = stop
        if not sequence.num_in_flight:
            sequence.num_planned, sequence.reference = stop, None
        if stop >= sequence.note_at:
            self._blocks.note_computed(sequence)
        self._policy.charge(sequence, 0, 1)
        if token in sequence.stop_token_ids or stop + 1 >= sequence.max_length:
            self._finish(sequence, *_reason(sequence, token, is_whole=False))
        return SequenceUpdate(sequence, segment.start, outcome.token_ids, outcome)

    def _apply(
        self, sequence: Sequence, segment: Segment, outcome: SegmentResult
    ) -> SequenceUpdate:
        """Advance a sequence by its part of a step, if it was not in vain, and end it if due."""
        runs = sequence.status is SequenceStatus.RUNNING  # it was not preempted in the meantime
        if runs and segment.num_drafts and self._speculation.is_void(sequence, segment):
            return self._drop_drafts(sequence, segment, outcome)
        known = segment.stop - segment.num_drafts
        if len(sequence.token_ids) < known:  # a replay before it came short
            return self._skip(sequence, segment, outcome)
        masked = runs and segment.outputs.masked
        new_tokens, end = self._append(sequence, outcome, masked=masked)
        self._policy.charge(sequence, 0, len(new_tokens))
        if self._waiting.has_forks and known >= sequence.num_prompt_tokens:
            self._start_forks(sequence, holds_prompt=runs)
        if runs:
            self._note_progress(sequence, segment, outcome)
            speculates = masked or self._speculation.drafter is not None
            if speculates and segment.outputs.sample:
                self._speculation.verified(sequence, segment, outcome, new_tokens)
        if end is None:
            end = _end_without_token(sequence, segment, new_tokens)
        if end is not None:
            self._finish(sequence, *end)
        return SequenceUpdate(sequence, segment.start, new_tokens, outcome)

    def _append(
        self, sequence: Sequence, outcome: SegmentResult, *, masked: bool
    ) -> tuple[tuple[int, ...], _End | None]:
        """Take the tokens up to one that ends the output; returns those, and why it ends."""
        tokens, known = outcome.token_ids, sequence.token_ids
        fits = len(known) + len(tokens) < sequence.max_length
        if fits and not masked and sequence.stop_token_ids.isdisjoint(tokens):
            known.extend(tokens)
            return tokens, None
        for count, token in enumerate(tokens, start=1):
            known.append(token)
            is_whole = masked and self._speculation.advance(sequence, token)
            is_full = len(known) >= sequence.max_length
            if is_whole or is_full or token in sequence.stop_token_ids:
                return tokens[:count], _reason(sequence, token, is_whole=is_whole)
        return tokens, None

    def _drop_drafts(
        self, sequence: Sequence, segment: Segment, outcome: SegmentResult
    ) -> SequenceUpdate:
        """The drafts were void, and with them the segment: it is planned again."""
        self._blocks.trim(sequence)
        sequence.num_planned = sequence.num_computed
        return SequenceUpdate(sequence, segment.start, (), outcome)

    def _skip(self, sequence: Sequence, segment: Segment, outcome: SegmentResult) -> SequenceUpdate:
        """Nothing was computed; the sequence goes on from what it has, once that is known."""
        sequence.reference = None
        if not sequence.num_in_flight:
            sequence.num_planned = sequence.num_computed
            self._blocks.send_again(sequence)
        return SequenceUpdate(sequence, segment.start, (), outcome)

    def _note_progress(self, sequence: Sequence, segment: Segment, outcome: SegmentResult) -> None:
        """The sequence has more computed tokens; it still holds the blocks of all of them."""
        num_more = len(outcome.accepted) or max(0, len(outcome.token_ids) - 1)
        known = segment.stop - segment.num_drafts
        sequence.num_computed = min(known + num_more, len(sequence.token_ids))
        if not sequence.num_in_flight:
            sequence.num_planned, sequence.reference = sequence.num_computed, None
        if segment.num_drafts:
            self._blocks.trim(sequence)
        if sequence.num_computed >= sequence.note_at:
            self._blocks.note_computed(sequence)

    def _start_forks(self, parent: Sequence, *, holds_prompt: bool) -> None:
        """Queue the other samples, as if all but the last prompt token were computed for them.

        They start from nothing if the parent has lost its blocks since it was computed.
        """
        for child in self._waiting.release_forks(parent.request):
            if holds_prompt:
                child.num_computed = parent.num_prompt_tokens - 1
                self._blocks.fork(parent, child, child.num_computed)
            self._waiting.push(child)


def _end_without_token(
    sequence: Sequence, segment: Segment, new_tokens: tuple[int, ...]
) -> _End | None:
    """Why a sequence ends that no token ended: none was possible, or none was wanted."""
    if segment.outputs.sample and not new_tokens:
        return FinishReason.ERROR, None
    is_prompt = segment.stop - segment.num_drafts == sequence.num_prompt_tokens
    if is_prompt and not sequence.request.generates:
        return FinishReason.LENGTH, None
    return None


def _reason(sequence: Sequence, token: int, *, is_whole: bool) -> _End:
    """Why the output ends with this token; a token that the caller chose to stop at is named."""
    request = sequence.request
    if token in request.eos_token_ids:
        return FinishReason.STOP, None
    if token in request.params.stop_token_ids:
        return FinishReason.STOP, token
    return (FinishReason.STOP if is_whole else FinishReason.LENGTH), None
