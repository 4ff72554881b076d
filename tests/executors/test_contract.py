"""What every executor promises: each way of running a plan against plain decoding.

Run in float64 on the reference executor and on the CUDA executor with the CPU as its device, and in
float32 on the CPU executor, whose logits are then the same in every bit.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tests.executors.host_cuda import host_executor
from tests.tiny import (
    CONFIG,
    EXPERTS,
    LATENT,
    SINKS,
    WINDOWED,
    Driver,
    tiny_executor,
    tiny_model,
)

from ridgeline.core.errors import EngineError
from ridgeline.core.plan import (
    GROWN,
    BlockCopy,
    BlockTableUpdate,
    ModelRole,
    Outputs,
    Pass,
    Segment,
    earlier_pass,
    step_in_flight,
)
from ridgeline.core.pooling import Pooling
from ridgeline.core.protocols import Draft
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.decoding import ancestors
from ridgeline.executors.cpu.executor import CPUExecutor
from ridgeline.executors.model import ExecutorModel
from ridgeline.executors.runner import StepRunner
from ridgeline.kernels import reference as kernels
from ridgeline.kernels.cpu.library import native_kernels_run

PROMPT = [3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62, 64, 33]
LOGITS = Outputs(sample=True, logits=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.2)
BOTH_KINDS = pytest.mark.parametrize("params", [SamplingParams(temperature=0), SAMPLED])
ALL_MODELS = pytest.mark.parametrize(
    "config",
    [CONFIG, WINDOWED, EXPERTS, LATENT, SINKS],
    ids=["full", "windowed", "experts", "latent", "sinks"],
)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """An executor, what it runs in, and by how much its logits may differ."""

    make: Callable | None
    dtype: str = "float64"
    block_tokens: int = 4
    tolerance: float = 1e-6  # results are float32

    def model(self, config=CONFIG, **settings) -> ExecutorModel:
        return tiny_model(config, **{"dtype": self.dtype} | settings)

    def assert_same(self, got, wanted):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=self.tolerance)


REFERENCE, CUDA = Kind(make=None), Kind(make=host_executor)
CPU = Kind(make=CPUExecutor, dtype="float32", block_tokens=16, tolerance=0)
NATIVE = pytest.mark.skipif(not native_kernels_run(), reason="the native kernels are not built")


@pytest.fixture(
    params=[REFERENCE, CUDA, pytest.param(CPU, marks=NATIVE)], ids=["reference", "cuda", "cpu"]
)
def kind(request):
    return request.param


@pytest.fixture
def make(kind):
    """Makes drivers of one kind of executor: of a config, or with what `tiny_executor` takes."""
    made = []

    def driver(config=CONFIG, **settings):
        settings = {"block_tokens": kind.block_tokens, "make": kind.make} | settings
        made.append(tiny_executor(**{"model": kind.model(config)} | settings))
        return Driver(made[-1])

    yield driver
    for executor in made:
        executor.close()


@pytest.fixture
def driver(make):
    return make()


@ALL_MODELS
def test_chunked_equals_whole(kind, make, config):
    driver = make(config)
    whole = driver.start(0, PROMPT, outputs=LOGITS)
    driver.run(
        driver.segment(1, 0, PROMPT[:5], fresh=True, outputs=Outputs(logits=True)),
        admissions=(driver.admit(1, PROMPT),),
    )
    middle = driver.run(driver.segment(1, 5, PROMPT[5:6], outputs=Outputs(logits=True)))
    rest = driver.run(driver.segment(1, 6, PROMPT[6:], outputs=LOGITS)).passes[0][0]
    kind.assert_same(rest.logits, whole.logits[6:])
    kind.assert_same(middle.passes[0][0].logits, whole.logits[5:6])
    assert rest.token_ids == whole.token_ids


@ALL_MODELS
def test_batched_equals_alone(kind, make, config):
    driver = make(config)
    prompts = [PROMPT, PROMPT[:1], PROMPT[4:]]
    alone = [driver.start(0, prompt, outputs=LOGITS) for prompt in prompts]
    segments = [
        driver.segment(slot, 0, prompt, fresh=True, outputs=LOGITS)
        for slot, prompt in enumerate(prompts)
    ]
    admissions = tuple(driver.admit(slot, prompt) for slot, prompt in enumerate(prompts))
    together = driver.run(*segments, admissions=admissions, releases=(0,)).passes[0]
    for one, all_ in zip(alone, together, strict=True):
        kind.assert_same(one.logits, all_.logits)
        assert one.token_ids == all_.token_ids


@BOTH_KINDS
@ALL_MODELS
def test_replay_equals_single_steps(make, config, params):
    driver = make(config)
    expected = driver.decode(0, PROMPT, 8, params)
    segment = driver.segment(1, 0, PROMPT, fresh=True)
    result = driver.run(
        passes=[Pass(segments=(segment,), num_steps=8)],
        admissions=(driver.admit(1, PROMPT, params),),
    )
    assert list(result.passes[0][0].token_ids) == expected


def test_replay_stops_when_told(driver):
    """The step before waits for a mask, so the abort comes before the replay begins."""
    driver.start(1, PROMPT)
    masked = Outputs(sample=True, masked=True)
    blocking = driver.submit(driver.segment(1, len(PROMPT), [5], outputs=masked))
    segment = driver.segment(0, 0, PROMPT, fresh=True)
    handle = driver.submit(
        passes=[Pass(segments=(segment,), num_steps=40)], admissions=(driver.admit(0, PROMPT),)
    )
    handle.abort()
    blocking.set_masks({(0, 0): np.full((1, 5), 2**32 - 1, dtype=np.uint32)})
    result = handle.result()
    assert result.aborted
    assert len(result.passes[0][0].token_ids) == 1


def test_closing_ends_a_step_that_waits_for_masks(make):
    driver = make()
    driver.start(0, PROMPT)
    masked = Outputs(sample=True, masked=True)
    handle = driver.submit(driver.segment(0, len(PROMPT), [5], outputs=masked))
    driver.executor.close()
    with pytest.raises(EngineError, match="waited for masks"):
        handle.result()


def test_a_segment_whose_token_was_not_yielded_is_void(driver):
    """The next step assumed that both drafts would be accepted; one was wrong."""
    expected = driver.decode(0, PROMPT, 5)
    driver.start(1, PROMPT)
    driver.start(2, PROMPT)
    drafts = [expected[1], (expected[2] + 1) % 151]
    verify = driver.segment(1, len(PROMPT), [expected[0], *drafts], num_drafts=2)
    first = driver.submit(verify, driver.segment(2, len(PROMPT), expected[:1]))
    hopeful = driver.segment(1, len(PROMPT) + 3, [step_in_flight(2)])
    second = driver.submit(hopeful, driver.segment(2, len(PROMPT) + 1, [step_in_flight(3)]))
    assert first.result().passes[0][0].token_ids == tuple(expected[1:3])
    void, other = second.result().passes[0]
    assert void.token_ids == ()
    assert other.token_ids == (expected[2],)
    again = driver.run(driver.segment(1, len(PROMPT) + 2, [expected[2]])).passes[0][0]
    assert again.token_ids == (expected[3],)


def test_a_sequence_without_a_possible_token_does_not_fail_the_step(driver):
    driver.start(0, PROMPT)
    expected = driver.decode(1, PROMPT, 2)
    masked = Outputs(sample=True, masked=True)
    handle = driver.submit(
        driver.segment(0, len(PROMPT), [5], outputs=masked),
        driver.segment(1, len(PROMPT) + 1, expected[1:]),
    )
    handle.set_masks({(0, 0): np.zeros((1, 5), dtype=np.uint32)})
    barred, other = handle.result().passes[0]
    assert barred.token_ids == ()
    assert len(other.token_ids) == 1


@BOTH_KINDS
@ALL_MODELS
@pytest.mark.parametrize("wrong_at", [0, pytest.param(1, marks=pytest.mark.slow), 3, None])
def test_chain_verification_changes_nothing(make, config, params, wrong_at):
    driver = make(config)
    expected = driver.decode(0, PROMPT, 10, params)
    drafts = expected[1:5]
    if wrong_at is not None:
        drafts[wrong_at] = (drafts[wrong_at] + 1) % 151
    first = driver.start(1, PROMPT, params)
    assert list(first.token_ids) == expected[:1]
    tokens = [*expected[:1]]
    segment = driver.segment(1, len(PROMPT), [tokens[-1], *drafts], num_drafts=4)
    result = driver.run(segment).passes[0][0]
    accepted = 4 if wrong_at is None else wrong_at
    assert result.accepted == tuple(range(accepted))
    tokens += result.token_ids
    while len(tokens) < 10:  # the KV of rejected drafts is written over
        position = len(PROMPT) + len(tokens) - 1
        tokens += driver.run(driver.segment(1, position, [tokens[-1]])).passes[0][0].token_ids
    assert tokens == expected


@BOTH_KINDS
@ALL_MODELS
def test_tree_verification_changes_nothing(make, config, params):
    """The right path lies scattered among wrong branches; its KV must end up in order."""
    driver = make(config)
    expected = driver.decode(0, PROMPT, 12, params)
    driver.start(1, PROMPT, params)
    wrong = [(token + 7) % 151 for token in expected]
    #          0          1            2            3          4            5
    drafts = [wrong[1], expected[1], wrong[2], expected[2], wrong[3], expected[3]]
    parents = (-1, -1, 0, 1, 3, 3)
    segment = driver.segment(1, len(PROMPT), [expected[0], *drafts], num_drafts=6, parents=parents)
    result = driver.run(segment).passes[0][0]
    assert result.accepted == (1, 3, 5)
    assert list(result.token_ids) == expected[1:5]
    tokens = expected[:5]
    while len(tokens) < 12:
        position = len(PROMPT) + len(tokens) - 1
        tokens += driver.run(driver.segment(1, position, [tokens[-1]])).passes[0][0].token_ids
    assert tokens == expected


@BOTH_KINDS
@ALL_MODELS
def test_what_would_be_drawn_after_each_draft_is_told_where_it_is_asked(make, config, params):
    driver = make(config)
    (first,) = driver.start(0, PROMPT, params).token_ids
    drafts, parents = [10, 20, 30, 40], (-1, 0, 0, 2)
    wanted = Outputs(sample=True, drawn=True)
    told = driver.run(
        driver.segment(
            0, len(PROMPT), [first, *drafts], num_drafts=4, parents=parents, outputs=wanted
        )
    ).passes[0][0]
    for node, path in enumerate([[], [10], [10, 20], [10, 30], [10, 30, 40]]):
        alone = driver.start(1, [*PROMPT, first, *path], params, num_prompt_tokens=len(PROMPT))
        driver.run(passes=[], releases=(1,)) if node < 4 else None
        assert told.drawn[node] == alone.token_ids[0]


@BOTH_KINDS
@ALL_MODELS
def test_a_grown_tree_has_what_would_be_drawn_after_each_of_its_tokens(kind, make, config, params):
    """Where a token has others after it, the first of them is what the model draws there; and the
    target's pass of the same step verifies the tree."""
    model = kind.model(config)
    driver = make(config, draft=model)
    expected = driver.decode(1, PROMPT, 8, params)
    driver.start(0, PROMPT, params)
    prompt = driver.segment(0, 0, [*PROMPT, expected[0]], fresh=True)
    tokens = [expected[0], *map(earlier_pass, range(6))]
    verified = driver.segment(0, len(PROMPT), tokens, num_drafts=6, parents=(GROWN,) * 6)
    drafting = Pass(segments=(prompt,), role=ModelRole.DRAFT, num_steps=3, num_nodes=6)
    result = driver.run(passes=(drafting, Pass(segments=(verified,))))
    (tree,), (outcome,) = result.passes
    draft = Draft(token_ids=tree.token_ids, parents=tree.parents)
    assert len(draft.token_ids) == 6
    assert draft.num_steps <= 3
    for node in {-1, *draft.parents}:
        path = [draft.token_ids[each] for each in ancestors(draft.parents, node)]
        drawn = driver.start(2, [*PROMPT, expected[0], *path], params, num_prompt_tokens=13)
        assert draft.token_ids[draft.parents.index(node)] == drawn.token_ids[0]
    depth = len(outcome.accepted)
    assert depth >= 1  # the draft is the target
    assert list(outcome.token_ids) == expected[1 : 2 + depth]


