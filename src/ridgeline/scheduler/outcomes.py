"""What becomes of a sequence once a step has computed its part."""

from collections.abc import Sequence as Seq

from ridgeline.core.plan import Pass, Segment
from ridgeline.core.request import FinishReason
from ridgeline.core.result import SegmentResult
from ridgeline.scheduler.lifecycle import Lifecycle
from ridgeline.scheduler.policies import QueuePolicy
from ridgeline.scheduler.sequence import Sequence, SequenceStatus, SequenceUpdate
from ridgeline.scheduler.speculation import Speculation

# Named here, since to look up a member of an enum takes 70 ns in Python 3.11.
_RUNNING, _FINISHED = SequenceStatus.RUNNING, SequenceStatus.FINISHED

_End = tuple[FinishReason, int | None]


class Outcomes:
    """Applies results to sequences, and has ``lifecycle`` finish those that are through."""

    def __init__(self, policy: QueuePolicy, speculation: Speculation, lifecycle: Lifecycle) -> None:
        self._policy = policy
        self._speculation = speculation
        self._lifecycle = lifecycle
        self._waiting = lifecycle.waiting
        self._has_forks = False  # whether samples wait for a prompt to be computed

    def apply(
        self, sequences: Seq[Sequence], a_pass: Pass, outcomes: Seq[SegmentResult]
    ) -> list[SequenceUpdate]:
        """Advance sequences by their segments of the target's pass, and end those that are through.

        Sequences that were aborted while the step ran are passed over.
        """
        updates = []
        num_steps = a_pass.num_steps
        self._has_forks = self._waiting.has_forks
        for sequence, segment, outcome in zip(sequences, a_pass.segments, outcomes, strict=True):
            sequence.num_in_flight -= 1
            if sequence.status is not _FINISHED:
                updates.append(self._apply(sequence, segment, outcome, num_steps))
        self._policy.charge_outputs(updates)
        return updates

    def _apply(
        self, sequence: Sequence, segment: Segment, outcome: SegmentResult, num_steps: int
    ) -> SequenceUpdate:
        """Advance a sequence by its part of a step, if it was not in vain, and end it if due.

        There may be hundreds in a step: what does not concern a plain decode is not looked at.
        """
        stop, num_drafts, outputs = segment.stop, segment.num_drafts, segment.outputs
        known_ids, tokens = sequence.token_ids, outcome.token_ids
        num_known = len(known_ids)
        end: _End | None = None
        runs = sequence.status is _RUNNING  # it was not preempted in the meantime
        if num_drafts:
            if runs and self._speculation.is_void(sequence, segment):
                return self._drop(sequence, segment, outcome)
            stop -= num_drafts
        if num_known < stop:  # a replay before it came short
            return self._drop(sequence, segment, outcome)
        masked = outputs.masked  # then it runs: none is preempted while a mask is in flight
        fits = num_known + len(tokens) < sequence.max_length
        if fits and not masked and sequence.stop_token_ids.isdisjoint(tokens):
            known_ids.extend(tokens)
        else:
            tokens, end = self._append_until_end(sequence, tokens, masked=masked)
        if self._has_forks and stop >= sequence.num_prompt_tokens:
            self._start_forks(sequence, holds_prompt=runs)
        if runs:
            num_computed = stop
            if num_drafts:
                sequence.kv.trim(len(known_ids))
                num_computed = min(stop + len(outcome.accepted), len(known_ids))
            elif num_steps > 1:
                num_computed = min(stop + max(0, len(outcome.token_ids) - 1), len(known_ids))
            accepted = num_computed - stop if num_drafts else 0
            sequence.kv.advance(num_computed, known_ids, num_accepted=accepted)
            if not sequence.num_in_flight:
                sequence.settle()
            if outputs.sample:
                if len(tokens) < num_steps:  # what plans in flight bring, and yield, is void
                    sequence.kv.send_again()
                    sequence.promise_nothing()
                if masked or self._speculation.drafter is not None:
                    self._speculation.verified(sequence, segment, outcome, tokens)
        if end is None and not tokens:
            end = _end_without_token(sequence, segment)
        if end is not None:
            self._lifecycle.finish(sequence, *end)
        # To call the class takes twice as long.
        return tuple.__new__(SequenceUpdate, (sequence, segment.start, tokens, outcome))

    def _append_until_end(
        self, sequence: Sequence, tokens: tuple[int, ...], *, masked: bool
    ) -> tuple[tuple[int, ...], _End | None]:
        """Take the tokens up to one that ends the output; returns those, and why it ends."""
        known = sequence.token_ids
        for count, token in enumerate(tokens, start=1):
            known.append(token)
            is_whole = masked and self._speculation.advance(sequence, token)
            is_full = len(known) >= sequence.max_length
            if is_whole or is_full or token in sequence.stop_token_ids:
                return tokens[:count], _reason(sequence, token, is_whole=is_whole)
        return tokens, None

    def _drop(self, sequence: Sequence, segment: Segment, outcome: SegmentResult) -> SequenceUpdate:
        """The segment was void; the sequence goes on from what it has, once that is known."""
        if segment.num_drafts:
            sequence.kv.trim(len(sequence.token_ids))
        if sequence.num_in_flight:
            sequence.promise_nothing()
        else:
            sequence.settle()
            sequence.kv.send_again()
        return SequenceUpdate(sequence, segment.start, (), outcome)

    def _start_forks(self, parent: Sequence, *, holds_prompt: bool) -> None:
        """Queue the other samples, as if all but the last prompt token were computed for them.

        They start from nothing if the parent has lost its blocks since it was computed, or chose
        among the prompt's KV.
        """
        for child in self._waiting.release_forks(parent.request):
            if holds_prompt and parent.kv.selection is None:
                child.kv.fork(parent.kv, parent.num_prompt_tokens - 1)
            self._waiting.push(child)


def _end_without_token(sequence: Sequence, segment: Segment) -> _End | None:
    """Why a sequence ends that got no token: none was possible, or none was wanted."""
    if segment.outputs.sample:
        return FinishReason.ERROR, None
    if segment.stop == sequence.num_prompt_tokens and not sequence.request.generates:
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
