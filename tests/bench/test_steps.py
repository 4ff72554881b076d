"""Plans made by hand compute what the executor computes for any other plan."""

import pytest
from tests.tiny import GREEDY, WINDOWED, Driver, tiny_executor, tiny_model

from ridgeline.bench.cases import DecodeCase, PrefillCase, check_cases, make_cases
from ridgeline.bench.steps import PlanTimer, SlotBlocks
from ridgeline.bench.workloads import make_workloads
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ContextLengthError
from ridgeline.core.plan import ModelRole, check_plan
from ridgeline.executors import create_executor


@pytest.mark.parametrize("config", [None, WINDOWED])
def test_forked_sequences_decode_as_if_each_had_computed_its_prompt(config):
    model = tiny_model(config) if config else tiny_model()
    executor = tiny_executor(model=model)
    runner = PlanTimer(executor, chunk_tokens=5)
    prompt = runner.tokens(13)
    place = SlotBlocks(slots=range(3), first_block=2, blocks_each=6)
    for step in runner.prefill(place, 0, prompt, sample=False):
        check_plan(step.plan)
    runner.fork(place, prompt)
    oracle = Driver(tiny_executor(model=model))
    next_tokens = (7, 11, 13)
    expected = [oracle.decode(slot, [*prompt, t], 4) for slot, t in enumerate(next_tokens)]
    tokens, found = next_tokens, [[], [], []]
    for position in range(13, 17):
        step = runner.decode(place, position, tokens)
        check_plan(step.plan)
        tokens = [result.token_ids[0] for result in step.result.passes[0]]
        for sequence, token in zip(found, tokens, strict=True):
            sequence.append(token)
    assert found == expected


def test_a_prompt_is_computed_whole_each_time_it_is_run():
    model = tiny_model()
    runner = PlanTimer(tiny_executor(model=model), chunk_tokens=4)
    place = SlotBlocks(slots=range(1), first_block=0, blocks_each=4)
    for _ in range(2):  # the second run releases the slot of the first
        prompt = runner.tokens(10)
        steps = list(runner.prefill(place, 0, prompt, sample=True))
        assert [step.plan.num_tokens for step in steps] == [4, 4, 2]
        (last,) = steps[-1].result.passes[0]
        oracle = Driver(tiny_executor(model=model))
        assert list(last.token_ids) == oracle.decode(0, prompt, 1, GREEDY)
        assert not steps[0].result.passes[0][0].token_ids


def test_workloads_share_no_block_and_keep_to_their_positions_however_often_they_are_visited():
    cases = make_cases([6], [1, 3], [0, 5])
    model = tiny_model()
    executor = create_executor(
        {ModelRole.TARGET: model}, EngineConfig(executor="reference", block_tokens=4)
    )
    workloads = make_workloads(executor, cases, chunk_tokens=4, decode_steps=10)
    owned = []
    for workload in workloads:
        place = workload._place
        owned += [block for slot in place.slots for block in place.blocks(slot)]
        workload.prepare()
    assert len(owned) == len(set(owned))
    prefill, *decodes = workloads
    (sample,) = prefill.visit(0.0)
    assert sum(step.plan.num_tokens for step in sample) == 6
    for decode in decodes:
        first = max(decode.case.context, 1)
        # One step of each visit warms up; a visit without time still takes four.
        for seconds, count in ((0.0, 4), (1e9, 9), (1e9, 9)):
            samples = decode.visit(seconds)
            segments = [sample[0].plan.passes[0].segments[0] for sample in samples]
            assert [s.start for s in segments] == list(range(first + 1, first + 1 + count))


def test_cases_are_the_prompts_then_each_batch_at_each_context():
    names = [case.name for case in make_cases([512, 2048], [1, 8], [0, 4096])]
    assert names == ["prefill 512", "prefill 2048", "decode 1", "decode 8",
                     "decode 1 at 4096", "decode 8 at 4096"]  # fmt: skip


def test_a_case_beyond_the_models_positions_is_named():
    spec = tiny_model().spec
    check_cases([PrefillCase(prompt_tokens=256)], spec, decode_steps=8)
    with pytest.raises(ContextLengthError, match="decode 2 at 250"):
        check_cases([DecodeCase(batch=2, context=250)], spec, decode_steps=8)
