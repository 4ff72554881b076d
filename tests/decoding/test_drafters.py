"""What drafters propose, and how the adaptive one decides, with prices and acceptance made up."""

import itertools
import math
import random

import numpy as np
import pytest

from ridgeline.core.plan import ModelRole, Pass, Segment, StepPlan
from ridgeline.core.protocols import Draft
from ridgeline.core.result import TokenLogprobs
from ridgeline.core.speculation_figures import DraftChoices
from ridgeline.decoding.drafters import (
    AdaptiveDrafter,
    FirstOf,
    LookaheadDrafter,
    ModelDrafter,
    NgramDrafter,
    RecyclingDrafter,
    SuffixDrafter,
)
from ridgeline.decoding.drafters.acceptance import Acceptance, expected_gains
from ridgeline.decoding.drafters.budget import CREDIT, SHARE
from ridgeline.decoding.drafters.control import PLAIN_STEPS, choose_lengths
from ridgeline.decoding.drafters.hash_chains import MAX_CANDIDATES, MAX_MATCH, HashChains

SLOW = pytest.mark.slow


def longest_match(tokens, end):
    """By brute force: of the latest places with the last two tokens, the longest match."""
    last = len(tokens) - (end is tokens)  # a text's own end is no earlier place
    places = [i for i in range(1, last) if tokens[i - 1 : i + 1] == end[-2:]]
    best = (0, 0)
    for place in places[::-1][:MAX_CANDIDATES]:
        length = 0
        while length < min(MAX_MATCH, place + 1, len(end)) and (
            tokens[place - length] == end[-1 - length]
        ):
            length += 1
        if length > best[0] and place + 1 < len(tokens):
            best = (length, place + 1)
    return best


@pytest.mark.parametrize("seed", range(30))
def test_matches_are_those_of_brute_force(seed):
    rng = random.Random(seed)
    tokens = [rng.randrange(rng.choice([2, 5, 30])) for _ in range(120)]
    chains = HashChains()
    for count in range(0, 120, rng.randint(1, 5)):
        chains.extend(tokens[len(chains) : count])
        known = tokens[:count]
        if count >= 3:
            expected = longest_match(known, known)
            assert tuple(chains.find_own_end()) == expected
        other = [rng.randrange(3) for _ in range(6)]
        assert tuple(chains.find(other)) == longest_match(known, other)


def test_a_repeating_text_goes_on():
    drafter = NgramDrafter()
    drafter.start(0, [9, 1, 2, 3, 1, 2, 3, 1, 2])
    assert drafter.propose(0, 7).token_ids == (3, 1, 2, 3, 1, 2, 3)
    drafter.extend(0, [7])
    assert drafter.propose(0, 7) == Draft()


def test_outputs_serve_others_of_their_namespace_only():
    drafter = SuffixDrafter()
    drafter.start(0, [5], "a")
    drafter.extend(0, [1, 2, 3, 4])
    drafter.start(1, [8, 1, 2], "a")
    drafter.start(2, [8, 1, 2], "b")
    drafter.start(3, [8, 1, 2], None)
    assert drafter.propose(1, 3) == Draft()
    drafter.finish(0)
    assert drafter.propose(1, 3).token_ids == (3, 4)  # not beyond the end of that output
    assert drafter.propose(2, 3) == drafter.propose(3, 3) == Draft()


@pytest.mark.parametrize(
    "make", [NgramDrafter, SuffixDrafter, lambda: FirstOf([NgramDrafter(), SuffixDrafter()])]
)
def test_what_the_caller_expects_is_proposed_for_as_long_as_it_comes(make):
    drafter = make()
    drafter.start(0, [9, 1, 2], "a")
    drafter.expect(0, [9, 1, 2, 5, 6, 7, 8])
    assert drafter.propose(0, 3).token_ids == (5, 6, 7)
    drafter.extend(0, [5, 6])
    assert drafter.propose(0, 9).token_ids == (7, 8)  # and not beyond its end
    drafter.extend(0, [3, 4])
    assert drafter.propose(0, 3) == Draft()  # another output than was expected
    drafter.extend(0, [6, 7])
    assert drafter.propose(0, 3).token_ids == (8,)  # found again
    drafter.finish(0)
    drafter.start(0, [9, 1, 2], "b")
    assert drafter.propose(0, 3) == Draft()


