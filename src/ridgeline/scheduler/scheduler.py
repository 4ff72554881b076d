"""Continuous batching under a token budget, in the order of a queue policy."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import replace

from ridgeline.core.errors import ContextLengthError
from ridgeline.core.plan import MAX_IN_FLIGHT, Admission, ModelRole, StepPlan
from ridgeline.core.protocols import Grammar, StepPrice
from ridgeline.core.request import FinishReason, Request
from ridgeline.core.result import SegmentResult, StepResult
from ridgeline.kvcache import KVUsage, MissReport, PrefixCache
from ridgeline.kvcache.tiers import Transfers
from ridgeline.scheduler.blocks import BlockTables
from ridgeline.scheduler.config import SchedulerConfig
from ridgeline.scheduler.outcomes import Outcomes
from ridgeline.scheduler.pins import PinnedPrefixes
from ridgeline.scheduler.planning import Planner
from ridgeline.scheduler.policies import create_policy
from ridgeline.scheduler.pricing import DEFAULT_PRICE, Pricing
from ridgeline.scheduler.replay import Replay
from ridgeline.scheduler.sequence import Sequence, SequenceStatus, SequenceUpdate
from ridgeline.scheduler.speculation import Speculation
from ridgeline.scheduler.step import PlanInFlight, Step
from ridgeline.scheduler.waiting import Waiting

_POLL_S = 5e-4  # between looks at transfers, when nothing else can be done


class Scheduler:
    """Owns every sequence and every block.

    `schedule` gives sequences that decode their next token first; then prompts go on, and waiting
    sequences are admitted, in the order of the policy, as far as the budget and the blocks go. When
    blocks run out, the sequence that the policy puts last loses its own and is computed again
    later. Drafts take what budget and blocks are left.

    Two plans may be in flight: `schedule` may be called before `update` has been told of the plan
    before, and builds on the assumption that each decode of that plan yields one token.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        speculation: Speculation | None = None,
        *,
        price: StepPrice = DEFAULT_PRICE,
        clock: Callable[[], float] = time.monotonic,
        transfers: Callable[[PrefixCache], Transfers] | None = None,
    ) -> None:
        self.config = config
        self.speculation = speculation or Speculation()
        self.prefix_cache = PrefixCache(
            config.num_blocks, config.windows, config.block_tokens, ttl_s=config.kv_ttl_s
        )
        self.transfers = None if transfers is None else transfers(self.prefix_cache)
        self._clock = clock
        self._pricing = Pricing(price)
        self._goes_by_price = (
            config.tpot_slo_s is not None
            or config.scheduling_policy == "edf"
            or self.transfers is not None
        )
        self._blocks = BlockTables(self.prefix_cache, self.transfers)
        self._policy = create_policy(config.scheduling_policy, config.tenant_weights)
        self._waiting = Waiting(config, self._policy, self._blocks, self._pricing, self.transfers)
        self._pins = PinnedPrefixes(config, self.prefix_cache, self._blocks)
        self._replay = Replay(config.replay_s, most_s=config.tpot_slo_s)
        self._running: dict[Sequence, None] = {}
        self._planner = Planner(
            config,
            self._blocks,
            self._pricing,
            self.speculation,
            self._replay,
            running=self._running,
            waiting=self._waiting,
            may_enter=self._may_enter,
            admit=self._admit,
            free_blocks_for=self._free_blocks_for,
        )
        self._outcomes = Outcomes(
            self._blocks, self._policy, self.speculation, self._waiting, self.finish
        )
        self._shed: list[Sequence] = []  # to be reported
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._releases: list[int] = []
        self._flights: deque[PlanInFlight] = deque()
        self._step_id = self._num_requests = 0
        self._updated_s = self._wait_s = 0.0
        self._had_running = False  # after the last update
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether as many sequences run as may."""
        return len(self._running) >= self.config.max_num_seqs

    @property
    def num_running(self) -> int:
        return len(self._running)

    def lengthened_replays(self, seconds: float) -> AbstractContextManager[None]:
        """Replay decode steps for ``seconds`` at a time while nobody reads tokens as they come."""
        return self._replay.lengthened(seconds)

    @property
    def has_work(self) -> bool:
        """Whether there is something to compute, or to be told by `take_shed`."""
        return bool(self._running) or len(self._waiting) > 0 or bool(self._shed)

    @property
    def num_loads(self) -> int:
        """Sequences that came back from the tiers, or found a prefix there."""
        return self._waiting.num_loads

    @property
    def wait_s(self) -> float:
        """After `schedule` gave ``None`` although there is work: seconds until it may give more."""
        return self._wait_s

    def add(self, request: Request, grammar: Grammar | None = None) -> list[Sequence]:
        """Queue a request; returns its n sequences, which share the list of the prompt's tokens.

        ``grammar`` is what `Speculation.prepare` made of the request.

        Raises:
            ContextLengthError: the prompt leaves no room for a token of output.
            InvalidRequestError: it has more samples than may wait.
            OverloadedError: the queue is full.
        """
        num_prompt, limit = len(request.prompt_token_ids), self.config.max_model_len
        if num_prompt + (1 if request.generates else 0) > limit:
            raise ContextLengthError(
                f"The prompt has {num_prompt} tokens and the context holds {limit}, "
                "output included."
            )
        self._shed_for(request)
        prompt = list(request.prompt_token_ids)
        sequences = [
            Sequence(
                request=request,
                sample_index=index,
                token_ids=prompt,
                tables=[[] for _ in range(self._blocks.num_groups)],
                num_sent=[0] * self._blocks.num_groups,
                num_given_up=[0] * self._blocks.num_groups,
                max_length=limit,
                grammar=grammar,
                order=self._num_requests,
            )
            for index in range(request.params.n)
        ]
        self._wait_s = 0.0
        self._num_requests += 1
        self._waiting.push(sequences[0])
        self._waiting.hold_forks(sequences[1:])
        return sequences

    def schedule(self) -> StepPlan | None:
        """The next step, or ``None`` if nothing can be computed now (see `wait_s`)."""
        assert len(self._flights) < MAX_IN_FLIGHT, "the step before the last has not been reported"
        if self._flights and (self.speculation.needs_results or not self.config.reuse_kv):
            return None  # a drafter goes by the tokens that are still to come
        now_s = self._clock()
        self._tick(now_s)
        self._wait_s = self._waiting.open_batch(len(self._running), now_s)
        self._preempt_for_head(now_s)
        step, num_steps = self._planner.plan(now_s)
        passes = self.speculation.passes(step.segments)
        if num_steps > 1:
            passes = (replace(passes[0], num_steps=num_steps),)
        if not passes:
            assert not step.admissions, "a sequence was admitted for nothing"
            if self.transfers is not None and self.transfers.is_busy:
                self._wait_s = _POLL_S
            has_more = self._flights or self.wait_s or self._shed
            assert has_more or not self.has_work, "nothing can run"
            return None
        self._step_id += 1
        releases, self._releases = tuple(self._releases), []
        plan = StepPlan(
            step_id=self._step_id,
            passes=passes,
            admissions=tuple(step.admissions),
            releases=releases,
            copies=tuple(step.copies),
        )
        self._flights.append(PlanInFlight(plan, step.sequences, now_s))
        return plan

    def idle(self) -> None:
        """Forget cached KV that has expired, and let go of what was saved: `schedule` does, too."""
        self._tick(self._clock())

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceUpdate]:
        """Advance by what the step computed; finished sequences give up their blocks."""
        flight = self._flights.popleft()
        assert plan.step_id == result.step_id == flight.plan.step_id
        now_s = self._clock()
        seconds = now_s - max(flight.started_s, self._updated_s)
        if self._goes_by_price:
            self._pricing.observe(plan, seconds)
        self._replay.observe(plan, seconds)
        # A step that waited for its drafts also took what the host did between the two.
        waited_s = max(0.0, flight.started_s - self._updated_s) if self._had_running else 0.0
        self.speculation.observe(plan, seconds + waited_s)
        self._updated_s = now_s
        updates = self.take_shed()
        self.speculation.note_drafts(plan, result)
        if plan.passes[-1].role is ModelRole.TARGET:
            outcomes = zip(plan.passes[-1].segments, result.passes[-1], strict=True)
            applied = self._outcomes.apply(flight.sequences, outcomes)
            if not self.config.reuse_kv:
                self._forget_kv(each.sequence for each in applied if each.new_token_ids)
            updates += applied
        self._had_running = bool(self._running)
        return updates

    def take_shed(self) -> list[SequenceUpdate]:
        """The last updates of sequences that lost their places in the queue; each comes once.

        `update` brings them, too: this is for when there is no plan.
        """
        updates = [_nothing_more(sequence) for sequence in self._shed]
        self._shed.clear()
        return updates

    def finish(
        self, sequence: Sequence, reason: FinishReason, stop_reason: int | None = None
    ) -> None:
        """End a sequence in any state; a sequence that has ended already is left as it is.

        Samples that wait for this one's prompt to be computed end with it.
        """
        if sequence.is_finished:
            if sequence in self._shed:
                self._shed.remove(sequence)
            return
        if not self._waiting.drop_fork(sequence):
            if sequence.status is SequenceStatus.RUNNING:
                self._leave(sequence)
                self._pricing.observe_output(sequence.num_output_tokens)
            else:
                self._waiting.remove(sequence)
            for fork in self._waiting.release_forks(sequence.request):
                fork.status, fork.finish_reason = SequenceStatus.FINISHED, reason
        self._blocks.release(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason

    def pin_prefix(
        self, cache_key: bytes, token_ids: Seq[int], tenant: str = ""
    ) -> tuple[int, int]:
        """Keep the whole blocks of a cached prefix until `unpin`; returns a number for that, and
        their tokens.

        Raises:
            OverloadedError: some of it is not cached (any more).
            OutOfMemoryError: what is left of the pool would not hold a sequence of full length.
        """
        return self._pins.pin(cache_key, token_ids, tenant)

    def unpin(self, number: int) -> None:
        """Let go of a pinned prefix, which stays cached as others do; once for each number.

        Raises:
            InvalidRequestError: no prefix of that number is pinned.
        """
        self._pins.unpin(number)

    def explain_miss(self, cache_key: bytes, token_ids: Seq[int]) -> MissReport:
        """Why no more of a prompt is in the cache than is."""
        return self.prefix_cache.explain(cache_key, token_ids)

    @property
    def num_tier_blocks(self) -> tuple[int, int]:
        """Blocks saved to the tiers, and loaded from them."""
        if self.transfers is None:
            return 0, 0
        return self.transfers.stats.saved_blocks, self.transfers.stats.loaded_blocks

    def kv_usage(self) -> tuple[KVUsage, ...]:
        """What the blocks of each KV group are used for."""
        return self._blocks.usage(self._running)

    def delete_tenant(self, tenant: str, done: Callable[[], None] = lambda: None) -> None:
        """Forget all cached KV that was computed for a tenant, in the pool and in the tiers, its
        pinned prefixes as well.

        So does what drafts: its KV, and the tenant's outputs as drafts of others.

        The tiers take their time; ``done`` is called after that, perhaps by another thread.
        """
        self._pins.delete_tenant(tenant)
        self.prefix_cache.delete_tenant(tenant)
        self.speculation.delete_tenant(tenant)
        if self.transfers is not None:
            self.transfers.delete_tenant(tenant, done)
        else:
            done()

    def close(self) -> None:
        """Finish writing to the tiers, and close them."""
        if self.transfers is not None:
            self.transfers.close()

    def check_integrity(self) -> None:
        """Assert that every block and every slot is accounted for."""
        self._blocks.check_integrity(self._all(), self._pins)
        self.speculation.check_integrity()
        slots = [s.slot for s in self._running if s.slot is not None]
        assert sorted([*slots, *self._free_slots]) == list(range(self.config.max_num_seqs))
        self._waiting.check_integrity()

    def _tick(self, now_s: float) -> None:
        self.prefix_cache.tick(now_s)
        self.speculation.tick(now_s)
        self._waiting.land_loads()

    def _all(self) -> Iterable[Sequence]:
        yield from self._running
        yield from self._waiting

    def _shed_for(self, newcomer: Request) -> None:
        """Make places in a full queue, or raise `OverloadedError`."""
        for sequence in self._waiting.who_gives_place(newcomer):
            self._shed += [sequence, *self._waiting.forks_of(sequence.request)]
            self.finish(sequence, FinishReason.SHED)

    def _preempt_for_head(self, now_s: float) -> None:
        """Preempt running sequences for a waiting one that may take their place, if that helps."""
        while self._policy.preempts and (head := self._waiting.head(now_s)) is not None:
            if not self._waiting.may_join(head):
                return
            fits = self._waiting.fits(head)
            if fits and self._free_slots:
                return
            if not fits and self._waiting.drop_holder(but=head):
                continue
            lower = [each for each in self._running if self._policy.may_displace(head, each)]
            victim = self._last(lower)
            if victim is None or not self._waiting.would_fit(head, without=lower):
                return
            self._preempt(victim)

    def _may_enter(self, sequence: Sequence) -> bool:
        """Whether slot and blocks are there for the sequence at the head of the queue."""
        if not self._free_slots or not self._waiting.may_join(sequence):
            return False
        while not self._waiting.fits(sequence):
            # Others that wait may hold what it needs: those that were first in the queue before.
            # If nothing runs they do, or the tiers, since alone it fits always (`SchedulerConfig`).
            drop = self._waiting.drop_holder if self._running else self._waiting.drop_blocks
            if not drop(but=sequence):
                return False
        return True

    def _admit(self, sequence: Sequence, now_s: float) -> Admission:
        request = sequence.request
        self._waiting.admitted(sequence, now_s)
        if not sequence.was_admitted:
            self._blocks.count_hit(sequence)
            self._policy.charge(sequence, sequence.num_prompt_tokens - sequence.num_computed, 0)
            if request.params.n > 1:
                sequence.token_ids = list(sequence.token_ids)  # until now shared by the samples
        sequence.num_planned = sequence.num_computed
        sequence.slot = self._free_slots.pop()
        sequence.status = SequenceStatus.RUNNING
        self._running[sequence] = None
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
            rejection=self.config.verification == "rejection",
        )

    def _free_blocks_for(self, sequence: Sequence, step: Step) -> bool:
        """Free some blocks for ``sequence``; False if it has no part in this step.

        First those that waiting sequences hold, then those of the one that comes last among those
        that have no part in this step yet. If that is the sequence itself, it loses its own, unless
        it is in flight: then it waits for its result, which may give blocks up.
        """
        if self._waiting.drop_blocks():
            return True
        victim = self._last(each for each in self._running if each not in step.busy)
        if victim is None or (victim is sequence and sequence.num_in_flight):
            return False
        self._preempt(victim)
        return victim is not sequence

    def _last(self, candidates: Iterable[Sequence]) -> Sequence | None:
        """Of those that may be preempted, the one to do it to.

        What a grammar makes of a token in flight has to be known first.
        """
        ready = (s for s in candidates if not (s.num_in_flight and self.speculation.is_masked(s)))
        return self._waiting.last_of(ready)

    def _preempt(self, sequence: Sequence) -> None:
        self._start_anew(sequence)
        self.num_preemptions += 1

    def _forget_kv(self, sequences: Iterable[Sequence]) -> None:
        """Have these compute all that they know again for their next tokens, and their samples."""
        for sequence in sequences:
            if sequence.status is SequenceStatus.RUNNING:
                self._start_anew(sequence)
        while self._waiting.drop_holder():
            pass

    def _start_anew(self, sequence: Sequence) -> None:
        """Give up slot and blocks, and queue for them again."""
        self._leave(sequence)
        self._blocks.release(sequence)
        sequence.num_computed = 0
        sequence.reference = None
        sequence.may_load = True
        sequence.status = SequenceStatus.WAITING
        self._waiting.push(sequence)

    def _leave(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        del self._running[sequence]
        self.speculation.finish(sequence)
        self._free_slots.append(sequence.slot)
        self._releases.append(sequence.slot)
        sequence.slot = None


def _nothing_more(sequence: Sequence) -> SequenceUpdate:
    return SequenceUpdate(sequence, 0, (), SegmentResult())
