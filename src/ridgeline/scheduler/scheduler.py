"""Continuous batching under a token budget, in the order of a queue policy."""

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import replace

from ridgeline.core.errors import ContextLengthError
from ridgeline.core.plan import ModelRole, StepPlan
from ridgeline.core.protocols import Grammar, StepTimePredictor
from ridgeline.core.request import FinishReason, Request
from ridgeline.core.result import SegmentResult, StepResult
from ridgeline.kvcache import KVCacheManager, KVUsage, MissReport, PrefixCache
from ridgeline.kvcache.tiers import PeerFigures, Transfers
from ridgeline.scheduler.config import SchedulerConfig
from ridgeline.scheduler.lifecycle import Lifecycle
from ridgeline.scheduler.outcomes import Outcomes
from ridgeline.scheduler.planning import Planner
from ridgeline.scheduler.policies import create_policy
from ridgeline.scheduler.prediction import DEFAULT_PREDICTOR, CorrectedPredictor
from ridgeline.scheduler.replay import Replay
from ridgeline.scheduler.sequence import Sequence, SequenceUpdate
from ridgeline.scheduler.speculation import Speculation
from ridgeline.scheduler.step import PlanInFlight
from ridgeline.scheduler.waiting import Waiting

_POLL_S = 5e-4  # between looks at transfers, when nothing else can be done


