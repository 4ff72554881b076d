"""What a step computes: decodes first, then prompts; drafts and replays in what is left."""

from ridgeline.core.kv_reuse import KVReuse
from ridgeline.core.plan import (
    BlockTableUpdate,
    Outputs,
    Segment,
    StateSave,
    step_in_flight,
)
from ridgeline.core.protocols import Draft
from ridgeline.core.rounding import ceil_div
from ridgeline.kvcache import KVCacheManager
from ridgeline.scheduler.config import SchedulerConfig
from ridgeline.scheduler.lifecycle import Lifecycle
from ridgeline.scheduler.prediction import CorrectedPredictor, StepBudget
from ridgeline.scheduler.replay import Replay
from ridgeline.scheduler.sequence import Sequence, SequenceStatus
from ridgeline.scheduler.speculation import Speculation
from ridgeline.scheduler.step import SAMPLE, Step

_NOTHING, _NO_DRAFT = Outputs(), Draft()


class Planner:
    """Divides a step's budget between the sequences that run and those that may enter.

    It has ``lifecycle`` admit sequences, and preempt others when blocks run out.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        lifecycle: Lifecycle,
        predictor: CorrectedPredictor,
        speculation: Speculation,
        replay: Replay,
    ) -> None:
        self._config = config
        self._kv = kv
        self._lifecycle = lifecycle
        self._predictor = predictor
        self._speculation = speculation
        self._replay = replay

    def plan(self, step_id: int, now_s: float) -> tuple[Step, int]:
        """The next step, and how often it is to be repeated; it has no segments if none can run."""
        config = self._config
        budget = StepBudget(
            config.max_num_batched_tokens, seconds=config.tpot_slo_s, predictor=self._predictor
        )
        self._speculation.begin_step(self._lifecycle.running)
        step = Step(step_id, budget, self._speculation.asks_drafter)
        prompts = self._plan_decodes(step)
        if not step.segments:
            step.budget.unbounded()
        self._plan_prompts(step, prompts, now_s)
        return step, self._replay_steps(step)

    def _plan_decodes(self, step: Step) -> list[Sequence]:
        """Plan the sequences that lack one token's KV; returns those that lack more."""
        prompts, decodes = [], []
        for sequence in self._lifecycle.running:
            gap = sequence.num_known - sequence.num_planned
            if gap > 1:
                prompts.append(sequence)
            elif gap == 1:
                decodes.append(sequence)
        if self._config.num_stages > 1:
            decodes = self._share_of_stage(decodes, step.step_id, is_alone=not prompts)
        budget = step.budget
        for sequence in decodes:
            if budget.tokens and sequence.slot is not None:  # not preempted for one before it
                self._plan_segment(sequence, 1, step)
        return prompts

    def _share_of_stage(
        self, decodes: list[Sequence], step_id: int, *, is_alone: bool
    ) -> list[Sequence]:
        """What a step decodes of a pipeline, whose stages compute several at once: its share of the
        sequences, none that a step has which may still be in one of the stages.

        Where there are none but those, a step that is to do nothing else waits for their tokens in
        the first stage.
        """
        num_stages = self._config.num_stages
        free = [
            sequence
            for sequence in decodes
            if not sequence.num_in_flight or sequence.promised_step <= step_id - num_stages
        ]
        if not free and is_alone:
            free = decodes
        return free[: ceil_div(len(decodes), num_stages)]

    def _plan_prompts(self, step: Step, prompts: list[Sequence], now_s: float) -> None:
        """Give what is left of the budget to prompts, whether they run or wait, by policy."""
        waiting = self._lifecycle.waiting
        rank = waiting.rank
        prompts.sort(key=rank, reverse=True)
        head = waiting.head(now_s)
        while step.budget.tokens > 0 and (prompts or head is not None):
            if prompts and (head is None or rank(prompts[-1]) < rank(head)):
                self._plan_prompt(prompts.pop(), step)
                continue
            assert head is not None
            num_computed = head.kv.num_computed
            gap = len(head.token_ids) - num_computed
            if not self._lifecycle.make_room_at_head(head) or not self._grant(
                gap, num_computed, step
            ):
                head = None
                continue
            if not waiting.start_load(head):
                step.admissions.append(self._lifecycle.admit(head, now_s))
                self._plan_prompt(head, step)
            head = waiting.head(now_s)

    def _plan_prompt(self, sequence: Sequence, step: Step) -> None:
        if sequence.status is not SequenceStatus.RUNNING or sequence in step.busy:
            return  # preempted for another, and perhaps admitted again
        start, documents = sequence.num_planned, sequence.kv.documents
        if documents is not None:
            start, _ = documents.taken(start)
        count = self._grant(sequence.num_known - start, start, step)
        if documents is not None:
            count = documents.clip(start, start + count) - start
        if sequence.kv.selection is not None:
            count = sequence.kv.selection.clipped(start, start + count) - start
        if count:
            self._plan_segment(sequence, count, step)

    def _grant(self, wanted: int, start: int, step: Step) -> int:
        """How many of a prompt's tokens the step takes; where there is no KV to go on from, all of
        them or none, and a prompt that is longer than a step may be has one for itself."""
        count = step.budget.grant(wanted, start)
        if self._config.num_blocks or count == wanted:
            return count
        return 0 if step.segments else wanted

    def _plan_segment(self, sequence: Sequence, count: int, step: Step) -> None:
        """Add the sequence's next ``count`` tokens, or as many of them as blocks allow.

        There may be hundreds in a step: what does not concern a plain decode is not looked at.
        """
        kv, known, first = sequence.kv, sequence.token_ids, sequence.num_planned
        start = first
        reuses: tuple[KVReuse, ...] = ()
        if kv.documents is not None:
            start, reuses = kv.documents.taken(first)
        stop = start + count
        if stop > kv.num_writable:
            stop = self._make_room(sequence, first, stop, step)
            if stop == first:
                return
        step.busy.add(sequence)
        outputs, draft = SAMPLE if stop == sequence.num_known else _NOTHING, _NO_DRAFT
        if step.asks_drafter or not sequence.is_plain:
            wanted = self._wanted(sequence, start, stop, step)
            if wanted is None:
                return
            outputs, draft = wanted
        if count > 1:
            token_ids = tuple(known[start:stop])
        elif start < len(known):
            token_ids = (known[start],)
        else:
            age = step.step_id - sequence.promised_step
            token_ids = (step_in_flight(sequence.promised_output, age),)
        drafts, end = draft.token_ids, stop
        if drafts:
            token_ids, end = token_ids + drafts, stop + len(drafts)
        updates: tuple[BlockTableUpdate, ...] = ()
        saves: tuple[StateSave, ...] = ()
        if end > kv.num_writable:
            updates, copies, saves = kv.prepare_write(
                first, end, reserve=len(known), num_drafts=len(drafts)
            )
            step.copies += copies
        assert sequence.slot is not None
        window, chosen = kv.seen, None
        if (selection := kv.selection) is not None:
            window = selection.seen(start)
            chosen = selection if end == selection.stop else None
        segment = tuple.__new__(Segment, (  # to call the class takes twice as long
            sequence.slot, start, end, token_ids, len(drafts), draft.parents, updates, outputs,
            saves, window, chosen, reuses, kv.state_lag and kv.lag_at(first),
        ))  # fmt: skip
        may_continue = not drafts and not outputs.masked and stop + 1 < sequence.max_length
        step.add(sequence, segment, outputs.sample, may_continue)

    def _wanted(
        self, sequence: Sequence, start: int, stop: int, step: Step
    ) -> tuple[Outputs, Draft] | None:
        """What is wanted of positions ``[start, stop)``, and drafts to verify after them.

        ``None`` if the target is to do nothing this time.
        """
        samples = stop == sequence.num_known and sequence.request.generates
        outputs = self._outputs(sequence, start, stop, SAMPLE if samples else _NOTHING)
        speculates = outputs.masked or step.asks_drafter
        if not (samples and speculates) or outputs.prompt_logprobs:
            return outputs, _NO_DRAFT
        draft = self._draft(sequence, step)
        return None if draft is None else (outputs, draft)

    def _make_room(self, sequence: Sequence, start: int, stop: int, step: Step) -> int:
        """How far up to ``stop`` there are blocks, if need be once others gave up theirs."""
        kv = sequence.kv
        if stop > start + 1 and kv.has_windows:
            running = [each.kv for each in self._lifecycle.running]
            stop = kv.clip_to_windows(start, stop, len(sequence.token_ids), running)
            if stop == start:
                assert sequence.num_in_flight, "a sequence has blocks for its window and more"
        while not kv.can_write(start, stop):
            if not self._lifecycle.free_blocks_for(sequence, step.busy):
                return start
        return stop

    def _outputs(self, sequence: Sequence, start: int, stop: int, plain: Outputs) -> Outputs:
        """What is wanted of positions ``[start, stop)``, where ``plain`` would be of most."""
        request = sequence.request
        reports_prompt = start < sequence.num_prompt_tokens and sequence.sample_index == 0
        reports_logprobs = reports_prompt and request.params.prompt_logprobs is not None
        masked = plain.sample and self._speculation.is_masked(sequence)
        candidates = self._speculation.num_candidates if plain.sample else 0
        drawn = plain.sample and self._speculation.wants_drawn
        if request.generates and not (masked or reports_logprobs or candidates or drawn):
            return plain
        return Outputs(
            sample=plain.sample,
            masked=masked,
            prompt_logprobs=reports_logprobs,
            logits=reports_prompt and request.wants_logits,
            pooled=request.pooling if stop == sequence.num_known else None,
            candidates=candidates,
            drawn=drawn,
        )

    def _draft(self, sequence: Sequence, step: Step) -> Draft | None:
        """Drafts that the context, the limit of output, the budget and the free blocks allow.

        Each may yield a token, and one more follows. One token is left for each sequence whose turn
        comes later in this step. ``None`` if the target is to do nothing this time.
        """
        start, length = sequence.num_planned, len(sequence.token_ids)
        num_later = len(self._lifecycle.running) - len(step.busy)
        left = step.budget.tokens - (length - start) - num_later
        most = max(0, min(sequence.max_length - length - 1, left))
        most = most if sequence.kv.takes_drafts else 0
        room = self._speculation.room(sequence, most)
        while room and not sequence.kv.can_write(start, length + room):
            room -= 1
        return self._speculation.propose(sequence, room, step.copies)

    def _replay_steps(self, step: Step) -> int:
        """How often to repeat a step in which all who run decode, and nobody can join them."""
        num_steps = self._replay.num_steps
        if (
            num_steps < 2
            or step.admissions
            or step.asks_drafter
            or not 0 < len(step.segments) == len(self._lifecycle.running)
            or (len(self._lifecycle.waiting) > 0 and not self._seats_stay_taken(step))
        ):
            return 1
        num_steps = step.repeat(num_steps, self._kv)
        self._speculation.rest(num_steps - 1)
        return num_steps

    def _seats_stay_taken(self, step: Step) -> bool:
        """Whether every sequence that may run does, and none ends before its length."""
        is_full = len(step.sequences) >= self._config.max_num_seqs
        return is_full and not any(sequence.may_end_early for sequence in step.sequences)