@ALL_MODELS
def test_tree_nodes_see_only_their_ancestors(kind, make, config):
    """The logits of each node equal those of its path alone."""
    driver = make(config)
    driver.start(0, PROMPT)
    drafts, parents = [10, 20, 30, 40], (-1, 0, 0, 2)
    tree = driver.run(
        driver.segment(0, len(PROMPT), [5, *drafts], num_drafts=4, parents=parents, outputs=LOGITS)
    ).passes[0][0]
    for node, path in enumerate([[10], [10, 20], [10, 30], [10, 30, 40]]):
        alone = driver.start(1, [*PROMPT, 5, *path], outputs=LOGITS)
        driver.run(passes=[], releases=(1,)) if node < 3 else None
        kind.assert_same(tree.logits[node + 1], alone.logits[-1])


@BOTH_KINDS
def test_draft_pass_feeds_the_verification(kind, make, params):
    draft = kind.model(CONFIG | {"num_hidden_layers": 1}, seed=1)
    for drafter in (kind.model(), draft):  # one that agrees with the target, and one that does not
        driver = make(draft=drafter)
        expected = driver.decode(0, PROMPT, 6, params)
        (first, *_) = driver.start(1, PROMPT, params).token_ids
        whole = Segment(
            slot=1,
            start=0,
            stop=len(PROMPT) + 1,
            token_ids=(*PROMPT, first),
            outputs=Outputs(sample=True),
            block_updates=(BlockTableUpdate(group=0, first=0, blocks=tuple(range(16))),),
        )
        verify = driver.segment(
            1, len(PROMPT), [first, *(earlier_pass(i) for i in range(4))], num_drafts=4
        )
        result = driver.run(
            passes=[
                Pass(role=ModelRole.DRAFT, segments=(whole,), num_steps=4),
                Pass(segments=(verify,)),
            ]
        )
        drafted, verified = result.passes[0][0], result.passes[1][0]
        agreed = len(verified.accepted)
        assert drafted.token_ids[:agreed] == verified.token_ids[:agreed]
        assert [first, *verified.token_ids] == expected[: agreed + 2]
        if drafter is not draft:
            assert agreed == 4