class Scheduler:
    """Owns every sequence and every block.

    `schedule` gives sequences that decode their next token first; then prompts go on, and waiting
    sequences are admitted, in the order of the policy, as far as the budget and the blocks go. When
    blocks run out, the sequence that the policy puts last loses its own and is computed again
    later. Drafts take what budget and blocks are left.

    ``max_in_flight`` plans may be in flight: `schedule` may be called before `update` has been told
    of the plans before, and builds on the assumption that each decode of them yields its tokens.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        speculation: Speculation | None = None,
        *,
        predictor: StepTimePredictor = DEFAULT_PREDICTOR,
        clock: Callable[[], float] = time.monotonic,
        transfers: Callable[[PrefixCache], Transfers] | None = None,
    ) -> None:
        self.config = config
        self.speculation = speculation or Speculation()
        self.prefix_cache = PrefixCache(
            config.num_blocks,
            config.windows,
            config.block_tokens,
            ttl_s=config.kv_ttl_s,
            state_tokens=config.state_tokens,
            context_ranks=config.context_ranks,
        )
        self.transfers = None if transfers is None else transfers(self.prefix_cache)
        self._clock = clock
        self._predictor = CorrectedPredictor(predictor)
        self._goes_by_seconds = (
            config.tpot_slo_s is not None
            or config.scheduling_policy == "edf"
            or self.transfers is not None
        )
        self._kv = KVCacheManager(
            self.prefix_cache, self.transfers, max_length=config.max_model_len
        )
        self._policy = create_policy(config.scheduling_policy, config.tenant_weights)
        self._waiting = Waiting(config, self._policy, self._predictor, self.transfers, self._kv)
        self._lifecycle = Lifecycle(
            config, self._policy, self._waiting, self.speculation, self._predictor
        )
        self._replay = Replay(config.replay_s, most_s=config.tpot_slo_s)
        self._planner = Planner(
            config, self._kv, self._lifecycle, self._predictor, self.speculation, self._replay
        )
        self._outcomes = Outcomes(self._policy, self.speculation, self._lifecycle)
        self._shed: list[Sequence] = []  # to be reported
        self._flights: deque[PlanInFlight] = deque()
        self._step_id = self._num_requests = 0
        self._updated_s = self._wait_s = 0.0
        self._had_running = False  # after the last update

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether as many sequences run as may."""
        return self.num_running >= self.config.max_num_seqs

    @property
    def num_running(self) -> int:
        return len(self._lifecycle.running)

    @property
    def num_preemptions(self) -> int:
        """How often a sequence lost its blocks while it ran."""
        return self._lifecycle.num_preemptions

    def lengthened_replays(self, seconds: float) -> AbstractContextManager[None]:
        """Replay decode steps for ``seconds`` at a time while nobody reads tokens as they come."""
        return self._replay.lengthened(seconds)

    @property
    def has_work(self) -> bool:
        """Whether there is something to compute, or to be told by `take_shed`."""
        return self.num_running > 0 or self.num_waiting > 0 or bool(self._shed)

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
        known = [*request.prompt_token_ids, *request.output_token_ids]
        if len(known) + (1 if request.generates else 0) > limit:
            raise ContextLengthError(
                f"The prompt has {len(known)} tokens and the context holds {limit}, "
                "output included."
            )
        self._shed_for(request)
        if request.params.max_tokens is not None:
            limit = min(limit, num_prompt + request.params.max_tokens)
        lane, compression = self._policy.lane(request), request.params.kv_compression
        sequences = [
            Sequence(
                request=request,
                sample_index=index,
                token_ids=known,
                kv=self._kv.new_sequence(
                    request.cache_key,
                    tenant=request.tenant,
                    max_length=limit,
                    seen=None if compression is None else compression.seen,
                    selection=None if compression is None else compression.selection(num_prompt),
                    token_ids=request.prompt_token_ids,
                    reused=request.reused,
                ),
                max_length=limit,
                lane=lane,
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
        assert len(self._flights) < self.config.max_in_flight, "no plan may be in flight any more"
        if self._flights and (self.speculation.needs_results or not self.config.reuse_kv):
            return None  # a drafter goes by the tokens that are still to come
        now_s = self._clock()
        self._tick(now_s)
        self._wait_s = self._waiting.open_batch(self.num_running, now_s)
        self._lifecycle.preempt_for_head(now_s)
        step, num_steps = self._planner.plan(self._step_id + 1, now_s)
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
        self._step_id = step.step_id
        plan = StepPlan(
            step_id=step.step_id,
            passes=passes,
            admissions=tuple(step.admissions),
            releases=self._lifecycle.take_releases(),
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
        if self._goes_by_seconds:
            self._predictor.observe(plan, seconds)
        self._replay.observe(plan, seconds)
        # A step that waited for its drafts also took what the host did between the two.
        waited_s = max(0.0, flight.started_s - self._updated_s) if self._had_running else 0.0
        self.speculation.observe(plan, seconds + waited_s)
        self._updated_s = now_s
        updates = self.take_shed()
        self.speculation.note_drafts(plan, result)
        for a_pass, outcomes in zip(plan.passes, result.passes, strict=True):
            if a_pass.role is not ModelRole.TARGET:
                continue
            applied = self._outcomes.apply(flight.sequences, a_pass, outcomes)
            if not self.config.reuse_kv:
                self._lifecycle.forget_kv(each.sequence for each in applied if each.new_token_ids)
            if self._waiting.awaits_documents:
                applied = [each for each in applied if not each.sequence.request.is_document]
            updates += applied
        self._had_running = self.num_running > 0
        return updates

    def take_shed(self) -> list[SequenceUpdate]:
        """The last updates of sequences that lost their places in the queue; each comes once.

        `update` brings them, too: this is for when there is no plan.
        """
        updates = [_nothing_more(sequence) for sequence in self._shed]
        self._shed.clear()
        return updates

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence in any state; a sequence that has ended already is left as it is.

        Samples that wait for this one's prompt to be computed end with it.
        """
        if sequence.is_finished:
            if sequence in self._shed:
                self._shed.remove(sequence)
        else:
            self._lifecycle.finish(sequence, reason)

    def pin_prefix(
        self, cache_key: bytes, token_ids: Seq[int], tenant: str = ""
    ) -> tuple[int, int]:
        """See `KVCacheManager.pin`."""
        return self._kv.pin(cache_key, token_ids, tenant)

    def unpin(self, number: int) -> None:
        """See `KVCacheManager.unpin`."""
        self._kv.unpin(number)

    def explain_miss(self, cache_key: bytes, token_ids: Seq[int]) -> MissReport:
        """Why no more of a prompt is in the cache than is."""
        return self.prefix_cache.explain(cache_key, token_ids)

    @property
    def num_tier_blocks(self) -> tuple[int, int]:
        """Blocks saved to the tiers, and loaded from them."""
        if self.transfers is None:
            return 0, 0
        return self.transfers.stats.saved_blocks, self.transfers.stats.loaded_blocks

    @property
    def kv_peers(self) -> PeerFigures | None:
        """Who KV is read of and given to, where that is so."""
        return None if self.transfers is None else self.transfers.peers

    def kv_usage(self) -> tuple[KVUsage, ...]:
        """What the blocks of each KV group are used for."""
        return self._kv.usage(sequence.kv for sequence in self._lifecycle.running)

    def delete_tenant(self, tenant: str, done: Callable[[], None] = lambda: None) -> None:
        """Forget all cached KV that was computed for a tenant, in the pool and in the tiers, its
        pinned prefixes as well.

        So does what drafts: its KV, and the tenant's outputs as drafts of others.

        The tiers take their time; ``done`` is called after that, perhaps by another thread.
        """
        self._kv.delete_tenant(tenant)
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
        sequences = (*self._lifecycle.running, *self._waiting)
        self._kv.check_integrity(sequence.kv for sequence in sequences)
        self.speculation.check_integrity()
        self._lifecycle.check_integrity()

    def _tick(self, now_s: float) -> None:
        self.prefix_cache.tick(now_s)
        self.speculation.tick(now_s)
        self._waiting.land_loads()

    def _shed_for(self, newcomer: Request) -> None:
        """Make places in a full queue, or raise `OverloadedError`."""
        for sequence in self._waiting.who_gives_place(newcomer):
            if not sequence.request.is_document:
                self._shed += [sequence, *self._waiting.forks_of(sequence.request)]
            self.finish(sequence, FinishReason.SHED)


def _nothing_more(sequence: Sequence) -> SequenceUpdate:
    return SequenceUpdate(sequence, 0, (), SegmentResult())
