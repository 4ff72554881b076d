"""Accounted bytes and FLOPs against independent counts, over families, types and batches."""

from dataclasses import replace
from math import prod

import numpy as np
import pytest
from tests.every_op import models_of_all_kinds
from tests.parity.every_case import CASES, quick
from tests.parity.oracle import _model
from tests.roofline.counting import count
from tests.tiny import CONFIG, EXPERTS, LATENT, SINKS, WINDOWED, Driver, tiny_executor, tiny_model

from ridgeline.core.context_ranks import LEAST_TOKENS
from ridgeline.core.formats import float_format
from ridgeline.core.ops import (
    MLP,
    Attend,
    Embed,
    GatedDelta,
    GatherContext,
    GatherLogits,
    GatherRanges,
    GatherSplits,
    GatherTokens,
    Head,
    KeepFeatures,
    LayerEmbed,
    MoE,
    OutProject,
    QKVProject,
    ReadFeatures,
    SelectiveScan,
    ShortConv,
)
from ridgeline.core.parallel_layout import ParallelLayout
from ridgeline.core.plan import ModelRole, Outputs, Pass
from ridgeline.core.weight_uses import op_weights
from ridgeline.executors.handle import Handle
from ridgeline.executors.model import ExecutorModel
from ridgeline.executors.priced import priced_model
from ridgeline.models import describe, lower
from ridgeline.roofline import (
    PricedModel,
    account,
    decode_batch,
    pass_work,
    prefill_batch,
    price,
)
from ridgeline.roofline.batch import make_batch
from ridgeline.roofline.dataflow import buffers_of
from ridgeline.roofline.op_cost import op_work
from ridgeline.roofline.price import Phase
from ridgeline.weights import LoRAWeights, dummy_weights

PROMPT = [3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62, 64, 33]
BYTES = ("weight_bytes", "kv_read_bytes", "kv_write_bytes", "state_bytes", "activation_bytes")


def priced(model):
    return PricedModel(
        spec=model.spec,
        ops=model.ops,
        activations=float_format(str(model.dtype)),
        dense_attention=True,
    )


class _Recorder:
    """An executor that runs on the caller's thread, where the FLOP counter counts."""

    def __init__(self, executor):
        self._executor = executor
        self.plan = None

    def __getattr__(self, name):
        return getattr(self._executor, name)

    def submit(self, plan):
        self.plan = plan
        handle = Handle(plan)
        handle.future.set_result(self._executor._run_or_fail(handle))
        return handle


def check(monkeypatch, model, drive, *, prepare=None, adapters=None, adapter_bytes=0):
    """``adapters`` are those of slots; the counts do not see the bytes of their matrices."""
    recorder = _Recorder(tiny_executor(model=model))
    driver = Driver(recorder)
    if prepare is not None:
        prepare(driver)
    counts, result = count(monkeypatch, lambda: drive(driver))
    models = {ModelRole.TARGET: priced_model(model, "reference")}
    work = account(models, recorder.plan, result, adapters or {}).cost.work
    counts.weight_bytes += adapter_bytes
    for name in BYTES:
        assert getattr(work, name) == pytest.approx(getattr(counts, name), rel=0.01), name
    assert work.flops == pytest.approx(counts.flops, rel=0.01)
    assert result.experts_read == counts.experts_read


def start_two(driver):
    for slot, tokens in ((0, PROMPT), (1, PROMPT[:5])):
        driver.start(slot, tokens)


def decode_and_prefill(driver):
    """Two decodes, one of them verifying two drafts, and a prompt, in one batch."""
    return driver.run(
        driver.segment(0, len(PROMPT), [7]),
        driver.segment(1, 5, [7, 8, 9], num_drafts=2),
        driver.segment(2, 0, PROMPT, fresh=True, outputs=Outputs(sample=True, logits=True)),
        admissions=(driver.admit(2, PROMPT),),
    )