def test_a_step_may_use_the_token_of_the_step_in_flight(driver):
    expected = driver.decode(0, PROMPT, 3)
    segments = [
        driver.segment(1, 0, PROMPT[:4], fresh=True),
        driver.segment(2, 0, PROMPT, fresh=True),
    ]
    admissions = (driver.admit(1, PROMPT[:4]), driver.admit(2, PROMPT))
    handles = [driver.submit(*segments, admissions=admissions)]
    for step in range(2):
        reference = step_in_flight(1 if step == 0 else 0)
        handles.append(driver.submit(driver.segment(2, len(PROMPT) + step, [reference])))
    results = [handle.result() for handle in handles]
    assert results[0].passes[0][1].token_ids == (expected[0],)
    assert [result.passes[0][0].token_ids[0] for result in results[1:]] == expected[1:]


@pytest.mark.parametrize(
    "kind", [REFERENCE, pytest.param(CPU, marks=NATIVE)], ids=["reference", "cpu"]
)
def test_references_reach_back_as_far_as_plans_may_be_in_flight(make, monkeypatch):
    monkeypatch.setattr(StepRunner, "max_in_flight", 4)
    driver = make()
    expected = driver.decode(0, PROMPT, 4)
    first = driver.segment(1, 0, PROMPT, fresh=True)
    driver.submit(first, admissions=(driver.admit(1, PROMPT),))
    for step in range(2):
        position = len(PROMPT) + step
        driver.submit(driver.segment(0, position, [expected[step]]))
    last = driver.submit(
        driver.segment(0, len(PROMPT) + 2, [step_in_flight(0)]),
        driver.segment(1, len(PROMPT), [step_in_flight(0, plans_back=3)]),
    )
    (slot0, slot1) = last.result().passes[0]
    assert slot0.token_ids == (expected[3],)
    assert slot1.token_ids == (expected[1],)