@pytest.mark.parametrize("drafter", [NgramDrafter(is_tree=True), SuffixDrafter(is_tree=True)])
def test_trees_have_what_the_caller_expects(drafter):
    drafter.start(0, [1, 2, 3, 1, 2], "a")
    drafter.expect(0, [3, 1, 2, 5, 6])
    assert {3, 5} <= set(drafter.propose(0, 8).token_ids)


def test_what_is_drawn_ahead_is_proposed_once_it_may_follow():
    """Three tokens an n-gram, one column: beside drafts the window takes one, after the last token.

    The n-grams 7 7 8 and 1 8 9 are made ahead, 7 1 7 is said.
    """
    chain, tree = LookaheadDrafter(4), LookaheadDrafter(5, is_tree=True)
    for drafter in (chain, tree):
        drafter.start(0, [7])
        first = drafter.propose(0, 4)
        assert (first.token_ids, first.parents) == ((7,), (-1,))
        drafter.see_drawn(0, first, [1, 8])
        drafter.extend(0, [1])
        second = drafter.propose(0, 4)
        assert (second.token_ids, second.parents) == ((8,), (-1,))
        drafter.see_drawn(0, second, [7, 9])
        drafter.extend(0, [7])
        third = drafter.propose(0, 1)
        assert third.token_ids == (9,)  # of a window for which alone there is room
        drafter.see_drawn(0, third, [1, -1])  # a grammar cut it off: it stays what it was
        drafter.extend(0, [1])
    last = chain.propose(0, 4)
    assert (last.token_ids, last.parents) == ((7, 1, 9), (-1, 0, -1))
    last = tree.propose(0, 5)
    assert (last.token_ids, last.parents) == ((7, 1, 8, 9, 9), (-1, 0, -1, 2, -1))


@pytest.mark.parametrize("seed", range(20))
def test_a_window_is_a_tree_that_fits(seed):
    rng = random.Random(seed)
    drafter = LookaheadDrafter(rng.randint(1, 32), is_tree=bool(seed % 2))
    text = [rng.randrange(6) for _ in range(rng.randint(1, 30))]
    drafter.start(0, text)
    for _ in range(60):
        most = rng.randint(0, 40)
        draft = drafter.propose(0, most)
        assert len(draft.token_ids) == len(draft.parents) <= most
        assert all(parent < place for place, parent in enumerate(draft.parents))
        assert len({*zip(draft.parents, draft.token_ids, strict=True)}) == len(draft.token_ids)
        drafter.see_drawn(0, draft, [rng.randrange(-1, 6) for _ in range(1 + len(draft.token_ids))])
        drafter.extend(0, [rng.randrange(6) for _ in range(rng.randint(0, 3))])
    drafter.finish(0)


def test_the_memory_of_outputs_is_bounded():
    drafter, rng = SuffixDrafter(max_tokens=1000), random.Random(0)
    for number in range(300):
        drafter.start(0, [], f"tenant {number % 7}")
        drafter.extend(0, [rng.randrange(50) for _ in range(rng.randrange(80))])
        drafter.finish(0)
        assert drafter.num_remembered <= 1000
    drafter.start(0, [], "one that says much")
    drafter.extend(0, list(range(5000)))
    drafter.finish(0)
    assert drafter.num_remembered <= 1000
    drafter.start(0, [4990, 4991], "one that says much")
    assert drafter.propose(0, 2).token_ids == (4992, 4993)


