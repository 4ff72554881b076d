"""Per-layer embeddings (Gemma 4) beyond logits: other executors, ranks, prices, memory."""

from dataclasses import replace

import numpy as np
import pytest
from tests.executors.host_cuda import host_executor
from tests.parity.new_dense_cases import NEW_DENSE_CASES
from tests.parity.ours import run
from tests.tiny import Driver

from ridgeline.core.errors import SettingsError, UnsupportedModelError
from ridgeline.core.formats import number_format
from ridgeline.core.ops import LayerEmbed, LayerInput
from ridgeline.core.parallel_layout import ParallelLayout
from ridgeline.core.plan import ModelRole, Outputs
from ridgeline.executors.cpu.native_ops import fallback_ops
from ridgeline.executors.cpu.streaming import StreamedWeights
from ridgeline.executors.cpu.weights import pack_weights
from ridgeline.executors.model import ExecutorModel
from ridgeline.kernels.cpu.library import load_library, native_kernels_run
from ridgeline.kernels.cpu.pool import Pool
from ridgeline.models import describe, lower, shard
from ridgeline.roofline.batch import prefill_batch
from ridgeline.roofline.model import PricedModel
from ridgeline.roofline.op_cost import op_work
from ridgeline.weights import dummy_weights

(CASE,) = (case for case in NEW_DENSE_CASES if case.id == "gemma4_text-layer-inputs")
CONFIG = CASE.config | {"model_type": "gemma4_text", "num_kv_shared_layers": 0}
LAYERS, WIDTH, VOCABULARY, HIDDEN = 4, 20, 199, 64


def made(dtype="float32", **changes):
    spec = describe(CONFIG | changes).spec
    ops = lower(spec)
    weights = dummy_weights(ops, dtype=dtype, seed=3)
    return ExecutorModel(spec=spec, ops=ops, weights=weights, dtype=dtype)


@pytest.mark.parametrize("keys_as_values", [False, True])
def test_the_cuda_executors_program_gives_the_references_logits(keys_as_values):
    model = made(attention_k_eq_v=keys_as_values)
    token_ids = [n * 37 % VOCABULARY for n in range(40)]
    expected = run(model, token_ids, prompt_tokens=40)
    executor = host_executor({ModelRole.TARGET: model}, 16)
    try:
        executor.allocate_kv([4] * len(executor.kv_layout().block_bytes))
        driver = Driver(executor, blocks_per_slot=4)
        logits = driver.start(0, token_ids, outputs=Outputs(logits=True)).logits
    finally:
        executor.close()
    assert np.abs(logits - expected).max() < 1e-4


def test_stages_of_a_pipeline_are_refused_and_ranks_have_all_of_them():
    spec = describe(CONFIG).spec
    with pytest.raises(SettingsError, match="per-layer embeddings"):
        shard(spec, ParallelLayout(pipeline=2, stage_borders=(0, 2, 4)), 0)
    whole = [op for op in lower(spec) if isinstance(op, LayerEmbed | LayerInput)]
    parts = shard(spec, ParallelLayout(tensor=2), 1).ops
    assert [op for op in parts if isinstance(op, LayerEmbed | LayerInput)] == whole
    assert len(whole) == 1 + LAYERS


def test_a_token_is_priced_one_row_of_the_table():
    spec = describe(CONFIG).spec
    model = PricedModel(spec=spec, ops=lower(spec))
    (embed,) = (op for op in model.ops if isinstance(op, LayerEmbed))
    work = [op_work(embed, prefill_batch(tokens), model) for tokens in (1, 11)]
    row_bytes = LAYERS * WIDTH * 2
    assert work[1].weight_bytes - work[0].weight_bytes == 10 * row_bytes
    assert work[0].weight_bytes == row_bytes * (1 + HIDDEN) + 2 * WIDTH
    assert work[1].flops == 2 * 11 * LAYERS * WIDTH * HIDDEN


@pytest.mark.skipif(not native_kernels_run(), reason="the cpu executor does not run")
@pytest.mark.parametrize(("quantization", "bits"), [(None, None), ("int4", 8)])
def test_the_cpu_executor_has_the_table_once_and_as_other_tables(quantization, bits):
    model = replace(
        made("bfloat16"), quantization=None if quantization is None else number_format(quantization)
    )
    assert not fallback_ops(model.ops)
    packed = pack_weights(Pool(load_library(), 1), model)
    (table,) = packed.matrices["layer_embed"]
    found = packed.formats().get("layer_embed")
    assert (found and found.bits) == bits
    assert table.num_bytes <= 1.4 * VOCABULARY * LAYERS * WIDTH * (2 if bits is None else 1)
    assert not packed.kept


@pytest.mark.skipif(not native_kernels_run(), reason="the cpu executor does not run")
def test_weights_that_stay_on_disk_are_streamed_without_the_table(tmp_path):
    """A token reads a row of it."""
    model = made("bfloat16")
    packed = pack_weights(Pool(load_library(), 1), model, folder=tmp_path)
    streamed = StreamedWeights(packed, model.ops, 10**9)
    streamed.close()
    size = sum(
        matrix.num_bytes
        for name, found in packed.matrices.items()
        for matrix in found
        if name != "layer_embed"
    )
    assert streamed.kept_bytes + streamed.streamed_bytes == size


def test_a_smaller_vocabulary_of_layers_is_refused():
    with pytest.raises(UnsupportedModelError, match="fewer than the 199"):
        describe(CONFIG | {"vocab_size_per_layer_input": 100})
