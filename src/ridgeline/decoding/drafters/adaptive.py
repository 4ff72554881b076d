"""Speculation that pays: drafter and length are chosen for each sequence and each step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ridgeline.core.plan import ModelRole, StepPlan, tree_depth
from ridgeline.core.protocols import GREEDY_DRAW, Draft, Drafter, StepTimePredictor, TokenDraw
from ridgeline.core.speculation_figures import DraftChoices
from ridgeline.decoding.drafters.acceptance import Acceptance, expected_gains
from ridgeline.decoding.drafters.budget import Budget
from ridgeline.decoding.drafters.control import PLAIN_STEPS, StepCosts, choose_lengths

HYSTERESIS = 1.02  # another length of the model's chains must be better by this factor
PROBE_STEPS, MAX_PROBE_STEPS = 16, 1024  # between tries of a sequence that drafts nothing


@dataclass(slots=True)
class _Slot:
    """What is known of a sequence. ``draft`` and ``by`` are of this step."""

    lookup: Acceptance
    model: Acceptance
    draft: Draft = field(default_factory=Draft)
    by: Acceptance | None = None


class AdaptiveDrafter(Drafter):
    """Maximises expected tokens per predicted second over the whole batch.

    Candidates are a ``lookup`` drafter, which proposes on the host, for the sequences for which it
    finds something, and the draft model (if ``has_model``) for the others; each with the acceptance
    measured so far, at predicted seconds that steps with and without drafts bear out. Now and
    then one of the sequences that draft nothing drafts one token, to see whether it would pay by
    now; they take turns, at intervals that double unless the token surprises. What all this loses
    is bounded: when its `Budget` is spent it rests, and the engine works as if there were no
    drafter. ``is_tree``: what it asks for are trees, of as many nodes as pay.
    """

    def __init__(
        self,
        lookup: Drafter,
        predictor: StepTimePredictor,
        *,
        max_tokens: int,
        has_model: bool,
        is_tree: bool = False,
    ) -> None:
        self._lookup = lookup
        self._is_tree = is_tree
        counts = range(max_tokens + 1)  # of the draft model's tokens
        self._passes = np.array([tree_depth(count) if is_tree else count for count in counts])
        self._costs = StepCosts(predictor, max_tokens=max_tokens)
        self._budget = Budget(self._costs)
        self._max_tokens = max_tokens
        self._has_model = has_model
        self._slots: dict[int, _Slot] = {}
        self._all_lookup, self._all_model = Acceptance(max_tokens), Acceptance(max_tokens)
        self._chain = 0
        self._turn = self._since_probe = 0
        self._probe_steps = PROBE_STEPS
        self._rest = 0
        self._planned: set[int] = set()
        self._was_asked = False  # in the oldest step that is not observed yet
        self._drafting_s = 0.0  # of steps that only drafted, for the next one
        self._steps_by_length: dict[int, int] = {}
        self._num_probes = 0
        self._expected_rate = 0.0

    def start(
        self,
        slot: int,
        token_ids: Sequence[int],
        namespace: str | None = None,
        *,
        tenant: str = "",
        draw: TokenDraw = GREEDY_DRAW,
    ) -> None:
        self._lookup.start(slot, token_ids, namespace, tenant=tenant, draw=draw)
        self._slots[slot] = _Slot(
            Acceptance(self._max_tokens, self._all_lookup),
            Acceptance(self._max_tokens, self._all_model),
        )

    def expect(self, slot: int, token_ids: Sequence[int]) -> None:
        self._lookup.expect(slot, token_ids)

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        self._lookup.extend(slot, token_ids)

    def finish(self, slot: int) -> None:
        self._lookup.finish(slot)
        del self._slots[slot]
        self._planned.discard(slot)

    def delete_tenant(self, tenant: str) -> None:
        self._lookup.delete_tenant(tenant)

    def begin_step(self, lengths: Mapping[int, int]) -> None:
        self._planned, self._was_asked = set(lengths), True
        self._rest = self._must_rest(len(lengths))
        self._since_probe += 1 + self._rest
        if self._rest or not lengths:
            self._planned.clear()
            return
        slots = [self._slots[slot] for slot in lengths]
        found = [self._lookup.propose(slot, self._max_tokens) for slot in lengths]
        best = self._choose(slots, found, sum(lengths.values()) / len(lengths))
        longest = max(best)
        self._steps_by_length[longest] = self._steps_by_length.get(longest, 0) + 1
        drafted = self._probed(best)
        for state, lookup, length in zip(slots, found, drafted, strict=True):
            self._plan(state, lookup, length)

    def propose(self, slot: int, max_tokens: int) -> Draft:
        state = self._slots[slot]
        if slot not in self._planned:  # its prompt ends in this step, or nobody drafts
            return Draft()
        draft = state.draft.cut(max_tokens)
        return replace(draft, num_model_tokens=min(draft.num_model_tokens, max_tokens))

    def verified(self, slot: int, draft: Draft, accepted: Sequence[int]) -> None:
        state = self._slots[slot]
        if state.by is not None and draft.token_ids:
            if accepted and state.by.rates()[0] < 0.5:
                self._probe_steps = PROBE_STEPS
            state.by.observe(len(draft.token_ids), accepted)
        self._budget.gained(len(accepted))

    def forced(self, slot: int, num_tokens: int) -> None:
        self._budget.gained(num_tokens)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        # A step for which it is asked waits for the one before: without drafts it is none of those
        # that drafts must be better than.
        if plan.passes[-1].role is not ModelRole.TARGET:
            self._drafting_s += seconds
            return
        if self._costs.observe(plan, seconds, is_plain=not self._was_asked):
            seconds += self._drafting_s
            self._budget.observe(plan.passes[-1], seconds, was_asked=self._was_asked)
        else:
            self._budget.skip()
        self._was_asked, self._drafting_s = False, 0.0

    def rest_steps(self) -> int:
        return self._rest

    def choices(self) -> DraftChoices:
        return DraftChoices(
            steps_by_length=dict(self._steps_by_length),
            num_probes=self._num_probes,
            expected_tok_s=self._expected_rate,
        )

    def _must_rest(self, num_sequences: int) -> int:
        """Steps to see what they take without drafts, or to lose nothing more."""
        if num_sequences and not self._costs.knows(num_sequences):
            return PLAIN_STEPS
        return self._budget.rest_steps()

    def _choose(
        self, slots: Sequence[_Slot], found: Sequence[Draft], mean_length: float
    ) -> list[int]:
        """The best lengths; those of the model's chains change only if that is worth it."""
        seconds, draft_s = self._costs.of(len(slots), mean_length)
        gains_NK = expected_gains([state.lookup for state in slots], self._all_lookup)
        for row, draft in zip(gains_NK, found, strict=True):
            row[len(draft.token_ids) :] = 0.0
        more_s = np.array(self._costs.excess_s(len(slots)))
        without_N = np.array([not draft.token_ids for draft in found])
        if self._has_model and without_N.any():
            model_NK = expected_gains([state.model for state in slots], self._all_model)
            chains = np.arange(self._max_tokens + 1)
            more_s = more_s[self._passes] + self._passes * draft_s
            is_within_CK = np.arange(self._max_tokens) < chains[:, None]
            gains_CNK = np.where(without_N[:, None], is_within_CK[:, None] * model_NK, gains_NK)
        else:
            more_s, gains_CNK = more_s[:1], gains_NK[None]
        choices = choose_lengths(gains_CNK, seconds, more_s)
        rates, kept = choices.rates_C, self._chain
        best = int(rates.argmax())
        if kept >= len(rates) or rates[best] > HYSTERESIS * rates[kept]:
            self._chain = best
        self._expected_rate = float(rates[self._chain]) / self._costs.slow_down(len(slots))
        lengths_N = choices.lengths(self._chain)
        # The draft model's chains of several lengths would run one after the other.
        is_chain_N = without_N & (lengths_N > 0)
        lengths_N[is_chain_N] = lengths_N[is_chain_N].max(initial=0)
        lengths: list[int] = lengths_N.tolist()
        return lengths

    def _probed(self, lengths: Sequence[int]) -> list[int]:
        """The lengths, with one more token now and then where there was none."""
        drafted, idle = list(lengths), [i for i, length in enumerate(lengths) if not length]
        if idle and self._since_probe >= self._probe_steps:
            self._since_probe = 0
            self._probe_steps = min(MAX_PROBE_STEPS, 2 * self._probe_steps)
            self._turn += 1
            self._num_probes += 1
            drafted[idle[self._turn % len(idle)]] = 1
        return drafted

    def _plan(self, state: _Slot, lookup: Draft, length: int) -> None:
        if lookup.token_ids:
            state.draft, state.by = lookup.cut(length), state.lookup
        else:
            count = length if self._has_model else 0
            state.draft = Draft(num_model_tokens=count, is_tree=self._is_tree)
            state.by = state.model