def family_model(case):
    """Random weights for a parity case, whose config transformers completes."""
    definition = describe(_model(case).config.to_dict())
    ops = lower(definition.spec)
    weights = dummy_weights(ops, dtype="float32", seed=0)
    return ExecutorModel(spec=definition.spec, ops=ops, weights=weights, dtype="float32")


@pytest.mark.parametrize("case", quick(CASES), ids=lambda case: case.id)
def test_every_family(case, monkeypatch):
    model = family_model(case)
    check(monkeypatch, model, decode_and_prefill, prepare=start_two)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
@pytest.mark.parametrize("config", [CONFIG, WINDOWED, EXPERTS, LATENT, SINKS])
def test_types(config, dtype, monkeypatch):
    model = tiny_model(config, dtype=dtype)
    check(monkeypatch, model, decode_and_prefill, prepare=start_two)


def test_adapters(monkeypatch):
    """Bytes of those that the batch uses, once; products of the tokens of their sequences."""
    model = tiny_model()
    shapes = {weight.name: weight.shape for op in model.ops for weight in op_weights(op)}

    def adapter(rank, *names):
        return {
            name: LoRAWeights(
                down=np.ones((rank, shapes[name][1])),
                up=np.ones((shapes[name][0], rank)),
            )
            for name in names
        }

    used = adapter(16, "layers.0.q", "layers.0.k", "layers.1.down")
    model = replace(model, adapters=(adapter(4, "layers.1.o"), used))

    def prepare(driver):
        driver.start(0, PROMPT, adapter=2)
        driver.start(1, PROMPT[:5])
        driver.start(3, PROMPT[:7], adapter=2)

    def drive(driver):
        return driver.run(
            driver.segment(0, len(PROMPT), [7]),
            driver.segment(1, 5, [7, 8, 9], num_drafts=2),
            driver.segment(3, 7, [7, 8]),
        )

    size = sum(each.down.nbytes + each.up.nbytes for each in used.values())
    check(monkeypatch, model, drive, prepare=prepare, adapters={0: 2, 3: 2}, adapter_bytes=size)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("context", [2, 40])
def test_decode(batch_size, context, monkeypatch):
    def prepare(driver):
        for slot in range(batch_size):
            driver.start(slot, [5] * context)

    def drive(driver):
        return driver.run(*(driver.segment(slot, context, [7]) for slot in range(batch_size)))

    check(monkeypatch, tiny_model(WINDOWED), drive, prepare=prepare)


def test_what_an_op_moves_is_what_it_reads_and_writes():
    """And of features those that the executor keeps; but for what looks up several tables, and
    exchanges of which a rank has a part."""
    batch, parts = decode_batch(3, 40), GatherTokens | GatherContext | GatherSplits | GatherRanges
    for spec, ops in models_of_all_kinds():
        model = PricedModel(spec=spec, ops=tuple(ops))
        for op in ops:
            if not isinstance(op, Embed | Head | GatherLogits | parts):
                read, written = buffers_of(op, spec.hidden_size)
                elements = sum(read.values()) + sum(written.values())
                elements += op.width if isinstance(op, KeepFeatures | ReadFeatures) else 0
                moved = op_work(op, batch, model).activation_bytes
                assert moved == pytest.approx(3 * elements * model.activation_bytes), op


def test_products_are_twice_the_elements_of_the_matrices_that_a_token_meets():
    """But for attention, which `tests/roofline/test_attention.py` counts, and the head."""
    batch = decode_batch(3, 40)
    for spec, ops in models_of_all_kinds():
        model = PricedModel(spec=spec, ops=tuple(ops))
        for op in ops:
            matrices = [
                weight.shape
                for weight in op_weights(op)
                if len(weight.shape) > 1 and "bias" not in weight.name  # of experts, a row for each
            ]
            match op:
                case LayerEmbed():
                    elements = prod(op.projection.shape)
                case ShortConv() | GatedDelta() | SelectiveScan():
                    elements = op.product_elements
                case MoE():  # of the stacks those that it chooses, or the share of them here
                    met = op.routing.top_k * op.up.shape[0] / op.router.shape[0]
                    elements = sum(
                        prod(shape[-2:]) * (met if len(shape) == 3 else 1) for shape in matrices
                    )
                case MLP() | QKVProject() | OutProject():
                    elements = sum(map(prod, matrices))
                case _:
                    continue
            assert op_work(op, batch, model).flops == pytest.approx(2 * 3 * elements), op


