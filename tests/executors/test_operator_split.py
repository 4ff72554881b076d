"""Attention and feed-forward networks on two ranks give the bits of one process, and exchange what
is priced."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.executors.rank_threads import Together, on_executor
from tests.executors.test_ranks import PROMPT, _assert_same, _config, _model, _plain
from tests.parity.every_case import CASES, quick
from tests.tiny import CONFIG, EXPERTS, LATENT

from ridgeline.core.cache_groups import kv_groups
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import SettingsError
from ridgeline.core.formats import on_load_format
from ridgeline.core.parallel_layout import ParallelLayout
from ridgeline.core.plan import ModelRole
from ridgeline.core.weight_uses import op_weights
from ridgeline.executors.cpu.executor import CPUExecutor
from ridgeline.executors.distributed.stages import layout_of
from ridgeline.executors.priced import priced_model
from ridgeline.executors.reference.executor import ReferenceExecutor
from ridgeline.models import describe, lower, shard
from ridgeline.roofline.batch import make_batch
from ridgeline.roofline.op_cost import op_work
from ridgeline.roofline.work import total

SPLIT = ParallelLayout(splits_operators=True)
TEXT_CASES = [case for case in CASES if "vision" not in case.name]


@pytest.mark.parametrize("case", quick(TEXT_CASES), ids=lambda case: f"{case.family}-{case.name}")
def test_every_family_gives_the_same_bits(case):
    model = _model(_config(case))
    expected = on_executor(CPUExecutor({ModelRole.TARGET: model}, 16), _plain)
    _assert_same(on_executor(_Split(model), _plain), expected)


class _Split(Together):
    """Of which the rank that has attention says what comes of a plan."""

    def __init__(self, model, **options):
        super().__init__(model, SPLIT, **options)

    def submit(self, plan):
        first, _ = [executor.submit(plan) for executor in self.executors]
        return first


@pytest.mark.parametrize("form", [None, "int8", "int4"])
@pytest.mark.parametrize("config", [CONFIG, EXPERTS, LATENT], ids=["dense", "experts", "latent"])
def test_every_format_gives_the_same_bits_and_what_is_sent_is_priced(form, config):
    model = _model(config, "bfloat16", quantization=on_load_format(form))
    expected = on_executor(CPUExecutor({ModelRole.TARGET: model}, 16), _plain)
    _assert_same(on_executor(_Split(model), _plain), expected)
    split = _Split(model)
    priced = [priced_model(part, "cpu") for part in split.parts]
    on_executor(split, _prompt_and_token)
    spans = [make_batch([span]) for span in ((0, 13), (13, 14))]
    work = [
        total([op_work(op, span, each) for span in spans for op in each.ops]) for each in priced
    ]
    counted = [group.counts() for group in split.groups]
    assert [calls for _, calls in counted] == [each.link_messages for each in work]
    assert [sent for sent, _ in counted] == pytest.approx([each.link_bytes for each in work])


def _prompt_and_token(driver):
    driver.start(0, PROMPT)
    driver.run(driver.segment(0, 13, [7]))


def test_the_reference_executor_runs_both_parts():
    model = _model(EXPERTS, "float64")

    def make(models, block_tokens):
        return ReferenceExecutor(models, block_tokens)

    expected = on_executor(make({ModelRole.TARGET: model}, 16), _plain)
    with ThreadPoolExecutor(2) as threads:  # whose steps wait for each other
        split = _Split(model, make=make)
        running = [threads.submit(on_executor, each, _plain) for each in split.executors]
        for each in running:
            _assert_same(each.result(), expected)


def test_each_rank_reads_its_own_weights_alone_and_one_keeps_k_and_v():
    spec = describe(EXPERTS).spec
    attention, networks = (shard(spec, SPLIT, rank) for rank in range(2))
    names = [{w.name for op in part.ops for w in op_weights(op)} for part in (attention, networks)]
    assert not names[0] & names[1]
    assert names[0] | names[1] == {w.name for op in lower(spec) for w in op_weights(op)}
    assert {name.split(".")[-1] for name in names[1]} == {"router", "gate", "up", "down"}
    sizes = [
        [group.elements_per_token for group in kv_groups(part.spec)]
        for part in (attention, networks)
    ]
    assert sizes[0] == [group.elements_per_token for group in kv_groups(spec)]
    assert sizes[1] == [0] * len(sizes[0])


@pytest.mark.parametrize(
    "other",
    [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"expert_parallel_size": 2}],
)
def test_it_goes_with_no_other_layout(other):
    config = EngineConfig(split_feed_forward=True, **other)
    with pytest.raises(SettingsError, match="does not work with split_feed_forward"):
        layout_of(_model(EXPERTS), config, "cpu")