def test_block_copy_and_table_replacement(kind, driver):
    """A fork that copies its partial block goes on alone and leaves the original as it was."""
    expected = driver.decode(0, PROMPT, 4)
    other = driver.start(1, [*PROMPT, 99]).token_ids
    partial = len(PROMPT) // kind.block_tokens
    shared, copied = range(partial), 60
    admission = driver.admit(2, [*PROMPT, 99])
    fork = Segment(
        slot=2,
        start=len(PROMPT),
        stop=len(PROMPT) + 1,
        token_ids=(99,),
        outputs=Outputs(sample=True),
        block_updates=(BlockTableUpdate(group=0, first=0, blocks=(*shared, copied)),),
    )
    copy = BlockCopy(group=0, source=partial, target=copied)
    result = driver.run(fork, admissions=(admission,), copies=(copy,))
    assert result.passes[0][0].token_ids == other
    again = driver.run(driver.segment(0, len(PROMPT), [expected[0]])).passes[0][0]
    assert again.token_ids == (expected[1],)


@ALL_MODELS
def test_exported_blocks_are_read_by_another_executor(make, config):
    first, second = make(config), make(config)
    expected = first.decode(0, PROMPT, 3)
    assert first.executor.kv_layout() == second.executor.kv_layout()
    blocks = list(range(16))
    for group, size in enumerate(first.executor.kv_layout().block_bytes):
        data = first.executor.export_blocks(group, blocks)
        assert len(data) == size * len(blocks)
        second.executor.import_blocks(group, blocks, data)
        with pytest.raises(ValueError, match="blocks"):
            second.executor.import_blocks(group, blocks, data[:-1])
    known = [*PROMPT, expected[0]]
    segment = second.segment(0, len(PROMPT), expected[:1], fresh=True)
    result = second.run(segment, admissions=(second.admit(0, known),))
    assert result.passes[0][0].token_ids == (expected[1],)


