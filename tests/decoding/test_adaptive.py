"""How the adaptive drafter decides, with seconds and acceptance made up."""

import itertools
import random

import numpy as np
import pytest
from tests.decoding.made_up_steps import MadeUpSeconds, plan_of

from ridgeline.core.plan import StepPlan
from ridgeline.core.protocols import Draft
from ridgeline.core.speculation_figures import DraftChoices
from ridgeline.decoding.drafters import AdaptiveDrafter, NgramDrafter
from ridgeline.decoding.drafters.acceptance import Acceptance, expected_gains
from ridgeline.decoding.drafters.budget import CREDIT, SHARE
from ridgeline.decoding.drafters.control import PLAIN_STEPS, choose_lengths

SLOW = pytest.mark.slow


def test_acceptance_follows_what_is_seen():
    acceptance = Acceptance(4)
    for _ in range(200):
        acceptance.observe(4, range(2))  # the third is always wrong; the fourth is never tried
    assert acceptance.rates()[:2] == pytest.approx([1, 1], abs=0.1)
    assert acceptance.rates()[2] < 0.1
    for _ in range(200):
        acceptance.observe(4, range(4))
    assert acceptance.rates() == pytest.approx([1, 1, 1, 1], abs=0.1)


def test_what_one_sequence_shows_is_expected_of_the_others():
    everyone = Acceptance(3)
    shown, other = Acceptance(3, everyone), Acceptance(3, everyone)
    guess = other.rates()
    for _ in range(20):
        shown.observe(1, [0])
    gains = expected_gains([shown, other], everyone)
    assert gains[0, 0] > gains[1, 0] > guess[0] + 0.2
    assert gains[1] == pytest.approx(np.cumprod(other.rates()))


def test_no_draft_gains_more_than_a_token_though_a_tree_takes_the_second_node_more_often():
    everyone = Acceptance(2)
    one = Acceptance(2, everyone)
    for _ in range(50):
        one.observe(2, [1])
    (gains,) = expected_gains([one], everyone)
    assert gains[0] < 0.2 and gains[1] == gains[0]  # not more, given the one before


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    gains = np.cumprod(rng.uniform(0, 1, (3, 3)), axis=1)
    seconds = np.cumsum(rng.uniform(0.1, 2, 13))
    draft_s = rng.uniform(0, 2)

    def verify_seconds(tokens):
        return np.interp(tokens, np.arange(13), seconds)

    def rate(lengths):
        tokens = 3 + sum(gains[i, :length].sum() for i, length in enumerate(lengths))
        drafts = draft_s if any(lengths) else 0.0
        return tokens / (verify_seconds(3 + sum(lengths)) + drafts)

    choices = choose_lengths(gains[None], verify_seconds, draft_s)
    (chosen,) = choices.rates_C
    assert chosen == pytest.approx(max(map(rate, itertools.product(range(4), repeat=3))))
    assert chosen == pytest.approx(rate(choices.lengths(0)))


def test_each_condition_has_its_own_choice():
    gains = np.array([[[0.9, 0.8]], [[0.9, 0.0]], [[0.0, 0.0]]])
    choices = choose_lengths(gains, lambda tokens: 1.0 + 0.1 * tokens, [0.1, 5.0, -0.5])
    assert [choices.lengths(each) for each in range(3)] == [[2], [0], [0]]
    assert choices.rates_C == pytest.approx([2.7 / 1.4, 1 / 1.1, 1 / 1.1])


def test_a_draft_that_gains_no_time_is_not_made():
    choices = choose_lengths(np.ones((1, 1, 1)), lambda tokens: tokens, [0.0])
    assert (choices.lengths(0).tolist(), choices.rates_C.tolist()) == ([0], [1.0])


def draft_of(count):
    return Draft(token_ids=(1,) * count)


def simulate(
    predictor,
    rates,
    *,
    steps=600,
    slots=1,
    has_model=True,
    max_tokens=6,
    seed=0,
    overhead_s=0.0,
    asked_s=0.0,
):
    """Tokens per second against a text that accepts position i with ``rates[i]``.

    Steps with drafts take ``overhead_s`` more for each pass than the predictor knows of, and those
    for which the drafter is asked ``asked_s``.
    """
    rng = random.Random(seed)
    drafter = AdaptiveDrafter(NgramDrafter(), predictor, max_tokens=max_tokens, has_model=has_model)
    for slot in range(slots):
        drafter.start(slot, [1])
    tokens, seconds, lengths, rest = 0, 0.0, [], 0
    for step in range(steps):
        rest -= 1
        drafted, is_asked = [0] * slots, rest < 0
        if is_asked:
            drafter.begin_step(dict.fromkeys(range(slots), 100))
            drafted = [drafter.propose(slot, max_tokens).num_model_tokens for slot in range(slots)]
            rest = drafter.rest_steps()
        plan = plan_of(drafted)
        step_s = predictor.seconds(plan) + (
            overhead_s * (1 + max(drafted)) if any(drafted) else 0.0
        )
        step_s += asked_s * is_asked
        drafter.observe(plan, step_s)
        seconds += step_s
        current = rates(step) if callable(rates) else rates
        for slot, count in enumerate(drafted):
            accepted = 0
            while accepted < count and rng.random() < current[accepted]:
                accepted += 1
            drafter.verified(slot, draft_of(count), range(accepted))
            tokens += accepted + 1
        lengths.append(drafted)
    return tokens / seconds, lengths


