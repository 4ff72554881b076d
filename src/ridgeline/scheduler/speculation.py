"""Drafts and grammars in the plan: what is proposed for each sequence, and what came of it."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from time import thread_time

import numpy as np
import numpy.typing as npt

from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.plan import (
    GROWN,
    BlockCopy,
    ModelRole,
    Pass,
    Segment,
    StepPlan,
    is_earlier_pass,
)
from ridgeline.core.protocols import (
    Constraint,
    ConstraintFactory,
    Draft,
    Drafter,
    Grammar,
    TokenDraw,
)
from ridgeline.core.request import Request
from ridgeline.core.result import SegmentResult, StepResult
from ridgeline.core.speculation_figures import SpeculationFigures
from ridgeline.scheduler.draft_passes import DraftPasses
from ridgeline.scheduler.sequence import DraftCounts, Sequence

MAX_FORCED_TOKENS = 32
CHEAP_MASK_S = 0.0005
COSTLY_MASKS_S = 0.004  # of a step, for all masks that are not cheap
_NO_DRAFT = Draft()
_LEADING_TOKENS = 2  # of the prompt, where an expected output begins: more is no sign of it
_TO_COME = -1  # stands for the draft model's proposals until its pass has a place in the plan


@dataclass(slots=True)
class _State:
    """A running sequence. ``constraint`` follows its output.

    ``from_model``: the draft model's proposals, in this step or kept from the step before.
    ``guess``: the drafter's proposal, before the grammar cut it; empty if what is being verified is
    the grammar's own. ``kept``: which of its tokens are verified.
    ``mask_s``: processor time of the last masks; ``spent_s`` of all, from the least of the others
    when it started.
    """

    slot: int
    constraint: Constraint | None = None
    mask_s: float = 0.0
    spent_s: float = 0.0
    from_model: SegmentResult | None = None
    guess: Draft = _NO_DRAFT
    kept: Seq[int] = ()


class Speculation:
    """What the scheduler asks about drafts; without drafter and grammars it proposes nothing.

    Tokens that a grammar forces are proposed as drafts: the mask leaves the target nothing else to
    draw, so they are verified in one pass, and the output is that of a run without.

    Masks that are costly take turns, those first that have cost least: a grammar delays the tokens
    of others by `COSTLY_MASKS_S` and one mask more, however many outputs it has.

    The tokens of a draft model are not known when a plan is made. Where a grammar has to see them
    first, the draft model runs in one step and the target in the next.
    """

    def __init__(
        self,
        *,
        drafter: Drafter | None = None,
        max_tokens: int = 0,
        draft_model: DraftPasses | None = None,
        constraints: ConstraintFactory | None = None,
        only_chains: bool = False,
    ) -> None:
        self.drafter = drafter
        self._only_chains = only_chains
        self._max_tokens = max_tokens
        self._draft_model = draft_model
        self.constraints = constraints
        self._states: dict[Sequence, _State] = {}
        self._masked: dict[int, _State] = {}  # of those with a constraint, by slot
        self._held: set[int] = set()  # slots whose masks cost too much for this step
        self._counts = DraftCounts()
        self._rest_steps = 0  # for which the drafter need not be asked
        self._is_resting = False  # in the step that is being planned

    @property
    def asks_drafter(self) -> bool:
        """Whether the drafter is asked in the step that is being planned."""
        return self.drafter is not None and not self._is_resting

    @property
    def num_candidates(self) -> int:
        """Likely tokens that the drafter wants to see of the step that is being planned."""
        return 0 if self.drafter is None or self._is_resting else self.drafter.num_candidates

    @property
    def wants_drawn(self) -> bool:
        """Whether the drafter wants to see what follows every draft."""
        return self.drafter is not None and self.drafter.wants_drawn

    @property
    def needs_results(self) -> bool:
        """Whether the next step cannot be planned before the results of the one in flight."""
        return self.drafter is not None and not self._rest_steps

    def rest(self, num_steps: int) -> None:
        """A step that is repeated stands for several."""
        self._rest_steps = max(0, self._rest_steps - num_steps)

    def prepare(self, request: Request) -> Grammar | None:
        """Compile the request's grammar, if it has one, before the request is queued.

        Raises:
            InvalidRequestError: the grammar is refused.
        """
        wanted = request.params.structured_outputs
        if wanted is None:
            return None
        if self.constraints is None:
            raise InvalidRequestError("This engine has no tokenizer for structured outputs.")
        return self.constraints.prepare(wanted, request.tenant)

    def start(self, sequence: Sequence) -> None:
        """The sequence has a slot; after a preemption its output is known in part."""
        request, slot = sequence.request, sequence.slot
        assert slot is not None
        state = self._states[sequence] = _State(slot)
        if request.params.structured_outputs is not None:
            assert sequence.grammar is not None, "prepare refuses the request"
            state.constraint = sequence.grammar()
            state.constraint.advance(sequence.output_token_ids)
            state.spent_s = min((each.spent_s for each in self._masked.values()), default=0.0)
            self._masked[slot] = state
        if self._draft_model is not None:
            self._draft_model.start(sequence)
        if self.drafter is not None:
            draw = TokenDraw(
                seed=request.seed,
                sample_index=sequence.sample_index,
                temperature=0.0 if request.params.is_greedy else request.params.temperature,
            )
            self.drafter.start(
                slot, sequence.token_ids, request.draft_namespace, tenant=request.tenant, draw=draw
            )
            if request.expected_token_ids:
                before = request.prompt_token_ids[-_LEADING_TOKENS:]
                self.drafter.expect(slot, (*before, *request.expected_token_ids))

    def finish(self, sequence: Sequence) -> None:
        """The sequence loses its slot."""
        state = self._states.pop(sequence)
        self._masked.pop(state.slot, None)
        if self.drafter is not None:
            self.drafter.finish(state.slot)
        if self._draft_model is not None:
            self._draft_model.finish(sequence)

    def begin_step(self, running: Iterable[Sequence]) -> None:
        """A step is about to be planned."""
        self._hold_costly_masks()
        self._is_resting = self._rest_steps > 0
        if self._draft_model is not None:
            self._draft_model.begin_step(is_resting=self._is_resting)
        if self._is_resting:
            self._rest_steps -= 1
        elif self.drafter is not None:
            lengths = {
                self._states[each].slot: len(each.token_ids)
                for each in running
                if each.kv.num_computed + 1 == len(each.token_ids)
            }
            self.drafter.begin_step(lengths)
            self._rest_steps = self.drafter.rest_steps()

    def _hold_costly_masks(self) -> None:
        self._held.clear()
        costly = [each for each in self._masked.values() if each.mask_s > CHEAP_MASK_S]
        if len(costly) < 2:
            return
        costly.sort(key=lambda state: state.spent_s)
        left_s = COSTLY_MASKS_S
        for state in costly:
            if left_s <= 0:
                self._held.add(state.slot)
            left_s -= state.mask_s

    def is_masked(self, sequence: Sequence) -> bool:
        """Whether a grammar restricts what is sampled."""
        return self._states[sequence].constraint is not None

    def room(self, sequence: Sequence, most: int) -> int:
        """How many drafts could be used, ``most`` at the most."""
        forced = MAX_FORCED_TOKENS if self.is_masked(sequence) else 0
        return min(most, max(self._max_tokens, forced))

    def propose(self, sequence: Sequence, most: int, copies: list[BlockCopy]) -> Draft | None:
        """Drafts to verify after all known tokens; ``None`` if the target does nothing this time.

        A draft model's are placeholders among ``token_ids``, which `passes` replaces. Adds to the
        step's ``copies`` those that drafting takes.
        """
        state = self._states[sequence]
        constraint = state.constraint
        if state.slot in self._held:
            return None
        state.guess, state.kept = _NO_DRAFT, ()
        if state.from_model is not None:
            tokens, parents = state.from_model.token_ids, state.from_model.parents
            return self._guess(state, Draft(token_ids=tokens, parents=parents).cut(most))
        if constraint is not None and (forced := constraint.forced(most)):
            return Draft(token_ids=forced)
        most = min(most, self._max_tokens)
        draft = Draft()
        if most > 0 and self.drafter is not None and not self._is_resting:
            draft = self.drafter.propose(state.slot, most)
        if draft.num_model_tokens == 0 or self._draft_model is None:
            return self._guess(state, draft.cut(most))
        count, is_tree = min(most, draft.num_model_tokens), draft.is_tree and not self._only_chains
        count = self._draft_model.propose(sequence, count, is_tree=is_tree, copies=copies)
        if count and constraint is not None:
            return None
        parents = (GROWN,) * count if is_tree else ()
        state.guess, state.kept = (
            Draft(token_ids=(_TO_COME,) * count, parents=parents),
            range(count),
        )
        return state.guess

    def passes(self, segments: Seq[Segment]) -> tuple[Pass, ...]:
        """The step's passes: the draft model's, the target's over ``segments``, and what the draft
        model computes of these."""
        if self._draft_model is None:
            return (Pass(segments=tuple(segments)),) if segments else ()
        passes, references = self._draft_model.passes()
        targets = tuple(segments)
        if references:
            targets = tuple(
                each._replace(token_ids=each.token_ids[: -each.num_drafts] + references[each.slot])
                if each.num_drafts and each.token_ids[-1] == _TO_COME
                else each
                for each in segments
            )
        behind = self._draft_model.passes_behind(targets)
        return (*passes, Pass(segments=targets), *behind) if targets else passes

    def masks(self, plan: StepPlan) -> dict[tuple[int, int], npt.NDArray[np.uint32]]:
        """What `StepHandle.set_masks` takes; computed while the step runs."""
        masks = {}
        for p, a_pass in enumerate(plan.passes if self._masked else ()):
            for s, segment in enumerate(a_pass.segments):
                state = self._masked.get(segment.slot) if segment.outputs.masked else None
                if state is not None and state.constraint is not None:
                    drafts = segment.token_ids[segment.num_tokens - segment.num_drafts :]
                    began_s = thread_time()
                    masks[p, s] = state.constraint.masks(drafts, segment.parents)
                    state.mask_s = thread_time() - began_s
                    state.spent_s += state.mask_s
        return masks

    def note_drafts(self, plan: StepPlan, result: StepResult) -> None:
        """Take the draft model's proposals."""
        if self._draft_model is None or all(p.role is ModelRole.TARGET for p in plan.passes):
            return
        self._draft_model.note_computed()
        states = {state.slot: state for state in self._states.values()}
        for a_pass, outcomes in zip(plan.passes, result.passes, strict=True):
            if a_pass.role is not ModelRole.DRAFT:
                continue
            for segment, outcome in zip(a_pass.segments, outcomes, strict=True):
                if segment.outputs.sample and segment.slot in states:
                    states[segment.slot].from_model = outcome

    def advance(self, sequence: Sequence, token: int) -> bool:
        """The output went on with ``token``; whether its grammar says that it is whole."""
        state = self._states[sequence]
        if state.constraint is None:
            return False
        state.constraint.advance((token,))
        return state.constraint.is_complete

    def verified(
        self, sequence: Sequence, segment: Segment, outcome: SegmentResult, new: Seq[int]
    ) -> None:
        """The step gave a running sequence the tokens ``new``."""
        state, proposed = self._states[sequence], _NO_DRAFT
        num_accepted = len(outcome.accepted)
        if state.guess.token_ids:
            proposed = state.guess
            if proposed.parents[:1] == (GROWN,):
                assert state.from_model is not None, "a tree that was verified was grown"
                proposed = replace(proposed, parents=state.from_model.parents)
        if self.drafter is not None:
            if proposed.token_ids:
                accepted = tuple(state.kept[node] for node in outcome.accepted)
                self.drafter.verified(state.slot, proposed, accepted)
            elif num_accepted:
                self.drafter.forced(state.slot, num_accepted)
            if outcome.candidates:
                self.drafter.see(state.slot, outcome.candidates[: len(new)])
            if outcome.drawn and proposed.token_ids:
                drawn = [-1] * (1 + len(proposed.token_ids))
                for place, token in zip((-1, *state.kept), outcome.drawn, strict=True):
                    drawn[place + 1] = token
                self.drafter.see_drawn(state.slot, proposed, drawn)
            self.drafter.extend(state.slot, new)
        if state.from_model is not None:
            assert self._draft_model is not None
            self._draft_model.verified(sequence, state.from_model, num_accepted)
            state.from_model = None
        if proposed.token_ids and segment.num_drafts:
            verified = proposed.only(state.kept)
            self._counts.add(verified, outcome.accepted)
            sequence.drafts.add(verified, outcome.accepted[: len(new)])

    def is_void(self, sequence: Sequence, segment: Segment) -> bool:
        """Whether the step did nothing for the sequence, since the draft model had no token.

        It is not asked again for this sequence.
        """
        state = self._states[sequence]
        if state.from_model is None or not any(map(is_earlier_pass, segment.token_ids)):
            return False
        if len(state.from_model.token_ids) >= segment.num_drafts:
            return False
        assert self._draft_model is not None
        self._draft_model.fail(sequence)
        state.from_model = None
        return True

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Let the drafter know what a step took."""
        if self.drafter is not None:
            self.drafter.observe(plan, seconds)

    def figures(self) -> SpeculationFigures | None:
        """Counts since the start; ``None`` without a drafter."""
        if self.drafter is None:
            return None
        return SpeculationFigures(
            num_drafts=self._counts.num_drafts,
            drafted_at=tuple(self._counts.drafted_at),
            accepted_at=tuple(self._counts.accepted_at),
            drafted_by_rank=tuple(self._counts.drafted_by_rank),
            accepted_by_rank=tuple(self._counts.accepted_by_rank),
            choices=self.drafter.choices(),
        )

    def tick(self, now_s: float) -> None:
        """Tell the time, and forget the draft model's KV that has expired."""
        if self._draft_model is not None:
            self._draft_model.tick(now_s)

    def delete_tenant(self, tenant: str) -> None:
        """Forget the draft model's cached KV of a tenant, its outputs as drafts of others, and its
        grammars."""
        if self._draft_model is not None:
            self._draft_model.delete_tenant(tenant)
        if self.drafter is not None:
            self.drafter.delete_tenant(tenant)
        if self.constraints is not None:
            self.constraints.delete_tenant(tenant)

    def check_integrity(self) -> None:
        """Assert that the draft model's blocks are accounted for."""
        if self._draft_model is not None:
            self._draft_model.check_integrity()

    def _guess(self, state: _State, draft: Draft) -> Draft:
        """What is left of a guess once the grammar has seen it."""
        if self._only_chains:
            draft = draft.first_path()
        state.guess, state.kept = draft, range(len(draft.token_ids))
        if state.constraint is not None and draft.token_ids:
            state.kept = state.constraint.valid(draft.token_ids, draft.parents)
        return draft.only(state.kept)
