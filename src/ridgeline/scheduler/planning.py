"""What a step computes: decodes first, then prompts; drafts and replays in what is left."""

from collections.abc import Callable, Mapping

from ridgeline.core.plan import Admission, Outputs, Segment
from ridgeline.scheduler.blocks import BlockTables
from ridgeline.scheduler.config import SchedulerConfig
from ridgeline.scheduler.pricing import Pricing, StepBudget
from ridgeline.scheduler.replay import Replay, extend
from ridgeline.scheduler.sequence import Sequence, SequenceStatus
from ridgeline.scheduler.speculation import Speculation
from ridgeline.scheduler.step import SAMPLE, Step
from ridgeline.scheduler.waiting import Waiting

_NOTHING = Outputs()


class Planner:
    """Divides a step's budget between the sequences that run and those that may enter.

    ``running`` is the scheduler's, and changes as ``admit`` and ``free_blocks_for`` are called:
    admission and preemption are the scheduler's part.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockTables,
        pricing: Pricing,
        speculation: Speculation,
        replay: Replay,
        *,
        running: Mapping[Sequence, None],
        waiting: Waiting,
        may_enter: Callable[[Sequence], bool],
        admit: Callable[[Sequence, float], Admission],
        free_blocks_for: Callable[[Sequence, Step], bool],
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._pricing = pricing
        self._speculation = speculation
        self._replay = replay
        self._running = running
        self._waiting = waiting
        self._may_enter = may_enter
        self._admit = admit
        self._free_blocks_for = free_blocks_for

    def plan(self, now_s: float) -> tuple[Step, int]:
        """The next step, and how often it is to be repeated; it has no segments if none can run."""
        step = self._new_step()
        self._speculation.begin_step(self._running)
        prompts = self._plan_decodes(step)
        if not step.segments:
            step.budget.unbounded()
        self._plan_prompts(step, prompts, now_s)
        return step, self._replay_steps(step)

    def _new_step(self) -> Step:
        budget = StepBudget(
            self._config.max_num_batched_tokens,
            seconds=self._config.tpot_slo_s,
            pricing=self._pricing,
        )
        return Step(budget)

    def _plan_decodes(self, step: Step) -> list[Sequence]:
        """Plan the sequences that lack one token's KV; returns those that lack more."""
        prompts = []
        is_plain = not self._speculation.asks_drafter
        for sequence in tuple(self._running):
            num_known = _num_known(sequence)
            gap = num_known - sequence.num_planned
            if gap > 1:
                prompts.append(sequence)
            if gap != 1 or not step.budget.tokens:
                continue
            if is_plain and sequence.is_plain and num_known <= sequence.num_writable:
                step.add_decode(sequence, num_known)
            elif sequence.status is SequenceStatus.RUNNING:  # not preempted for one before it
                self._plan_segment(sequence, 1, step)
        return prompts

    def _plan_prompts(self, step: Step, prompts: list[Sequence], now_s: float) -> None:
        """Give what is left of the budget to prompts, whether they run or wait, by policy."""
        rank = self._waiting.rank
        prompts.sort(key=rank, reverse=True)
        head = self._waiting.head(now_s)
        while step.budget.tokens and (prompts or head is not None):
            if prompts and (head is None or rank(prompts[-1]) < rank(head)):
                self._plan_prompt(prompts.pop(), step)
                continue
            assert head is not None
            gap = len(head.token_ids) - head.num_computed
            if not self._may_enter(head) or not step.budget.grant(gap, head.num_computed):
                head = None
                continue
            if not self._waiting.start_load(head):
                step.admissions.append(self._admit(head, now_s))
                self._plan_prompt(head, step)
            head = self._waiting.head(now_s)

    def _plan_prompt(self, sequence: Sequence, step: Step) -> None:
        if sequence.status is not SequenceStatus.RUNNING or sequence in step.busy:
            return  # preempted for another, and perhaps admitted again
        start = sequence.num_planned
        count = step.budget.grant(_num_known(sequence) - start, start)
        if count:
            self._plan_segment(sequence, count, step)

    def _plan_segment(self, sequence: Sequence, count: int, step: Step) -> None:
        """Add the sequence's next ``count`` tokens, or as many of them as blocks allow."""
        start = sequence.num_planned
        stop = start + count
        if count > 1:
            stop = self._blocks.clip_to_windows(sequence, start, stop, self._running)
            if stop == start:
                assert sequence.num_in_flight, "a sequence has blocks for its window and more"
                return
        while not self._blocks.can_write(sequence, start, stop):
            if not self._free_blocks_for(sequence, step):
                return
        step.busy.add(sequence)
        request, num_known = sequence.request, _num_known(sequence)
        reports_prompt = start < sequence.num_prompt_tokens and sequence.sample_index == 0
        reports_logprobs = reports_prompt and request.params.prompt_logprobs is not None
        is_last = stop == num_known
        samples = is_last and request.generates
        masked = samples and self._speculation.is_masked(sequence)
        drafts: tuple[int, ...] | None = ()
        speculates = masked or self._speculation.asks_drafter
        if samples and speculates and not reports_logprobs:
            drafts = self._speculation.propose(sequence, self._room_for_drafts(sequence, step))
        if drafts is None:
            return
        token_ids = tuple(sequence.token_ids[start:stop])
        if len(token_ids) < stop - start:
            assert sequence.reference is not None
            token_ids += (sequence.reference,)
        updates, copies = self._blocks.prepare_write(
            sequence, start, stop + len(drafts), reserve=len(sequence.token_ids)
        )
        step.copies += copies
        if masked or reports_logprobs or not request.generates:
            outputs = Outputs(
                sample=samples,
                masked=masked,
                prompt_logprobs=reports_logprobs,
                logits=reports_prompt and request.wants_logits,
                pooled=is_last and request.wants_pooled,
            )
        else:
            outputs = SAMPLE if samples else _NOTHING
        assert sequence.slot is not None
        segment = Segment(
            slot=sequence.slot,
            start=start,
            stop=stop + len(drafts),
            token_ids=token_ids + drafts,
            num_drafts=len(drafts),
            block_updates=updates,
            outputs=outputs,
        )
        may_continue = samples and not masked and not drafts and num_known + 1 < sequence.max_length
        step.add(sequence, segment, may_continue=may_continue)

    def _room_for_drafts(self, sequence: Sequence, step: Step) -> int:
        """Drafts that the context, the limit of output, the budget and the free blocks allow.

        Each yields a token, and one more follows. One token is left for each sequence whose turn
        comes later in this step.
        """
        start, length = sequence.num_planned, len(sequence.token_ids)
        left = step.budget.tokens - (length - start) - (len(self._running) - len(step.busy))
        most = max(0, min(sequence.max_length - length - 1, left))
        room = self._speculation.room(sequence, most)
        while room and not self._blocks.can_write(sequence, start, length + room):
            room -= 1
        return room

    def _replay_steps(self, step: Step) -> int:
        """How often to repeat a step in which all who run decode, and nobody can join them."""
        num_steps = self._replay.num_steps
        if (
            num_steps < 2
            or step.admissions
            or self._speculation.asks_drafter
            or not 0 < len(step.segments) == len(self._running)
            or (len(self._waiting) > 0 and not self._seats_stay_taken(step))
        ):
            return 1
        num_steps = extend(step, self._blocks, num_steps)
        self._speculation.rest(num_steps - 1)
        return num_steps

    def _seats_stay_taken(self, step: Step) -> bool:
        """Whether every sequence that may run does, and none ends before its length."""
        is_full = len(step.sequences) >= self._config.max_num_seqs
        return is_full and not any(sequence.may_end_early for sequence in step.sequences)


def _num_known(sequence: Sequence) -> int:
    """Tokens known, and those that the plan in flight will tell."""
    if sequence.reference is None:
        return len(sequence.token_ids)
    return len(sequence.token_ids) + sequence.num_pending
