"""What steps are thought to cost, from what is predicted of them and what they took."""

import numpy as np
import pytest
from tests.decoding.made_up_steps import MadeUpSeconds, plan_of

from ridgeline.core.plan import ModelRole, Pass, Segment, StepPlan
from ridgeline.decoding.drafters.control import PLAIN_EVERY, PLAIN_STEPS, StepCosts
from ridgeline.scheduler import LinearPredictor

LINEAR = LinearPredictor(pass_s=1.0, token_s=0.02, draft_share=0.1)


def _see_plain(costs, plan, seconds):
    for _ in range(PLAIN_STEPS):
        costs.observe(plan, seconds, is_plain=True)


def test_a_chain_that_was_never_tried_is_not_thought_cheaper_than_predicted():
    """Lookups that took half of that, say, because the steps before them were disturbed."""
    costs = StepCosts(MadeUpSeconds(token_s=0.02, draft_s=0.01), max_tokens=6)
    plain, lookup = plan_of([0]), StepPlan(step_id=0, passes=plan_of([2]).passes[-1:])
    _see_plain(costs, plain, 2.0)
    costs.observe(lookup, 0.5, is_plain=False)
    excess_s = costs.excess_s(1)
    assert excess_s[0] < 0
    assert excess_s[1:] == [0.0] * 6


def test_steps_of_a_kind_are_predicted_once():
    """A prediction takes longer than a small model's step."""
    predictor = MadeUpSeconds(token_s=0.02, draft_s=0.01)
    costs = StepCosts(predictor, max_tokens=6)
    for _ in range(100):
        costs.observe(plan_of([0]), 1.1, is_plain=True)
        costs.observe(plan_of([3]), 1.5, is_plain=False)
    assert predictor.num_asked <= 4
    costs.of(1, 100)
    assert predictor.num_asked <= 10


def test_a_step_costs_what_is_predicted_by_tokens_and_of_the_draft_model_by_sequences():
    for count in (1, 3):
        verify_s, draft_s = StepCosts(LINEAR, max_tokens=6).of(count, 100)
        tokens = np.array([1.0, 2.5, 7.0]) * count
        assert verify_s(tokens) == pytest.approx(1.0 + 0.02 * tokens)
        assert draft_s == pytest.approx(0.1 * (1.0 + 0.02 * count))


def test_steps_without_drafts_are_looked_at_now_and_then():
    """So a drafter that rests costs next to nothing, and still sees that steps take longer."""
    costs, plain = StepCosts(MadeUpSeconds(token_s=0.02, draft_s=0.01), max_tokens=6), plan_of([0])
    _see_plain(costs, plain, 1.02)
    for _ in range(PLAIN_EVERY - 1):
        costs.observe(plain, 2.04, is_plain=True)
    assert costs.slow_down(1) == pytest.approx(1.0)
    _see_plain(costs, plain, 2.04)
    assert costs.slow_down(1) == pytest.approx(2.0**0.25)


@pytest.mark.parametrize("length", [1, 3, 6])
def test_what_a_chain_takes_beyond_its_prediction_is_known_by_its_length(length):
    costs = StepCosts(MadeUpSeconds(token_s=0.02, draft_s=0.01), max_tokens=6)
    plain, chain = plan_of([0]), plan_of([length])
    _see_plain(costs, plain, 1.02)
    costs.observe(chain, 1.0 + 0.02 * (1 + length) + 0.01 * length + 0.5, is_plain=False)
    assert costs.excess_s(1)[length] == pytest.approx(0.5)


def test_steps_without_drafts_say_how_much_slower_than_predicted_the_machine_is():
    costs, plain, four = StepCosts(LINEAR, max_tokens=6), plan_of([0, 0]), plan_of([0] * 4)
    target = plain.passes[-1]
    assert (costs.knows(2), costs.knows_plain(target), costs.slow_down(2)) == (False, False, 1.0)
    _see_plain(costs, plain, 2 * 1.04)
    assert costs.slow_down(2) == costs.slow_down(3) == pytest.approx(2.0)
    assert costs.knows(2) and costs.knows_plain(target)
    assert costs.plain_s(target) == pytest.approx(2 * 1.04)
    assert costs.plain_s(plan_of([0, 0, 0]).passes[-1]) == pytest.approx(2 * 1.06)
    assert not costs.knows(4) and not costs.knows_plain(four.passes[-1])
    for _ in range(PLAIN_EVERY):
        costs.observe(four, 1.08, is_plain=True)
    assert costs.slow_down(4) == pytest.approx(1.0)
    _see_plain(costs, plain, 1000 * 2 * 1.04)  # interrupted: as if four times as long, and of
    assert costs.slow_down(2) == pytest.approx(2 * 4**0.25)  # that a quarter
    for _ in range(512):
        costs.observe(four, 1.08, is_plain=True)
    assert costs.knows(2)
    costs.observe(four, 1.08, is_plain=True)
    assert not costs.knows(2) and costs.knows(4) and costs.knows_plain(target)


def test_steps_that_are_no_decodes_or_took_no_time_say_nothing():
    costs = StepCosts(LINEAR, max_tokens=6)
    prompt = Pass(segments=(Segment(slot=0, start=0, stop=2, token_ids=(1, 1)),))
    for a_pass in (prompt, Pass(segments=()), Pass(segments=prompt.segments, role=ModelRole.DRAFT)):
        _see_plain(costs, StepPlan(step_id=0, passes=(a_pass,)), 5.0)
    _see_plain(costs, plan_of([0]), 0.0)
    costs.observe(plan_of([3]), 9.0, is_plain=False)  # what plain ones take is not known yet
    assert not costs.knows(1) and not costs.knows(0)
    assert costs.excess_s(1) == [0.0] * 7


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_tree_is_predicted_by_the_nodes_of_each_of_its_passes(num_slots):
    """Passes over 1, 3 and 5 tokens of each sequence, of which the first has one more to see."""
    costs = StepCosts(LINEAR, max_tokens=6)
    _see_plain(costs, plan_of([0] * num_slots), 1.0 + 0.02 * num_slots)
    target = plan_of([5] * num_slots).passes[-1]
    drafts = tuple(
        Segment(slot=slot, start=100 - (slot == 0), stop=101, token_ids=(1,) * (1 + (slot == 0)))
        for slot in range(num_slots)
    )
    tree = Pass(segments=drafts, role=ModelRole.DRAFT, num_steps=3, num_nodes=5)
    tokens = [num_slots + 1, 3 * num_slots, 5 * num_slots]
    predicted_s = sum(0.1 * (1.0 + 0.02 * each) for each in tokens) + 1.0 + 0.02 * 6 * num_slots
    costs.observe(StepPlan(step_id=0, passes=(tree, target)), predicted_s + 0.4, is_plain=False)
    assert costs.excess_s(num_slots)[3] == pytest.approx(0.4)
    assert costs.excess_s(num_slots)[0] == pytest.approx(0.1)  # of each pass as much
