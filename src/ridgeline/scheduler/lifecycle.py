"""Where a sequence goes: from waiting to running to finished, and back when it is preempted."""

from collections.abc import Collection, Iterable

from ridgeline.core.plan import Admission
from ridgeline.core.request import FinishReason
from ridgeline.scheduler.config import SchedulerConfig
from ridgeline.scheduler.policies import QueuePolicy
from ridgeline.scheduler.prediction import CorrectedPredictor
from ridgeline.scheduler.sequence import Sequence, SequenceStatus
from ridgeline.scheduler.speculation import Speculation
from ridgeline.scheduler.waiting import Waiting


class Lifecycle:
    """Owns the slots, ``running`` and ``waiting``; nothing else moves a sequence between states.

    Whoever plans or applies results asks it to admit, to free blocks and to finish.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        policy: QueuePolicy,
        waiting: Waiting,
        speculation: Speculation,
        predictor: CorrectedPredictor,
    ) -> None:
        self._config = config
        self._policy = policy
        self.waiting = waiting
        self._speculation = speculation
        self._predictor = predictor
        self._running: dict[Sequence, None] = {}
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._releases: list[int] = []
        self.num_preemptions = 0

    @property
    def running(self) -> Collection[Sequence]:
        """In the order in which they were admitted."""
        return self._running.keys()

    def take_releases(self) -> tuple[int, ...]:
        """The slots that were left since the last call."""
        releases, self._releases = tuple(self._releases), []
        return releases

    def preempt_for_head(self, now_s: float) -> None:
        """Preempt running sequences for a waiting one that may take their place, if that helps."""
        while self._policy.preempts and (head := self.waiting.head(now_s)) is not None:
            if not self.waiting.may_join(head):
                return
            fits = self.waiting.take_prefix_and_fit(head)
            if fits and self._free_slots:
                return
            if not fits and self.waiting.drop_holder(but=head):
                continue
            lower = [each for each in self._running if self._policy.may_displace(head, each)]
            victim = self._last(lower)
            if victim is None or not self.waiting.would_fit(head, without=lower):
                return
            self._preempt(victim)

    def make_room_at_head(self, sequence: Sequence) -> bool:
        """Whether slot and blocks are there for the sequence at the head of the queue, once others
        that wait have given up blocks for it."""
        if not self._free_slots or not self.waiting.may_join(sequence):
            return False
        while not self.waiting.take_prefix_and_fit(sequence):
            # Others that wait may hold what it needs: those that were first in the queue before.
            # If nothing runs they do, or the tiers, since alone it fits always (`SchedulerConfig`).
            drop = self.waiting.drop_holder if self._running else self.waiting.drop_blocks
            if not drop(but=sequence):
                return False
        return True

    def admit(self, sequence: Sequence, now_s: float) -> Admission:
        """Give a sequence that may enter a slot."""
        request = sequence.request
        self.waiting.admitted(sequence, now_s)
        if not sequence.was_admitted:
            sequence.kv.count_hit(len(sequence.token_ids))
            self._policy.charge_input(sequence, sequence.num_to_compute)
            if request.params.n > 1:
                sequence.token_ids = list(sequence.token_ids)  # until now shared by the samples
        sequence.settle()
        sequence.slot = self._free_slots.pop()
        sequence.status = SequenceStatus.RUNNING
        self._running[sequence] = None
        self._speculation.start(sequence)
        return Admission(
            slot=sequence.slot,
            token_ids=tuple(sequence.token_ids),
            num_prompt_tokens=sequence.num_prompt_tokens,
            params=request.params,
            seed=request.seed,
            sample_index=request.first_sample + sequence.sample_index,
            eos_token_ids=request.eos_token_ids,
            adapter=request.adapter,
            rejection=self._config.verification == "rejection",
            second_start=request.second_start,
        )

    def free_blocks_for(self, sequence: Sequence, busy: Collection[Sequence]) -> bool:
        """Free some blocks for a running sequence; False if it has no part in this step.

        First those that waiting sequences hold, then those of the one that comes last among those
        that are not ``busy`` in this step. If that is the sequence itself, it loses its own, unless
        it is in flight: then it waits for its result, which may give blocks up.
        """
        if self.waiting.drop_blocks():
            return True
        victim = self._last(each for each in self._running if each not in busy)
        if victim is None or (victim is sequence and sequence.num_in_flight):
            return False
        self._preempt(victim)
        return victim is not sequence

    def finish(
        self, sequence: Sequence, reason: FinishReason, stop_reason: int | None = None
    ) -> None:
        """End a sequence that has not ended, in any state.

        Samples that wait for this one's prompt to be computed end with it.
        """
        if not self.waiting.drop_fork(sequence):
            if sequence.status is SequenceStatus.RUNNING:
                self._leave(sequence)
                if not sequence.request.is_document:
                    self._predictor.observe_output(sequence.num_output_tokens)
            else:
                for document in self.waiting.remove(sequence):
                    self.finish(document, reason)
            for fork in self.waiting.release_forks(sequence.request):
                fork.status, fork.finish_reason = SequenceStatus.FINISHED, reason
        sequence.kv.release()
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason

    def forget_kv(self, sequences: Iterable[Sequence]) -> None:
        """Have these compute all that they know again for their next tokens, and their samples."""
        for sequence in sequences:
            if sequence.status is SequenceStatus.RUNNING:
                self._start_anew(sequence)
        while self.waiting.drop_holder():
            pass

    def check_integrity(self) -> None:
        """Assert that every slot is accounted for, and what `Waiting` asserts."""
        slots = [s.slot for s in self._running if s.slot is not None]
        assert sorted([*slots, *self._free_slots]) == list(range(self._config.max_num_seqs))
        self.waiting.check_integrity()

    def _last(self, candidates: Iterable[Sequence]) -> Sequence | None:
        """Of those that may be preempted, the one to do it to.

        What a grammar makes of a token in flight has to be known first.
        """
        ready = (s for s in candidates if not (s.num_in_flight and self._speculation.is_masked(s)))
        return self.waiting.last_of(ready)

    def _preempt(self, sequence: Sequence) -> None:
        self._start_anew(sequence)
        self.num_preemptions += 1

    def _start_anew(self, sequence: Sequence) -> None:
        """Give up slot and blocks, and queue for them again."""
        self._leave(sequence)
        sequence.kv.release()
        sequence.may_load = True
        sequence.status = SequenceStatus.WAITING
        self.waiting.push(sequence)

    def _leave(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        del self._running[sequence]
        self._speculation.finish(sequence)
        self._free_slots.append(sequence.slot)
        self._releases.append(sequence.slot)
        sequence.slot = None