def test_layout_digest_tells_formats_apart(kind, make):
    digests = {
        make(model=kind.model(config, dtype=dtype), block_tokens=size).executor.kv_layout().digest
        for config in (CONFIG, WINDOWED)
        for dtype in ("float32", "bfloat16")
        for size in (kind.block_tokens, 2 * kind.block_tokens)
    }
    assert len(digests) == 8


def test_masks_bind_each_row(driver):
    driver.start(0, PROMPT)
    allowed = [7, 8, 150]
    masks = np.zeros((2, 5), dtype=np.uint32)
    for row, tokens in enumerate([allowed[:1], allowed[1:]]):
        for token in tokens:
            masks[row, token // 32] |= np.uint32(1 << token % 32)
    segment = driver.segment(
        0, len(PROMPT), [5, 7], num_drafts=1, outputs=Outputs(sample=True, masked=True)
    )
    handle = driver.submit(segment)
    with pytest.raises(EngineError, match="masks"):
        handle.result()
    handle.set_masks({(0, 0): masks})
    result = handle.result().passes[0][0]
    assert result.accepted == (0,)
    assert result.token_ids[0] == 7
    assert result.token_ids[1] in (8, 150)


def test_pooled_is_the_last_hidden_state(driver):
    outputs = Outputs(pooled=Pooling.LAST)
    whole = driver.start(0, PROMPT, outputs=outputs)
    assert whole.pooled.shape == (48,)
    assert whole.token_ids == ()
    shorter = driver.start(1, PROMPT[:-1], outputs=outputs)
    assert not np.allclose(whole.pooled, shorter.pooled)


def test_prompt_logprobs_are_those_of_the_logits(driver):
    params = SamplingParams(temperature=0, prompt_logprobs=2, logprobs=0)
    outputs = Outputs(sample=True, prompt_logprobs=True, logits=True)
    result = driver.start(0, PROMPT, params, outputs=outputs)
    logprobs = torch.from_numpy(result.logits).double().log_softmax(-1)
    assert [entry.token_id for entry in result.prompt_logprobs] == PROMPT[1:]
    for row, entry in enumerate(result.prompt_logprobs):
        assert entry.logprob == pytest.approx(float(logprobs[row, entry.token_id]), abs=1e-5)
        assert len(entry.top) == 2
    (chosen,) = result.logprobs
    assert chosen.token_id == result.token_ids[0] == int(logprobs[-1].argmax())


def test_a_failing_step_raises_from_result(driver):
    handle = driver.submit(driver.segment(9, 0, PROMPT))  # a slot that was never admitted
    with pytest.raises(EngineError, match="KeyError"):
        handle.result()


def test_both_forms_of_latent_attention_give_the_same_logits(kind, make, monkeypatch):
    """Whichever the executor chooses: plain for all, absorbed for all, or by cost."""
    if kind is CPU:
        pytest.skip("the native kernels have the absorbed form alone")
    logits = []
    for absorbed in (False, True, None):
        if absorbed is not None:
            monkeypatch.setattr(kernels, "absorbing_is_cheaper", lambda a=absorbed, **_: a)
        driver = make(LATENT)
        prompt = driver.start(0, PROMPT, outputs=LOGITS).logits
        decoded = driver.run(driver.segment(0, len(PROMPT), [7], outputs=LOGITS)).passes[0][0]
        logits.append(np.concatenate([prompt, decoded.logits]))
        monkeypatch.undo()
    for other in logits[1:]:
        kind.assert_same(other, logits[0])
