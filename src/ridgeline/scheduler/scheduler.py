"""First come, first served continuous batching under a token budget."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from ridgeline.core.errors import ContextLengthError
from ridgeline.core.plan import Admission, BlockCopy, ModelRole, Outputs, Segment, StepPlan
from ridgeline.core.request import FinishReason, Request
from ridgeline.core.result import SegmentResult, StepResult
from ridgeline.kvcache import PrefixCache
from ridgeline.scheduler.blocks import BlockTables
from ridgeline.scheduler.sequence import Sequence, SequenceStatus, SequenceUpdate
from ridgeline.scheduler.speculation import Speculation


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits: sequences at once, tokens in a step, tokens of a sequence, blocks per KV group.

    ``windows[g]`` is the attention window of group g in tokens, ``None`` without one.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: tuple[int, ...]
    windows: tuple[int | None, ...]
    block_tokens: int


class Scheduler:
    """Owns every sequence and every block; one plan is in flight at a time.

    `schedule` gives running sequences their next tokens first, in order of arrival, then admits
    waiting ones, as far as the token budget and the blocks go. When blocks run out, the latest
    arrival loses its own and is computed again later. Drafts take what budget and blocks are left.
    """

    def __init__(self, config: SchedulerConfig, speculation: Speculation | None = None) -> None:
        self.config = config
        self.speculation = speculation or Speculation()
        self.prefix_cache = PrefixCache(config.num_blocks, config.windows, config.block_tokens)
        self._blocks = BlockTables(self.prefix_cache)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._forks: dict[int, list[Sequence]] = {}  # by request, until the prompt is computed
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._releases: list[int] = []
        self._in_flight: dict[int, Sequence] = {}
        self._step_id = 0
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + sum(map(len, self._forks.values()))

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> list[Sequence]:
        """Queue a request; returns its n sequences.

        Raises:
            ContextLengthError: the prompt leaves no room for a token of output.
        """
        num_prompt, limit = len(request.prompt_token_ids), self.config.max_model_len
        if num_prompt + (1 if request.generates else 0) > limit:
            raise ContextLengthError(
                f"The prompt has {num_prompt} tokens and the context holds {limit}, "
                "output included."
            )
        sequences = [
            Sequence(
                request=request,
                sample_index=index,
                token_ids=list(request.prompt_token_ids),
                tables=[[] for _ in range(self._blocks.num_groups)],
                num_sent=[0] * self._blocks.num_groups,
                num_given_up=[0] * self._blocks.num_groups,
            )
            for index in range(request.params.n)
        ]
        self._waiting.append(sequences[0])
        if len(sequences) > 1:
            self._forks[request.request_id] = sequences[1:]
        return sequences

    def schedule(self) -> StepPlan | None:
        """The next step, or ``None`` if there is nothing to compute."""
        assert not self._in_flight, "the step before has not been reported"
        segments: list[Segment] = []
        copies: list[BlockCopy] = []
        admissions: list[Admission] = []
        budget = self.config.max_num_batched_tokens
        self.speculation.begin_step(self._running)
        for sequence in list(self._running):
            if budget and sequence.status is SequenceStatus.RUNNING:
                budget -= self._plan_segment(sequence, budget, segments, copies)
        while budget and self._waiting and self._free_slots:
            sequence = self._waiting[0]
            self._blocks.reuse_prefix(sequence)
            if not self._blocks.can_hold(sequence, self.config.max_num_batched_tokens):
                # Alone it fits always; then others that wait may hold what it needs.
                if self._running or not self._drop_waiting_blocks(but=sequence):
                    break
                continue
            self._waiting.popleft()
            admissions.append(self._admit(sequence))
            budget -= self._plan_segment(sequence, budget, segments, copies)
        passes = self.speculation.passes(segments)
        if not passes:
            assert not self.has_work, "work is left but nothing can run"
            return None
        self._step_id += 1
        releases, self._releases = tuple(self._releases), []
        return StepPlan(
            step_id=self._step_id,
            passes=passes,
            admissions=tuple(admissions),
            releases=releases,
            copies=tuple(copies),
        )

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceUpdate]:
        """Advance by what the step computed; finished sequences give up their blocks."""
        assert plan.step_id == result.step_id == self._step_id
        updates: list[SequenceUpdate] = []
        self.speculation.note_drafts(plan, result)
        in_flight, self._in_flight = self._in_flight, {}
        if plan.passes[-1].role is not ModelRole.TARGET:
            return updates
        for segment, outcome in zip(plan.passes[-1].segments, result.passes[-1], strict=True):
            sequence = in_flight[segment.slot]
            if not sequence.is_finished:  # it was aborted while the step ran
                updates.append(self._advance(sequence, segment, outcome))
        return updates

    def finish(
        self, sequence: Sequence, reason: FinishReason, stop_reason: int | None = None
    ) -> None:
        """End a sequence in any state; a sequence that has ended already is left as it is.

        Samples that wait for this one's prompt to be computed end with it.
        """
        if sequence.is_finished:
            return
        forks = self._forks.get(sequence.request.request_id, [])
        if sequence in forks:
            forks.remove(sequence)
        else:
            if sequence.status is SequenceStatus.RUNNING:
                self._leave(sequence)
            else:
                self._waiting.remove(sequence)
            for fork in list(forks):
                self.finish(fork, reason)
            self._forks.pop(sequence.request.request_id, None)
        self._blocks.release(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason

    def check_integrity(self) -> None:
        """Assert that every block and every slot is accounted for."""
        self._blocks.check_integrity(self._all())
        self.speculation.check_integrity()
        slots = [s.slot for s in self._running if s.slot is not None]
        assert sorted([*slots, *self._free_slots]) == list(range(self.config.max_num_seqs))

    def _all(self) -> Iterable[Sequence]:
        yield from self._running
        yield from self._waiting
        for forks in self._forks.values():
            yield from forks

    def _admit(self, sequence: Sequence) -> Admission:
        request = sequence.request
        self._blocks.count_hit(sequence)
        sequence.slot = self._free_slots.pop()
        sequence.status = SequenceStatus.RUNNING
        self._running.append(sequence)
        self.speculation.start(sequence)
        return Admission(
            slot=sequence.slot,
            token_ids=tuple(sequence.token_ids),
            num_prompt_tokens=sequence.num_prompt_tokens,
            params=request.params,
            seed=request.seed,
            sample_index=sequence.sample_index,
            eos_token_ids=request.eos_token_ids,
            adapter=request.adapter,
        )

    def _plan_segment(
        self,
        sequence: Sequence,
        budget: int,
        segments: list[Segment],
        copies: list[BlockCopy],
    ) -> int:
        """Add the sequence's next segment if blocks allow; returns the tokens taken."""
        start = sequence.num_computed
        stop = min(len(sequence.token_ids), start + budget)
        while not self._fits(sequence, budget):
            if not self._make_room(sequence):
                return 0
        request, slot = sequence.request, sequence.slot
        assert slot is not None
        self._in_flight[slot] = sequence
        reports_prompt = start < sequence.num_prompt_tokens and sequence.sample_index == 0
        samples = stop == len(sequence.token_ids) and request.generates
        drafts: tuple[int, ...] | None = ()
        reports_logprobs = reports_prompt and request.params.prompt_logprobs is not None
        if samples and not reports_logprobs:
            drafts = self.speculation.propose(sequence, self._room_for_drafts(sequence, budget))
        if drafts is None:
            return 0
        token_ids = (*sequence.token_ids[start:stop], *drafts)
        stop += len(drafts)
        updates, new_copies = self._blocks.prepare_write(sequence, start, stop)
        copies.extend(new_copies)
        segments.append(
            Segment(
                slot=slot,
                start=start,
                stop=stop,
                token_ids=token_ids,
                num_drafts=len(drafts),
                block_updates=updates,
                outputs=Outputs(
                    sample=samples,
                    masked=samples and self.speculation.is_masked(sequence),
                    prompt_logprobs=reports_logprobs,
                    logits=reports_prompt and request.wants_logits,
                    pooled=stop == len(sequence.token_ids) and request.wants_pooled,
                ),
            )
        )
        return stop - start

    def _room_for_drafts(self, sequence: Sequence, budget: int) -> int:
        """Drafts that the context, the limit of output, the budget and the free blocks allow.

        Each yields a token, and one more follows. One token is left for each sequence whose turn
        comes later in this step.
        """
        start, length = sequence.num_computed, len(sequence.token_ids)
        limits = [
            self.config.max_model_len - length - 1,
            budget - (length - start) - (len(self._running) - len(self._in_flight)),
        ]
        if sequence.request.params.max_tokens is not None:
            limits.append(sequence.request.params.max_tokens - sequence.num_output_tokens - 1)
        room = self.speculation.room(sequence, max(0, min(limits)))
        while room and not self._blocks.can_write(sequence, start, length + room):
            room -= 1
        return room

    def _make_room(self, sequence: Sequence) -> bool:
        """Free some blocks for ``sequence``; False if its own had to go.

        First those that waiting sequences hold, then those of the latest arrival that is not in
        this step yet.
        """
        if self._drop_waiting_blocks():
            return True
        victims = [s for s in self._running if s.slot not in self._in_flight]
        if victims and victims[-1] is not sequence:
            self._preempt(victims[-1])
            return True
        self._preempt(sequence)
        return False

    def _drop_waiting_blocks(self, *, but: Sequence | None = None) -> bool:
        """Take the blocks of the last waiting sequence that holds some: a fork, or a hit."""
        for sequence in reversed(self._waiting):
            if sequence is not but and any(sequence.tables):
                self._blocks.release(sequence)
                sequence.num_computed = 0
                return True
        return False

    def _fits(self, sequence: Sequence, budget: int) -> bool:
        """Whether blocks are free for what ``budget`` tokens would compute of a sequence."""
        start = sequence.num_computed
        stop = min(len(sequence.token_ids), start + budget)
        return self._blocks.can_write(sequence, start, stop)

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self._blocks.release(sequence)
        sequence.num_computed = 0
        sequence.status = SequenceStatus.WAITING
        self._waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _leave(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self._running.remove(sequence)
        self.speculation.finish(sequence)
        self._free_slots.append(sequence.slot)
        self._releases.append(sequence.slot)
        sequence.slot = None

    def _advance(
        self, sequence: Sequence, segment: Segment, outcome: SegmentResult
    ) -> SequenceUpdate:
        if segment.num_drafts and self.speculation.is_void(sequence, segment):
            self._blocks.trim(sequence)
            return SequenceUpdate(
                sequence=sequence, start=segment.start, new_token_ids=(), result=outcome
            )
        known = segment.stop - segment.num_drafts
        accepted: list[int] = []
        end: tuple[FinishReason, int | None] | None = None
        for token in outcome.token_ids:
            accepted.append(token)
            sequence.token_ids.append(token)
            end = self._end(sequence, token)
            if end is not None:
                break
        sequence.num_computed = min(known + len(outcome.accepted), len(sequence.token_ids))
        if known >= sequence.num_prompt_tokens:
            self._start_forks(sequence)
        if segment.num_drafts:
            self._blocks.trim(sequence)
        self._blocks.note_computed(sequence)
        if segment.outputs.sample:
            self.speculation.verified(sequence, segment, outcome, accepted)
        if end is not None:
            self.finish(sequence, *end)
        if segment.outputs.sample and not outcome.token_ids:
            self.finish(sequence, FinishReason.ERROR)
        if not sequence.request.generates and segment.stop == sequence.num_prompt_tokens:
            self.finish(sequence, FinishReason.LENGTH)
        return SequenceUpdate(
            sequence=sequence,
            start=segment.start,
            new_token_ids=tuple(accepted),
            result=outcome,
        )

    def _end(self, sequence: Sequence, token: int) -> tuple[FinishReason, int | None] | None:
        """Why the output ends with this token, its last, if it does."""
        request, params = sequence.request, sequence.request.params
        is_whole = self.speculation.advance(sequence, token)
        if token in request.eos_token_ids:
            return FinishReason.STOP, None
        if token in params.stop_token_ids:
            return FinishReason.STOP, token
        if is_whole:
            return FinishReason.STOP, None
        if (
            len(sequence.token_ids) >= self.config.max_model_len
            or sequence.num_output_tokens == params.max_tokens
        ):
            return FinishReason.LENGTH, None
        return None

    def _start_forks(self, parent: Sequence) -> None:
        """Queue the other samples, as if all but the last prompt token were computed for them."""
        for child in reversed(self._forks.pop(parent.request.request_id, [])):
            child.num_computed = parent.num_prompt_tokens - 1
            self._blocks.fork(parent, child, child.num_computed)
            self._waiting.appendleft(child)
