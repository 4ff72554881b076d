"""What is predicted of a sequence, from the steps and the outputs that were seen."""

import math

import pytest
from tests.scheduler.simulation import Simulation, make_request

from ridgeline.core.plan import ModelRole, Pass, Segment, StepPlan
from ridgeline.scheduler import LinearPredictor
from ridgeline.scheduler.prediction import (
    CorrectedPredictor,
    CurvePredictor,
    StepBudget,
    StepCurve,
)

PREDICTOR = LinearPredictor(pass_s=0.01, token_s=0.0)


def step(num_steps=1) -> StepPlan:
    return StepPlan(step_id=0, passes=(Pass(num_steps=num_steps, segments=()),))


def new_sequence(**settings):
    (sequence,) = Simulation().scheduler.add(make_request(0, 0.0, **settings))
    return sequence


@pytest.mark.parametrize(("output", "num_tokens"), [(5, 5), (1000, 20), (None, 20)])
def test_an_output_is_expected_to_be_as_long_as_others_within_its_limit(output, num_tokens):
    predictor = CorrectedPredictor(PREDICTOR)
    predictor.observe(step(), 0.01)
    for _ in range(200):
        predictor.observe_output(20)
    expected_s = (num_tokens - 1) * 0.01
    assert predictor.remaining_s(new_sequence(output=output)) == pytest.approx(expected_s)


def test_before_a_step_was_seen_a_segment_takes_what_is_predicted_and_the_rest_is_unknown():
    predictor = CorrectedPredictor(LinearPredictor(pass_s=9.0, token_s=2.0, pair_s=1.0))
    assert not predictor.is_calibrated
    assert predictor.segment_s(2, 3) == 2 * 2 + (4 + 5)
    assert predictor.fixed_s == predictor.remaining_s(new_sequence()) == 0


def test_what_was_granted_leaves_fewer_seconds_for_others():
    predictor = CorrectedPredictor(LinearPredictor(pass_s=9.0, token_s=0.125))
    budget = StepBudget(20, seconds=1.0, predictor=predictor)
    assert budget.grant(20, 0) == 8
    budget.spend_seconds(3, 0)
    assert budget.grant(20, 0) == 5
    budget.unbounded()
    assert budget.grant(30, 0) == 20


def test_a_replayed_plan_counts_as_its_steps():
    predictor = CorrectedPredictor(PREDICTOR)
    for _ in range(50):
        predictor.observe(step(num_steps=16), 0.16)
    assert predictor.remaining_s(new_sequence(output=11)) == pytest.approx(0.1)


@pytest.mark.parametrize("num_steps", [1, 16])
def test_what_a_step_takes_beside_its_segments_is_that_of_one_step_of_a_replay(num_steps):
    predictor = LinearPredictor(pass_s=0.01, token_s=0.002, draft_share=0.5)
    segments = tuple(Segment(slot=slot, start=8, stop=9, token_ids=(1,)) for slot in range(3))
    draft = Pass(segments=segments, role=ModelRole.DRAFT)
    for passes, fixed_s in (((), 0.01), ((draft,), 0.01 + 0.5 * 0.016 / num_steps)):
        plan = StepPlan(step_id=0, passes=(*passes, Pass(segments=segments, num_steps=num_steps)))
        corrected = CorrectedPredictor(predictor)
        corrected.observe(plan, predictor.seconds(plan))
        assert corrected.fixed_s == pytest.approx(fixed_s)


def test_of_short_steps_few_are_predicted():
    plans = []

    class CountedPredictor(LinearPredictor):
        def seconds(self, plan):
            plans.append(plan)
            return super().seconds(plan)

    predictor = CorrectedPredictor(CountedPredictor(pass_s=0.01, token_s=0.0))
    for _ in range(1000):
        predictor.observe(step(), 0.001)
    assert 15 <= len(plans) <= 25  # one in 50 ms
    assert predictor.fixed_s == pytest.approx(0.001)
    assert predictor.remaining_s(new_sequence(output=11)) == pytest.approx(0.01)


def test_a_draft_model_takes_its_share():
    predictor = LinearPredictor(pass_s=0.01, token_s=0.001, draft_share=0.1)
    segment = Segment(slot=0, start=0, stop=2, token_ids=(1, 1))
    passes = [Pass(segments=(segment,), role=role) for role in (ModelRole.DRAFT, ModelRole.TARGET)]
    seconds = [predictor.seconds(StepPlan(step_id=0, passes=(each,))) for each in passes]
    assert seconds == pytest.approx([0.0012, 0.012])


def test_tokens_attend_to_all_before_them_and_to_themselves():
    predictor = LinearPredictor(pass_s=9.0, token_s=2.0, pair_s=1.0)
    assert predictor.segment_seconds(2, 3) == 2 * 2 + (4 + 5)


def test_a_curve_is_linear_between_its_points_and_beyond_them():
    curve = StepCurve(tokens=(1, 4, 8), seconds=(1.0, 4.0, 6.0), context_s=0.5)
    assert [curve.step_s(n, 0) for n in (1, 2, 4, 6, 8, 12)] == [1, 2, 4, 5, 6, 8]
    assert curve.step_s(2, 3) == 2 + 3 * 0.5
    predictor = CurvePredictor(curve=curve, pair_s=0.25)
    assert predictor.segment_seconds(1, 6) == (2 - 1) + 6 * 0.5
    assert predictor.segment_seconds(4, 6) == (4 - 1) + 4 * 6 * 0.25
    bounds = ((6, 7), (3, 7))
    segments = tuple(Segment(0, start, stop, (1,) * (stop - start)) for start, stop in bounds)
    passes = (Pass(segments=segments, num_steps=2),)
    assert predictor.seconds(StepPlan(step_id=0, passes=passes)) == 2 * (4.5 + 6 * 0.5 + 12 * 0.25)


def test_a_curve_begins_at_one_token_and_never_takes_no_time():
    StepCurve(tokens=(1, 2), seconds=(1.0, 1.0), context_s=0.0)
    for tokens, seconds, context_s in (
        ((1,), (1.0,), 0.0),
        ((1, 2), (1.0, 1.0, 2.0), 0.0),
        ((2, 3), (1.0, 1.0), 0.0),
        ((1, 2, 2), (1.0, 1.0, 1.0), 0.0),
        ((1, 2), (0.0, 1.0), 0.0),
        ((1, 2), (1.0, math.inf), 0.0),
        ((1, 2, 3), (1.0, 3.0, 2.0), 0.0),
        ((1, 2), (1.0, 1.0), -1.0),
        ((1, 2), (1.0, 1.0), math.inf),
    ):
        with pytest.raises(ValueError, match="needs two steps"):
            StepCurve(tokens=tokens, seconds=seconds, context_s=context_s)


def test_a_curve_of_a_linear_predictor_says_the_same_of_decodes():
    linear = LinearPredictor(pass_s=0.01, token_s=0.002, pair_s=1e-5)
    curve = StepCurve.of_linear(linear)
    for num_tokens, context in ((1, 0), (2, 30), (7, 500), (64, 0)):
        seconds = linear.pass_s + linear.token_s * num_tokens + linear.pair_s * context
        assert curve.step_s(num_tokens, context) == pytest.approx(seconds)
        assert curve.slower(3.0).step_s(num_tokens, context) == pytest.approx(3 * seconds)
    assert StepCurve.of_linear(LinearPredictor(pass_s=0.0, token_s=0.0)).step_s(9, 0) > 0
