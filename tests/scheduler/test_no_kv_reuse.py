"""Without reuse of K and V every token computes its whole context, and is the same token."""

import pytest
from tests.fakes import FakeExecutor
from tests.scheduler.test_scheduler import expected_output, make, request
from tests.tiny import CONFIG

from ridgeline import LLM, SamplingParams
from ridgeline.core.config import EngineConfig, resolve
from ridgeline.models import describe


def drive(scheduler, executor):
    """Run everything; the ranges that were computed of each slot's sequence, step by step."""
    ranges, flights = [], []
    while True:
        plan = scheduler.schedule()
        if plan is not None:
            flights.append((plan, executor.submit(plan).result()))
            segments = plan.passes[0].segments
            ranges.append([(each.start, each.stop, each.outputs.sample) for each in segments])
        elif not flights:
            return ranges
        if plan is None or len(flights) == 2:
            scheduler.update(*flights.pop(0))
            scheduler.check_integrity()


def test_a_token_takes_its_whole_context():
    scheduler = make(reuse_kv=False, max_num_batched_tokens=64)
    (sequence,) = scheduler.add(request(1, range(10), max_tokens=5))
    ranges = drive(scheduler, FakeExecutor(block_tokens=4))
    assert ranges == [[(0, 10 + number, True)] for number in range(5)]
    assert sequence.token_ids[10:] == expected_output(sequence.request, 0, 64)
    assert scheduler.num_preemptions == 0


@pytest.mark.parametrize("windows", [(None,), (8,), (None, 8)])
def test_outputs_are_the_same_in_chunks_with_others_and_with_samples(windows):
    """A chunk may end just before the last known token, which is no token yet."""
    num_blocks = (64,) * len(windows)
    scheduler = make(
        reuse_kv=False, max_num_batched_tokens=7, num_blocks=num_blocks, windows=windows
    )
    executor = FakeExecutor(windows=windows)
    requests = [
        request(1, range(15)),
        request(2, range(40, 48), n=3),
        request(3, [9], max_tokens=20),
    ]
    sequences = [each for one in requests for each in scheduler.add(one)]
    ranges = [each for step in drive(scheduler, executor) for each in step]
    for each in sequences:
        window = 1000 if None in windows else 8
        wanted = expected_output(each.request, each.sample_index, 64, window)
        assert each.token_ids[each.num_prompt_tokens :] == wanted
    # No sequence ever starts behind what this turn has computed of it.
    assert sum(stop - start for start, stop, _ in ranges) == sum(
        each.num_prompt_tokens + number
        for each in sequences
        for number in range(each.request.params.max_tokens)
    )


@pytest.mark.parametrize("executor", ["cpu", "reference"])
def test_the_engine_says_the_same_and_on_cpu_bit_for_bit(model_folder, executor):
    prompts = ["the cat sat", "on the mat " * 6]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
    found = []
    for reuse_kv in (True, False):
        with LLM(str(model_folder), executor=executor, dtype="float32", reuse_kv=reuse_kv) as llm:
            found.append([output.outputs for output in llm.generate(prompts, params)])
            assert llm.config.enable_prefix_caching is reuse_kv
    kept, anew = found
    if executor == "reference":  # whose products are only close for another number of rows
        kept, anew = ([[each.token_ids for each in one] for one in side] for side in found)
    assert kept == anew


def test_no_prefix_is_cached():
    config = EngineConfig(reuse_kv=False, kv_cache_memory_bytes=1 << 30)
    resolved = resolve(
        config,
        spec=describe(CONFIG).spec,
        executor="cpu",
        dtype="float32",
        block_bytes=(1 << 10,),
        free_bytes=0,
    )
    assert not resolved.enable_prefix_caching