def test_replay_is_the_sum_of_its_steps():
    model = priced(tiny_model())
    driver = Driver(_Recorder(tiny_executor()))
    segment = driver.segment(0, 0, PROMPT, fresh=True)
    driver.run(
        passes=[Pass(segments=(segment,), num_steps=3)], admissions=(driver.admit(0, PROMPT),)
    )
    replay = price({ModelRole.TARGET: model}, driver.executor.plan)
    parts = []
    for start, count_ in ((0, len(PROMPT)), (len(PROMPT), 1), (len(PROMPT) + 1, 1)):
        driver.run(
            driver.segment(0, start, [3] * count_, fresh=start == 0),
            admissions=(driver.admit(0, PROMPT),) if start == 0 else (),
            releases=(0,) if start == 0 else (),
        )
        parts.append(price({ModelRole.TARGET: model}, driver.executor.plan).work)
    assert replay.work.num_bytes == pytest.approx(sum(part.num_bytes for part in parts))
    assert replay.work.flops == pytest.approx(sum(part.flops for part in parts))
    assert dict(replay.tokens) == {Phase.PREFILL: len(PROMPT), Phase.DECODE: 2}
    assert replay.by_phase[Phase.PREFILL] == parts[0]
    assert replay.by_phase[Phase.DECODE].flops == pytest.approx(parts[1].flops + parts[2].flops)


def test_experts_of_a_replay_that_was_cut_short():
    """Those that were read take the place of those expected of the steps that ran."""
    model = tiny_model(EXPERTS)
    driver = Driver(_Recorder(tiny_executor(model=model)))
    segment = driver.segment(0, 0, PROMPT, fresh=True)
    result = driver.run(
        passes=[Pass(segments=(segment,), num_steps=2)], admissions=(driver.admit(0, PROMPT),)
    )
    models, plan = {ModelRole.TARGET: priced(model)}, driver.executor.plan
    longer = replace(plan, passes=(replace(plan.passes[0], num_steps=6),))
    assert result.experts_read
    assert account(models, longer, result).cost == account(models, plan, result).cost


