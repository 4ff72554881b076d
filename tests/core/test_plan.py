import msgspec
import numpy as np
import pytest

from ridgeline.core.plan import (
    Admission,
    BlockCopy,
    BlockTableUpdate,
    ModelRole,
    Outputs,
    Pass,
    Segment,
    StepPlan,
    check_plan,
    earlier_pass,
    is_earlier_pass,
    is_reference,
    plans_back,
    referenced_output,
    step_in_flight,
)
from ridgeline.core.result import SegmentResult, StepResult, TokenLogprobs
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.core.wire import decode, encode

PLAN = StepPlan(
    step_id=7,
    passes=(
        Pass(
            role=ModelRole.DRAFT,
            num_steps=2,
            segments=(
                Segment(slot=0, start=4, stop=5, token_ids=(9,), outputs=Outputs(sample=True)),
            ),
        ),
        Pass(
            segments=(
                Segment(
                    slot=0,
                    start=4,
                    stop=7,
                    token_ids=(step_in_flight(3), earlier_pass(0), earlier_pass(1)),
                    num_drafts=2,
                    parents=(-1, -1),
                    block_updates=(BlockTableUpdate(group=0, first=1, blocks=(5, 6)),),
                    outputs=Outputs(sample=True, masked=True),
                ),
            )
        ),
    ),
    admissions=(
        Admission(
            slot=0,
            token_ids=(1, 2, 3, 4, 9),
            num_prompt_tokens=4,
            params=SamplingParams(logit_bias={3: 1.5}, stop=("x",), seed=2**64 - 1),
            seed=2**64 - 1,
        ),
    ),
    releases=(3,),
    copies=(BlockCopy(group=0, source=1, target=2),),
)


def test_plan_survives_the_wire():
    assert decode(encode(PLAN), StepPlan) == PLAN
    check_plan(PLAN)


def test_result_survives_the_wire():
    result = StepResult(
        step_id=7,
        passes=(
            (
                SegmentResult(
                    token_ids=(1,),
                    logprobs=(TokenLogprobs(token_id=1, logprob=-0.5, rank=1, top=((1, -0.5),)),),
                    logits=np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32),
                ),
            ),
        ),
    )
    back = decode(encode(result), StepResult)
    assert back.passes[0][0].logprobs == result.passes[0][0].logprobs
    assert np.array_equal(back.passes[0][0].logits, result.passes[0][0].logits)


@pytest.mark.parametrize("message", [b"", b"\x80", encode(PLAN)[:-3], encode({"step_id": "x"})])
def test_damaged_messages_are_refused(message):
    with pytest.raises(msgspec.DecodeError):
        decode(message, StepPlan)


def test_arrays_of_objects_are_not_received():
    sent = encode(SegmentResult()._replace(logits=["object", [1], b"12345678"]))
    with pytest.raises(msgspec.ValidationError, match="not accepted"):
        decode(sent, SegmentResult)


@pytest.mark.parametrize("output", [0, 1, 10_000, 2**24 - 1])
def test_references(output):
    made = [earlier_pass(output), *(step_in_flight(output, age) for age in (1, 2, 100))]
    assert step_in_flight(output) == made[1]
    for token, age in zip(made, (0, 1, 2, 100), strict=True):
        assert is_reference(token)
        assert token >= -(2**31)
        assert plans_back(token) == age
        assert is_earlier_pass(token) is (age == 0)
        assert referenced_output(token) == output
    assert not is_reference(output)
    assert not is_earlier_pass(output)


BAD_SEGMENTS = [
    {"start": 3, "stop": 3, "token_ids": ()},
    {"start": 0, "stop": 2, "token_ids": (1,)},
    {"start": 0, "stop": 2, "token_ids": (1, 2), "num_drafts": 2},
    {"start": 0, "stop": 2, "token_ids": (1, 2), "num_drafts": 1},  # drafts, but nothing sampled
    {"start": 0, "stop": 3, "token_ids": (1, 2, 3), "num_drafts": 2, "parents": (-1, 1),
     "outputs": Outputs(sample=True)},
]  # fmt: skip


@pytest.mark.skipif(not __debug__, reason="a plan is ours: asserts check it, which -O leaves out")
@pytest.mark.parametrize("fields", BAD_SEGMENTS)
def test_malformed_segments_fail_the_check(fields):
    plan = StepPlan(step_id=0, passes=(Pass(segments=(Segment(slot=0, **fields),)),))
    with pytest.raises(AssertionError):
        check_plan(plan)
