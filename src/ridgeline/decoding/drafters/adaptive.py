"""Speculation that pays: drafter and length are chosen for each sequence and each step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ridgeline.core.plan import StepPlan
from ridgeline.core.protocols import Draft, Drafter, StepPrice
from ridgeline.core.speculation_figures import DraftChoices
from ridgeline.decoding.drafters.acceptance import Acceptance, expected_gains
from ridgeline.decoding.drafters.control import Choice, StepCosts, choose_lengths

HYSTERESIS = 1.02  # another length of the model's chains must be better by this factor
PROBE_STEPS, MAX_PROBE_STEPS = 16, 1024  # between tries of a sequence that drafts nothing
PATIENCE = 4  # steps in which nothing paid, before the drafter rests
BASELINE_STEPS = 8  # without drafts, to know what they must be better than
MIN_REST, MAX_REST = 12, 192  # steps; doubled each time that nothing pays after a rest
MAX_UNHEARD = 64  # sequences that would wake it; doubled each time that it was woken for nothing


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
    measured so far, at the price as steps with and without drafts have borne it out. Now and
    then one of the sequences that draft nothing drafts one token, to see whether it would pay by
    now; they take turns, at intervals that double unless the token surprises. Where nothing pays it
    rests, so that the engine works as if there were no drafter. A sequence for which the lookup
    finds something ends the rest, but seldom where that was for nothing before.
    """

    def __init__(
        self, lookup: Drafter, price: StepPrice, *, max_tokens: int, has_model: bool
    ) -> None:
        self._lookup = lookup
        self._costs = StepCosts(price, max_tokens=max_tokens)
        self._max_tokens = max_tokens
        self._has_model = has_model
        self._slots: dict[int, _Slot] = {}
        self._all_lookup, self._all_model = Acceptance(max_tokens), Acceptance(max_tokens)
        self._chain = 0
        self._turn = self._since_probe = 0
        self._probe_steps = PROBE_STEPS
        self._idle_steps = self._rest = 0  # in a row without a draft that pays; the next rest
        self._next_rest = MIN_REST
        self._was_woken = False  # and nothing has paid since
        self._unheard = self._next_unheard = 0
        self._planned: set[int] = set()
        self._was_asked = False  # in the oldest step that is not observed yet
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
    ) -> None:
        self._lookup.start(slot, token_ids, namespace, tenant=tenant)
        self._slots[slot] = _Slot(
            Acceptance(self._max_tokens, self._all_lookup),
            Acceptance(self._max_tokens, self._all_model),
        )

    def wakes(self, slot: int) -> bool:
        if not self._lookup.propose(slot, 1).token_ids:
            return False
        if self._unheard:
            self._unheard -= 1
            return False
        self._was_woken = True
        return True

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
        if not lengths or not self._costs.knows(len(lengths)):
            self._planned.clear()
            self._rest = BASELINE_STEPS if lengths else 0
            return
        slots = [self._slots[slot] for slot in lengths]
        found = [self._lookup.propose(slot, self._max_tokens) for slot in lengths]
        best = self._choose(slots, found, sum(lengths.values()) / len(lengths))
        longest = max(best.lengths)
        self._steps_by_length[longest] = self._steps_by_length.get(longest, 0) + 1
        drafted = self._probed(best.lengths)
        self._plan_rest(pays=longest > 0, drafts=any(drafted))
        for state, lookup, length in zip(slots, found, drafted, strict=True):
            self._plan(state, lookup, length)

    def propose(self, slot: int, max_tokens: int) -> Draft:
        state = self._slots[slot]
        if slot not in self._planned:  # its prompt ends in this step, or nobody drafts
            return Draft()
        draft = state.draft
        return Draft(
            token_ids=draft.token_ids[:max_tokens],
            num_model_tokens=min(draft.num_model_tokens, max_tokens),
        )

    def verified(self, slot: int, num_drafted: int, num_accepted: int) -> None:
        state = self._slots[slot]
        if state.by is not None and num_drafted:
            if num_accepted and state.by.rates()[0] < 0.5:
                self._probe_steps = PROBE_STEPS
            state.by.observe(num_drafted, num_accepted)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        # A step for which it is asked waits for the one before: without drafts it is none of those
        # that drafts must be better than.
        self._costs.observe(plan, seconds, is_plain=not self._was_asked)
        self._was_asked = False

    def rest_steps(self) -> int:
        return self._rest

    def choices(self) -> DraftChoices:
        return DraftChoices(
            steps_by_length=dict(self._steps_by_length),
            num_probes=self._num_probes,
            expected_tok_s=self._expected_rate,
        )

    def _choose(self, slots: Sequence[_Slot], found: Sequence[Draft], mean_length: float) -> Choice:
        """The best lengths; those of the model's chains change only if that is worth it."""
        seconds, draft_s = self._costs.of(len(slots), mean_length)
        lookup = expected_gains([state.lookup for state in slots], self._all_lookup)
        for row, draft in zip(lookup, found, strict=True):
            row[len(draft.token_ids) :] = 0.0
        excess_s = self._costs.excess_s(len(slots))
        choices = {0: choose_lengths(lookup, seconds, excess_s[0])}
        if self._has_model:
            model = expected_gains([state.model for state in slots], self._all_model)
            without = np.array([not draft.token_ids for draft in found])
            for chain in range(1, self._max_tokens + 1) if without.any() else ():
                gains = _cut(np.where(without[:, None], model, lookup), without, chain)
                more_s = chain * draft_s + excess_s[chain]
                choices[chain] = choose_lengths(gains, seconds, more_s)
        best = max(choices, key=lambda chain: choices[chain].rate)
        kept = choices.get(self._chain)
        if kept is None or choices[best].rate > HYSTERESIS * kept.rate:
            self._chain = best
        self._expected_rate = choices[self._chain].rate / self._costs.slow_down(len(slots))
        return choices[self._chain]

    def _probed(self, lengths: Sequence[int]) -> list[int]:
        """The lengths, with one more token now and then where there was none."""
        drafted, idle = list(lengths), [i for i, length in enumerate(lengths) if not length]
        self._since_probe += 1 + self._rest
        if idle and self._since_probe >= self._probe_steps:
            self._since_probe = 0
            self._probe_steps = min(MAX_PROBE_STEPS, 2 * self._probe_steps)
            self._turn += 1
            self._num_probes += 1
            drafted[idle[self._turn % len(idle)]] = 1
        return drafted

    def _plan_rest(self, *, pays: bool, drafts: bool) -> None:
        """Rest after this step, unless something is drafted in it or paid a moment ago."""
        self._rest = 0
        if pays:
            self._idle_steps, self._next_rest = 0, MIN_REST
            self._was_woken, self._next_unheard = False, 0
            return
        self._idle_steps += 1
        if self._idle_steps >= PATIENCE and not drafts:
            self._rest, self._next_rest = self._next_rest, min(MAX_REST, 2 * self._next_rest)
            if self._was_woken:
                self._was_woken = False
                self._next_unheard = min(MAX_UNHEARD, max(1, 2 * self._next_unheard))
                self._unheard = self._next_unheard

    def _plan(self, state: _Slot, lookup: Draft, length: int) -> None:
        if lookup.token_ids:
            state.draft, state.by = Draft(token_ids=lookup.token_ids[:length]), state.lookup
        else:
            state.draft = Draft(num_model_tokens=length if self._has_model else 0)
            state.by = state.model


def _cut(
    gains_NK: npt.NDArray[np.float64], rows: npt.NDArray[np.bool_], length: int
) -> npt.NDArray[np.float64]:
    """Nothing beyond ``length`` in these rows."""
    gains = gains_NK.copy()
    gains[rows, length:] = 0.0
    return gains