NARROW = {  # what a rank of two has of each configuration
    "dense": (CONFIG, {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 8}),
    "windowed": (WINDOWED, {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 8}),
    "one KV head": (CONFIG | {"num_key_value_heads": 1}, {"num_attention_heads": 3, "head_dim": 8}),
    "experts": (EXPERTS, {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 8}),
    "latent": (LATENT, {"num_attention_heads": 3, "num_key_value_heads": 3}),
}


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize(
    "batch", [decode_batch(3, 40), prefill_batch(LEAST_TOKENS)], ids=["decode", "prefill"]
)
def test_a_tensor_parallel_rank_is_priced_as_a_narrower_model(name, batch):
    """With half the heads, half the inner widths and half the rows of the head."""
    config, heads = NARROW[name]
    config = config | {"vocab_size": 152}
    halves = ("intermediate_size", "moe_intermediate_size", "vocab_size")
    narrow = config | heads | {key: config[key] // 2 for key in halves if key in config}
    models = []
    for each in (config, narrow):
        spec = describe(each).spec
        models.append(PricedModel(spec=spec, ops=lower(spec)))
    rank = replace(models[0], layout=ParallelLayout(tensor=2))
    work, alone = pass_work(rank, batch), pass_work(models[1], batch)
    for field in (*BYTES, "flops"):
        assert getattr(work, field) == pytest.approx(getattr(alone, field)), field
    # A rank sends its half of a ring's sum twice in each layer, and its logits once.
    layers, hidden_bytes = len(rank.spec.layers), 2 * rank.spec.hidden_size
    logits_bytes = 4 * batch.logit_rows * 76
    assert work.link_messages == 2 * layers + 1
    assert work.link_bytes == 2 * layers * batch.num_tokens * hidden_bytes + logits_bytes


def test_experts_on_several_ranks_send_each_token_there_and_back():
    """To each of its experts, and from it, but for those that this rank has."""
    spec = describe(EXPERTS).spec
    model = PricedModel(spec=spec, ops=lower(spec))
    shared = replace(model, layout=ParallelLayout(tensor=2, data=2, expert=4))
    apart = replace(model, layout=ParallelLayout(tensor=2))
    batch = decode_batch(3, 40)
    work, summed = pass_work(shared, batch), pass_work(apart, batch)
    ops = [op for op in model.ops if isinstance(op, MoE)]
    hidden_bytes = 3 * 2 * spec.hidden_size
    assert work.link_messages - summed.link_messages == len(ops)  # 2 for 1
    sent = sum(2 * op.routing.top_k * hidden_bytes * 3 / 4 for op in ops)
    all_reduce = len(ops) * 2 * hidden_bytes / 2
    assert work.link_bytes - summed.link_bytes == pytest.approx(sent - all_reduce)


@pytest.mark.parametrize(
    ("span", "part"), [((0, 2 * LEAST_TOKENS), 1 / 2), ((0, 2 * LEAST_TOKENS - 1), 1), ((9, 10), 1)]
)
def test_ranks_share_the_products_of_long_ranges_and_the_kv_of_all(span, part):
    spec = describe(CONFIG).spec
    alone = PricedModel(spec=spec, ops=lower(spec))
    rank, batch = replace(alone, layout=ParallelLayout(context=2)), make_batch([span])
    for op in alone.ops:
        whole, shared = (op_work(op, batch, model) for model in (alone, rank))
        assert shared.kv_write_bytes == whole.kv_write_bytes / 2
        if isinstance(op, QKVProject | MLP | OutProject):
            assert shared.flops == whole.flops * part > 0
            assert shared.weight_bytes == whole.weight_bytes
        if isinstance(op, Attend):
            assert shared.flops == whole.flops / 2
            # A rank reads all that a shared range sees, of others the half that it has.
            assert shared.kv_read_bytes == whole.kv_read_bytes * (1 if part < 1 else 1 / 2)


def test_phases_share_the_messages_of_a_step_by_their_tokens():
    """As they share the weights' bytes; what they send is each one's own."""
    spec = describe(CONFIG).spec
    rank = PricedModel(spec=spec, ops=lower(spec), layout=ParallelLayout(tensor=2))
    driver = Driver(_Recorder(tiny_executor()))
    driver.start(0, PROMPT)
    driver.run(
        driver.segment(0, len(PROMPT), [7]),
        driver.segment(1, 0, PROMPT[:3], fresh=True),
        admissions=(driver.admit(1, PROMPT[:3]),),
    )
    cost = price({ModelRole.TARGET: rank}, driver.executor.plan)
    assert dict(cost.tokens) == {Phase.DECODE: 1, Phase.PREFILL: 3}
    for phase, tokens in cost.tokens.items():
        part = cost.by_phase[phase]
        assert part.link_messages == cost.work.link_messages * tokens / 4 > 0
        assert part.weight_bytes == cost.work.weight_bytes * tokens / 4
    link_bytes = sum(part.link_bytes for part in cost.by_phase.values())
    assert link_bytes == pytest.approx(cost.work.link_bytes)


def test_causal_attention_is_half_the_square():
    spec = describe(CONFIG).spec
    batch = prefill_batch(100)
    dense = pass_work(PricedModel(spec=spec, ops=lower(spec), dense_attention=True), batch)
    causal = pass_work(PricedModel(spec=spec, ops=lower(spec)), batch)
    layers, width = len(spec.layers), 6 * 8
    assert dense.flops - causal.flops == 4 * layers * width * (100 * 100 - 100 * 101 // 2)