def test_a_deleted_tenants_outputs_serve_nobody():
    lookup, price = SuffixDrafter(), Price(token_s=1.0, draft_s=1.0)
    drafter = AdaptiveDrafter(FirstOf([lookup]), price, max_tokens=4, has_model=False)
    for tenant, output in (("a", [1, 2, 3]), ("b", [4, 5, 6])):
        drafter.start(0, [9], "shared", tenant=tenant)
        drafter.extend(0, output)
        drafter.finish(0)
    drafter.start(1, [9], "shared", tenant="a")
    drafter.extend(1, [7, 7, 8])  # before the deletion; what follows it is remembered
    drafter.delete_tenant("a")
    drafter.delete_tenant("nobody")
    drafter.extend(1, [11, 12, 13])
    drafter.finish(1)
    assert lookup.num_remembered == 2 * (3 + 1)
    for end, following in (([1, 2], ()), ([4, 5], (6,)), ([7, 7], ()), ([11, 12], (13,))):
        drafter.start(0, end, "shared")
        assert lookup.propose(0, 3).token_ids == following, end
        drafter.finish(0)
    drafter.delete_tenant("b")
    assert lookup.num_remembered == 3 + 1


def test_the_first_proposal_is_taken():
    drafter = FirstOf([NgramDrafter(), ModelDrafter()])
    drafter.start(0, [1, 2, 3, 1, 2])
    drafter.start(1, [1, 2])
    assert drafter.propose(0, 1).token_ids == (3,)
    assert drafter.propose(1, 4).num_model_tokens == 4


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


class Price:
    """Verifying one more token costs ``token_s``; a draft pass ``draft_s``; a step at least 1."""

    def __init__(self, *, token_s: float, draft_s: float) -> None:
        self.token_s, self.draft_s = token_s, draft_s
        self.num_asked = 0

    def seconds(self, plan):
        self.num_asked += 1
        return sum(
            self.draft_s * a_pass.num_steps
            if a_pass.role is ModelRole.DRAFT
            else 1.0 + self.token_s * a_pass.num_tokens
            for a_pass in plan.passes
        )

    def segment_seconds(self, num_tokens, context):
        return self.token_s * num_tokens


def plan_of(drafted):
    """A step in which each slot verifies so many tokens of a draft model."""
    target = tuple(
        Segment(slot=slot, start=100, stop=101 + n, token_ids=(1,) * (1 + n), num_drafts=n)
        for slot, n in enumerate(drafted)
    )
    draft = Segment(slot=0, start=100, stop=101, token_ids=(1,))
    target_pass = Pass(segments=target)
    if not any(drafted):
        return StepPlan(step_id=0, passes=(target_pass,))
    chain = Pass(segments=(draft,), role=ModelRole.DRAFT, num_steps=max(drafted))
    return StepPlan(step_id=0, passes=(chain, target_pass))


def draft_of(count):
    return Draft(token_ids=(1,) * count)