def fixed(predictor, rates, length, slots=1):
    gains = 1 + np.cumprod(rates)[:length].sum()
    cost = 1.0 + predictor.token_s * slots * (1 + length) + predictor.draft_s * length
    return slots * gains / cost


@pytest.mark.parametrize("slots", [1, 4, *(pytest.param(n, marks=SLOW) for n in (16, 64))])
@pytest.mark.parametrize("acceptance", [0.0, 0.4, 0.7, 0.95])
@pytest.mark.parametrize("token_s", [pytest.param(0.001, marks=SLOW), 0.02, 0.3])
def test_never_much_slower_than_off_nor_than_the_best_fixed_length(slots, acceptance, token_s):
    predictor, rates = MadeUpSeconds(token_s=token_s, draft_s=0.1), [acceptance] * 6
    steps = max(300, 1200 // slots)
    rate = np.mean(
        [simulate(predictor, rates, slots=slots, steps=steps, seed=seed)[0] for seed in range(2)]
    )
    best = max(fixed(predictor, rates, length, slots) for length in range(7))
    assert rate > 0.97 * fixed(predictor, rates, 0, slots)
    assert rate > 0.94 * best


@pytest.mark.parametrize("slots", [1, 4])
def test_what_steps_really_take_counts_whatever_is_predicted(slots):
    """By the predictor drafts pay, and in truth the host takes more than they gain."""
    predictor, rates = MadeUpSeconds(token_s=0.001, draft_s=0.01), [0.9] * 6
    believed = simulate(predictor, rates, slots=slots, steps=1500)[0]
    rate, lengths = simulate(predictor, rates, slots=slots, steps=1500, overhead_s=0.8)
    assert believed > 3 * fixed(predictor, rates, 0, slots)
    assert rate > 0.97 * fixed(predictor, rates, 0, slots)
    assert np.mean([sum(each) for each in lengths[100:]]) < 0.2 * slots


def test_it_follows_a_text_that_changes():
    predictor = MadeUpSeconds(token_s=0.02, draft_s=0.1)
    _, lengths = simulate(predictor, lambda step: [0.95 if step > 700 else 0.0] * 6, steps=1500)
    drafted = [sum(each) for each in lengths]
    assert np.mean(drafted[200:700]) < 0.2
    assert np.mean(drafted[1200:]) > 3


def test_it_rests_where_nothing_pays_and_is_asked_where_something_does():
    hopeless, good = (
        MadeUpSeconds(token_s=0.3, draft_s=0.5),
        MadeUpSeconds(token_s=0.02, draft_s=0.1),
    )
    for predictor, rates, least, most in (
        (hopeless, [0.2] * 6, 4, 40),
        (good, [0.9] * 6, 900, 1000),
    ):
        asked = 0

        class Counting(AdaptiveDrafter):
            def begin_step(self, lengths):
                nonlocal asked
                asked += 1
                super().begin_step(lengths)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tests.decoding.test_adaptive.AdaptiveDrafter", Counting)
            simulate(predictor, rates, steps=1000, asked_s=1.0)
        assert least <= asked <= most


@pytest.mark.parametrize("slots", [1, 16])
@pytest.mark.parametrize("asked_s", [0.05, 1.0, 5.0])
def test_asking_it_loses_no_more_than_the_budget(slots, asked_s):
    """What waiting for the drafter takes is in no prediction."""
    predictor, steps = MadeUpSeconds(token_s=0.02, draft_s=0.5), 3000
    rate = simulate(predictor, [0.1] * 6, slots=slots, steps=steps, asked_s=asked_s)[0]
    lost = fixed(predictor, [0.1] * 6, 0, slots) / rate - 1
    assert 0 < lost < SHARE + (CREDIT + 2 + asked_s) / steps


@pytest.mark.parametrize("factor", [0.02, 0.5, 10.0])
def test_the_budget_does_not_go_by_a_prediction_that_nothing_has_borne_out(factor):
    """The first step of a batch of a new size is neither a loss nor a gain."""

    class Wrong(MadeUpSeconds):
        def seconds(self, plan):
            return factor * super().seconds(plan)

    truth = MadeUpSeconds(token_s=0.02, draft_s=0.1)
    drafter = AdaptiveDrafter(
        NgramDrafter(), Wrong(token_s=0.02, draft_s=0.1), max_tokens=4, has_model=True
    )
    rests = []
    for size in (1, 2, 4, 8):
        for slot in range(size // 2, size):
            drafter.start(slot, [1])
        drafter.begin_step(dict.fromkeys(range(size), 100))
        rests.append(drafter.rest_steps())
        for step in [plan_of([0] * size)] * (1 + PLAIN_STEPS):
            drafter.observe(step, truth.seconds(step))
        drafter.begin_step(dict.fromkeys(range(size), 100))
        rests.append(drafter.rest_steps())
        drafter.observe(step, truth.seconds(step))
    assert rests == [PLAIN_STEPS, 0] * 4


def test_steps_that_only_draft_are_a_loss_of_the_step_that_verifies():
    """As under a grammar, which has to see the draft model's tokens first."""
    predictor = MadeUpSeconds(token_s=0.02, draft_s=0.1)
    drafter = AdaptiveDrafter(NgramDrafter(), predictor, max_tokens=4, has_model=True)
    drafter.start(0, [1])
    drafter.begin_step({0: 100})
    plain = plan_of([0])
    for _ in range(1 + PLAIN_STEPS):
        drafter.observe(plain, predictor.seconds(plain))
    only_drafts = StepPlan(step_id=0, passes=plan_of([4]).passes[:1])
    for _ in range(int(CREDIT) + 2):
        drafter.begin_step({0: 100})
        drafter.observe(only_drafts, 1.0)
        drafter.begin_step({0: 100})
        drafter.observe(plain, predictor.seconds(plain))
    drafter.begin_step({0: 100})
    assert drafter.rest_steps() > 100


@pytest.mark.parametrize(("token_s", "longest"), [(0.02, 4), (0.2, 2)])
def test_chains_of_the_draft_model_are_of_one_length(token_s, longest):
    """Those of several lengths would be passes one after the other."""
    predictor = MadeUpSeconds(token_s=token_s, draft_s=0.1)
    drafter = AdaptiveDrafter(NgramDrafter(), predictor, max_tokens=6, has_model=True)
    for slot in range(4):
        drafter.start(slot, [1])
    drafter.begin_step(dict.fromkeys(range(4), 100))
    for step in [plan_of([0] * 4)] * (1 + PLAIN_STEPS):
        drafter.observe(step, predictor.seconds(step))
    for _ in range(60):
        drafter.begin_step(dict.fromkeys(range(4), 100))
        counts = [drafter.propose(slot, 6).num_model_tokens for slot in range(4)]
        assert len(set(counts) - {0}) <= 1
        drafter.observe(plan_of(counts), predictor.seconds(plan_of(counts)))
        for slot, (count, right) in enumerate(zip(counts, (1, 2, 4, 6), strict=True)):
            drafter.verified(slot, draft_of(count), range(min(count, right)))
    assert max(counts) >= longest


def test_choices_are_reported():
    predictor = MadeUpSeconds(token_s=0.02, draft_s=0.1)
    drafter = AdaptiveDrafter(NgramDrafter(), predictor, max_tokens=3, has_model=True)
    drafter.start(0, [1])
    assert drafter.choices() == DraftChoices(steps_by_length={}, num_probes=0, expected_tok_s=0.0)
    drafter.begin_step({0: 100})  # after which it sees what steps take without drafts
    assert drafter.rest_steps() > 0
    for step in [plan_of([0])] * (1 + PLAIN_STEPS):
        drafter.observe(step, predictor.seconds(step))
    for _ in range(300):
        drafter.begin_step({0: 100})
        count = drafter.propose(0, 3).num_model_tokens
        step = plan_of([count])
        drafter.observe(step, predictor.seconds(step))
        drafter.verified(0, draft_of(count), ())  # always wrong
    choices = drafter.choices()
    assert sum(choices.steps_by_length.values()) == 300
    assert choices.steps_by_length[0] > 100
    assert choices.num_probes >= 1
    assert choices.expected_tok_s == pytest.approx(1 / 1.02, rel=0.3)


@pytest.mark.parametrize(("text", "longest"), [([1, 2, 3], 0), ([1, 2, 3, 1, 2], 1)])
def test_no_more_is_chosen_than_was_found(text, longest):
    """All that is found is right, and pays."""

    class Found(NgramDrafter):
        def propose(self, slot, max_tokens):
            return super().propose(slot, min(1, max_tokens))

    predictor = MadeUpSeconds(token_s=0.02, draft_s=0.1)
    drafter = AdaptiveDrafter(Found(), predictor, max_tokens=3, has_model=False)
    drafter.start(0, text)
    drafter.begin_step({0: 100})
    for step in [plan_of([0])] * (1 + PLAIN_STEPS):
        drafter.observe(step, predictor.seconds(step))
    for _ in range(40):
        drafter.begin_step({0: 100})
        count = len(drafter.propose(0, 3).token_ids)
        drafter.observe(plan_of([count]), predictor.seconds(plan_of([count])))
        drafter.verified(0, draft_of(count), range(count))
    assert max(drafter.choices().steps_by_length) == longest
    tokens, step_s = (1, 1.02) if not longest else (2, 1.04)
    assert drafter.choices().expected_tok_s == pytest.approx(tokens / step_s, rel=0.1)


def test_the_length_does_not_flutter():
    predictor = MadeUpSeconds(token_s=0.02, draft_s=0.1)
    _, lengths = simulate(predictor, [0.8] * 6, steps=600)
    changes = sum(a != b for a, b in itertools.pairwise(lengths[100:]))
    assert changes < 100
