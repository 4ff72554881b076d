"""Layers that read K and V of other layers, against transformers' own layers on a shared cache."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from tests.fakes import FakeExecutor
from tests.parity.cases import SIZES, THETA
from tests.parity.ours import run
from tests.scheduler.test_scheduler import request, run_ahead
from transformers.cache_utils import DynamicCache

from ridgeline.compress.block_forward import BlockForward
from ridgeline.core.arrays import cast
from ridgeline.core.cache_groups import cache_groups, kv_groups
from ridgeline.core.config import EngineConfig, resolve
from ridgeline.core.errors import SettingsError
from ridgeline.core.ops import Attend
from ridgeline.core.parallel_layout import ParallelLayout
from ridgeline.core.plan import ModelRole
from ridgeline.executors import create_executor
from ridgeline.executors.model import ExecutorModel
from ridgeline.executors.registry import executor_traits
from ridgeline.kernels.tensors import as_tensor
from ridgeline.models import describe, lower, shard
from ridgeline.scheduler import Scheduler, SchedulerConfig
from ridgeline.weights import dummy_weights

SOURCES = {2: 0, 3: 1, 4: 0, 5: 1}  # the others are local and global layers with KV of their own
LOCAL_AND_GLOBAL = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "head_dim": 24,
    "sliding_window": 11,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "query_pre_attn_scalar": 24,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "default", "rope_theta": THETA},
    },
    "pad_token_id": 0,
}
BIASED = {"model_type": "llama", "num_hidden_layers": 6, "attention_bias": True}
MIXES = pytest.mark.parametrize("config", [LOCAL_AND_GLOBAL, BIASED], ids=["gemma3", "llama"])


class SharedCache(DynamicCache):
    """In which a layer of `SOURCES` finds the K and V of another."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        source = self.layers[SOURCES[layer_idx]] if layer_idx in SOURCES else None
        if source is not None:
            return source.keys, source.values
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def shared(spec, sources=SOURCES):
    """The spec with layers that read others' KV."""
    layers = list(spec.layers)
    for layer, source in sources.items():
        attention = replace(layers[layer].attention, kv_layer=source)
        layers[layer] = replace(layers[layer], attention=attention)
    return replace(spec, layers=tuple(layers))


def shared_model(config):
    """Ours, in float32, and transformers' with the same weights, biases and norms random."""
    definition = describe(SIZES | config)
    rng = np.random.default_rng(7)
    weights = {
        name: cast(np.asarray(values + 0.1 * rng.standard_normal(values.shape)), "float32")
        for name, values in dummy_weights(lower(definition.spec), dtype="float32", seed=1).items()
    }
    oracle = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**(SIZES | config)), attn_implementation="eager"
    )
    names = {name: definition.sources[name].name for name in weights}
    state = {names[name]: as_tensor(values) for name, values in weights.items()}
    missing = oracle.load_state_dict(state, strict=False)
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    assert not missing.unexpected_keys
    spec = shared(definition.spec)
    ops = lower(spec)
    model = ExecutorModel(spec=spec, ops=ops, weights=weights, dtype="float32")
    return model, oracle.eval()


@MIXES
@torch.no_grad()
def test_logits_are_those_of_transformers(config):
    model, oracle = shared_model(config)
    token_ids = np.random.default_rng(3).integers(1, 199, 60).tolist()
    cache, expected = SharedCache(), []
    for part in (token_ids[:48], *([token] for token in token_ids[48:])):
        out = oracle(torch.tensor([part]), past_key_values=cache, use_cache=True)
        expected.append(out.logits[0])
    expected = torch.cat(expected).numpy()
    for name, most in (("reference", 1e-4), ("cpu", 3e-4)):
        assert np.abs(run(model, token_ids, prompt_tokens=48, name=name) - expected).max() < most
    forward = BlockForward({k: as_tensor(v) for k, v in model.weights.items()}, [token_ids])
    forward.run(model.ops)
    assert np.abs(forward.buffers["logits"].numpy() - expected).max() < 1e-4
    plain = replace(model, spec=describe(SIZES | config).spec)
    plain = replace(plain, ops=lower(plain.spec))
    assert np.abs(run(plain, token_ids, prompt_tokens=48) - expected).max() > 0.1


@MIXES
def test_nothing_is_stored_or_read_twice(config):
    spec = shared(describe(SIZES | config).spec)
    names = set(dummy_weights(lower(spec), dtype="float32", seed=0))
    for part in ("k", "v", "k_bias", "k_norm"):
        owners = {index for index in range(6) if f"layers.{index}.{part}" in names}
        assert owners in (set(), {0, 1})
    assert sum(len(group.layers) for group in kv_groups(spec)) == 2
    assert [op.layer for op in lower(spec) if isinstance(op, Attend)] == [0, 1, 0, 1, 0, 1]


def test_what_is_not_possible_is_refused():
    spec = shared(describe(SIZES | BIASED).spec)
    with pytest.raises(SettingsError, match=r"Layer 3 .* reads K and V of layer 1, which another"):
        shard(spec, ParallelLayout(pipeline=2, stage_borders=(0, 3, 6)), 1)
    halves = [shard(spec, ParallelLayout(tensor=2), rank).ops for rank in range(2)]
    assert len(halves[0]) == len(halves[1])
    model = ExecutorModel(spec=spec, ops=lower(spec), weights={}, dtype="float32")
    assert not executor_traits("cuda").shares_kv
    with pytest.raises(SettingsError, match="read K and V of other layers, which the cuda"):
        create_executor({ModelRole.TARGET: model}, EngineConfig(executor="cuda"))


def test_a_window_of_a_tenth_and_sharing_by_three_hold_a_28th():
    """Bytes that the executor's pools give a sequence of 10,240 tokens while it decodes."""

    def held_bytes(window, sources):
        config = {"model_type": "mistral", "num_hidden_layers": 6, "sliding_window": window}
        spec = shared(describe(SIZES | config | {"max_position_embeddings": 10_240}).spec, sources)
        ops = lower(spec)
        weights = dummy_weights(ops, dtype="float32", seed=0)
        model = ExecutorModel(spec=spec, ops=ops, weights=weights, dtype="float32")
        settings = EngineConfig(executor="cpu", kv_cache_memory_bytes=1 << 30)
        executor = create_executor({ModelRole.TARGET: model}, settings)
        (block_bytes,) = executor.kv_layout().block_bytes
        executor.close()
        (group,) = cache_groups(spec)
        assert block_bytes == 16 * 4 * group.elements_per_token
        resolved = resolve(
            settings, spec=spec, executor="cpu", dtype="float32", block_bytes=(block_bytes,),
            free_bytes=0,
        )  # fmt: skip
        scheduler = Scheduler(SchedulerConfig.of_engine(settings, resolved, windows=(window,)))
        held = []
        scheduler.add(request(0, [n % 97 for n in range(10_200)], max_tokens=None))
        run_ahead(
            scheduler,
            FakeExecutor(windows=(window,), block_tokens=16),
            each_step=lambda: held.append(scheduler.kv_usage()[0].num_held),
        )
        return held[-2] * block_bytes

    plain, by_three = held_bytes(None, {}), {1: 0, 2: 0, 4: 3, 5: 3}
    assert plain / held_bytes(None, by_three) == 3
    assert plain / held_bytes(1024, {}) > 9.5
    assert plain / held_bytes(1024, by_three) > 28