def simulate(
    price,
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

    Steps with drafts take ``overhead_s`` more for each pass than the price knows of, and those for
    which the drafter is asked ``asked_s``.
    """
    rng = random.Random(seed)
    drafter = AdaptiveDrafter(NgramDrafter(), price, max_tokens=max_tokens, has_model=has_model)
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
        step_s = price.seconds(plan) + (overhead_s * (1 + max(drafted)) if any(drafted) else 0.0)
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


def fixed(price, rates, length, slots=1):
    gains = 1 + np.cumprod(rates)[:length].sum()
    cost = 1.0 + price.token_s * slots * (1 + length) + price.draft_s * length
    return slots * gains / cost


@pytest.mark.parametrize("slots", [1, 4, *(pytest.param(n, marks=SLOW) for n in (16, 64))])
@pytest.mark.parametrize("acceptance", [0.0, 0.4, 0.7, 0.95])
@pytest.mark.parametrize("token_s", [pytest.param(0.001, marks=SLOW), 0.02, 0.3])
def test_never_much_slower_than_off_nor_than_the_best_fixed_length(slots, acceptance, token_s):
    price, rates = Price(token_s=token_s, draft_s=0.1), [acceptance] * 6
    steps = max(300, 1200 // slots)
    rate = np.mean(
        [simulate(price, rates, slots=slots, steps=steps, seed=seed)[0] for seed in range(2)]
    )
    best = max(fixed(price, rates, length, slots) for length in range(7))
    assert rate > 0.97 * fixed(price, rates, 0, slots)
    assert rate > 0.94 * best


@pytest.mark.parametrize("slots", [1, 4])
def test_what_steps_really_take_counts_whatever_the_price_says(slots):
    """By the price drafts pay, and in truth the host takes more than they gain."""
    price, rates = Price(token_s=0.001, draft_s=0.01), [0.9] * 6
    believed = simulate(price, rates, slots=slots, steps=1500)[0]
    rate, lengths = simulate(price, rates, slots=slots, steps=1500, overhead_s=0.8)
    assert believed > 3 * fixed(price, rates, 0, slots)
    assert rate > 0.97 * fixed(price, rates, 0, slots)
    assert np.mean([sum(each) for each in lengths[100:]]) < 0.2 * slots


def test_it_follows_a_text_that_changes():
    price = Price(token_s=0.02, draft_s=0.1)
    _, lengths = simulate(price, lambda step: [0.95 if step > 700 else 0.0] * 6, steps=1500)
    drafted = [sum(each) for each in lengths]
    assert np.mean(drafted[200:700]) < 0.2
    assert np.mean(drafted[1200:]) > 3


def test_it_rests_where_nothing_pays_and_is_asked_where_something_does():
    hopeless, good = Price(token_s=0.3, draft_s=0.5), Price(token_s=0.02, draft_s=0.1)
    for price, rates, least, most in ((hopeless, [0.2] * 6, 4, 40), (good, [0.9] * 6, 900, 1000)):
        asked = 0

        class Counting(AdaptiveDrafter):
            def begin_step(self, lengths):
                nonlocal asked
                asked += 1
                super().begin_step(lengths)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tests.decoding.test_drafters.AdaptiveDrafter", Counting)
            simulate(price, rates, steps=1000, asked_s=1.0)
        assert least <= asked <= most


@pytest.mark.parametrize("slots", [1, 16])
@pytest.mark.parametrize("asked_s", [0.05, 1.0, 5.0])
def test_asking_it_loses_no_more_than_the_budget(slots, asked_s):
    """What waiting for the drafter takes is no part of any price."""
    price, steps = Price(token_s=0.02, draft_s=0.5), 3000
    rate = simulate(price, [0.1] * 6, slots=slots, steps=steps, asked_s=asked_s)[0]
    lost = fixed(price, [0.1] * 6, 0, slots) / rate - 1
    assert 0 < lost < SHARE + (CREDIT + 2 + asked_s) / steps


@pytest.mark.parametrize("factor", [0.02, 0.5, 10.0])
def test_the_budget_does_not_go_by_a_price_that_nothing_has_borne_out(factor):
    """The first step of a batch of a new size is neither a loss nor a gain."""

    class Wrong(Price):
        def seconds(self, plan):
            return factor * super().seconds(plan)

    truth = Price(token_s=0.02, draft_s=0.1)
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
    price = Price(token_s=0.02, draft_s=0.1)
    drafter = AdaptiveDrafter(NgramDrafter(), price, max_tokens=4, has_model=True)
    drafter.start(0, [1])
    drafter.begin_step({0: 100})
    plain = plan_of([0])
    for _ in range(1 + PLAIN_STEPS):
        drafter.observe(plain, price.seconds(plain))
    only_drafts = StepPlan(step_id=0, passes=plan_of([4]).passes[:1])
    for _ in range(int(CREDIT) + 2):
        drafter.begin_step({0: 100})
        drafter.observe(only_drafts, 1.0)
        drafter.begin_step({0: 100})
        drafter.observe(plain, price.seconds(plain))
    drafter.begin_step({0: 100})
    assert drafter.rest_steps() > 100


def test_chains_of_the_draft_model_are_of_one_length():
    """Those of several lengths would be passes one after the other."""
    price = Price(token_s=0.02, draft_s=0.1)
    drafter = AdaptiveDrafter(NgramDrafter(), price, max_tokens=6, has_model=True)
    for slot in range(4):
        drafter.start(slot, [1])
    drafter.begin_step(dict.fromkeys(range(4), 100))
    for step in [plan_of([0] * 4)] * (1 + PLAIN_STEPS):
        drafter.observe(step, price.seconds(step))
    for _ in range(60):
        drafter.begin_step(dict.fromkeys(range(4), 100))
        counts = [drafter.propose(slot, 6).num_model_tokens for slot in range(4)]
        assert len(set(counts) - {0}) <= 1
        drafter.observe(plan_of(counts), price.seconds(plan_of(counts)))
        for slot, (count, right) in enumerate(zip(counts, (1, 2, 4, 6), strict=True)):
            drafter.verified(slot, draft_of(count), range(min(count, right)))
    assert max(counts) >= 4


def test_choices_are_reported():
    price = Price(token_s=0.02, draft_s=0.1)
    drafter = AdaptiveDrafter(NgramDrafter(), price, max_tokens=3, has_model=True)
    drafter.start(0, [1])
    assert drafter.choices() == DraftChoices(steps_by_length={}, num_probes=0, expected_tok_s=0.0)
    drafter.begin_step({0: 100})  # after which it sees what steps take without drafts
    assert drafter.rest_steps() > 0
    for step in [plan_of([0])] * (1 + PLAIN_STEPS):
        drafter.observe(step, price.seconds(step))
    for _ in range(300):
        drafter.begin_step({0: 100})
        count = drafter.propose(0, 3).num_model_tokens
        step = plan_of([count])
        drafter.observe(step, price.seconds(step))
        drafter.verified(0, draft_of(count), ())  # always wrong
    choices = drafter.choices()
    assert sum(choices.steps_by_length.values()) == 300
    assert choices.steps_by_length[0] > 100
    assert choices.num_probes >= 1
    assert choices.expected_tok_s == pytest.approx(1 / 1.02, rel=0.3)


def test_the_length_does_not_flutter():
    price = Price(token_s=0.02, draft_s=0.1)
    _, lengths = simulate(price, [0.8] * 6, steps=600)
    changes = sum(a != b for a, b in itertools.pairwise(lengths[100:]))
    assert changes < 100


def likely(token, *others):
    """What was likely in a place, and which token came."""
    logprobs = [math.log(0.56 / 2**rank) for rank in range(1 + len(others))]
    top = tuple(zip((token, *others), logprobs, strict=True))
    return TokenLogprobs(token_id=token, logprob=logprobs[0], rank=1, top=top)


def recycling(namespace="a", **settings):
    """A drafter that has seen, after 1, 2 or 3 or 4, and after 2, 5 or 6."""
    drafter = RecyclingDrafter(**settings)
    drafter.start(0, [9, 1], namespace, tenant="t")
    drafter.see(0, [likely(2, 3, 4), likely(5, 6)])
    drafter.extend(0, [2, 5])
    return drafter


def test_what_was_likely_is_likely_again():
    drafter = recycling()
    drafter.extend(0, [1])
    assert drafter.propose(0, 4) == Draft(token_ids=(2, 5))
    tree = recycling(is_tree=True)
    tree.extend(0, [1])
    assert tree.propose(0, 4) == Draft(token_ids=(2, 5, 3, 6), parents=(-1, 0, -1, 0))
    tree.see(0, [likely(7)])  # the latest counts
    tree.extend(0, [7, 1])
    assert tree.propose(0, 4).token_ids == (7,)


def test_what_was_likely_for_one_namespace_is_not_for_another():
    drafter = recycling()
    for slot, namespace in enumerate(("a", "b", None), start=1):
        drafter.start(slot, [8, 1], namespace)
    assert [drafter.propose(slot, 2).token_ids for slot in (1, 2, 3)] == [(2, 5), (), ()]
    drafter.finish(0)
    assert drafter.propose(1, 2).token_ids == (2, 5)
    drafter.delete_tenant("nobody")
    assert drafter.propose(1, 2).token_ids == (2, 5)
    drafter.delete_tenant("t")
    assert drafter.propose(1, 2) == Draft()


def test_the_memory_of_likely_tokens_is_bounded():
    drafter = RecyclingDrafter(max_tokens=50)
    for number in range(40):
        drafter.start(0, [1], f"namespace {number % 5}")
        for token in range(number, number + 30):
            drafter.see(0, [likely(token)])
            drafter.extend(0, [token])
        assert drafter.num_remembered <= 50
        assert drafter.propose(0, 1).token_ids == ()
        drafter.finish(0)
    assert drafter.num_remembered > 0
