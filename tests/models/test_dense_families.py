"""What the later dense families read from configs: spellings, defaults, and what is refused."""

import pytest

from ridgeline.core import ops
from ridgeline.core.errors import CorruptFileError, UnsupportedModelError
from ridgeline.core.spec import Activation, NormKind, NormScope
from ridgeline.core.weight_uses import op_weights
from ridgeline.models import PRESETS, describe, lower

SMALL = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1000,
}
GPT_2 = PRESETS["gpt2"]


def spec_of(model_type, **changes):
    return describe(SMALL | {"model_type": model_type} | changes, strict=True).spec


def outline(spec):
    """The ops of the first layer, with the buffers that they read and write."""
    lowered = lower(spec)
    last = [type(op) for op in lowered].index(ops.AddResidual, 1)
    last = [type(op) for op in lowered].index(ops.AddResidual, last + 1)
    return [
        " ".join([type(op).__name__, *(getattr(op, end, "") for end in ("src", "dst"))]).strip()
        for op in lowered[1 : last + 1]
    ]


def test_olmo2_has_no_norm_before_a_branch():
    spec = spec_of("olmo2")
    assert outline(spec) == [
        "QKVProject x", "HeadNorm", "Rope", "KVWrite", "Attend", "OutProject", "Norm h h",
        "AddResidual", "MLP x", "Norm h h", "AddResidual",
    ]  # fmt: skip
    attention = spec.layers[0].attention
    assert attention.qk_norm_scope is NormScope.PROJECTION
    weights = {weight.name: weight.shape for op in lower(spec) for weight in op_weights(op)}
    assert (weights["layers.0.q_norm"], weights["layers.0.k_norm"]) == ((64,), (32,))


@pytest.mark.parametrize(
    "spec",
    [
        spec_of("cohere"),
        spec_of("phi"),
        spec_of("stablelm", use_parallel_residual=True),
    ],
    ids=lambda spec: spec.model_type,
)
def test_parallel_branches_read_one_norm(spec):
    assert outline(spec) == [
        "Norm x n", "QKVProject n", "Rope", "KVWrite", "Attend", "OutProject",
        "AddResidual", "MLP n", "AddResidual",
    ]  # fmt: skip


def test_gpt2_spellings():
    spelled_out = {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    }
    new = dict(GPT_2)
    for name, old in spelled_out.items():
        new[name] = new.pop(old)
    spec = describe(GPT_2, strict=True).spec
    assert describe(new, strict=True).spec == spec
    assert (spec.learned_positions, spec.max_position, spec.tie_embeddings) == (1024, 1024, True)
    assert spec.layers[0].mlp.width == 4 * 768
    assert spec.layers[0].mlp.activation is Activation.GELU_TANH
    assert spec.final_norm.kind is NormKind.LAYER
    narrow = describe(dict(GPT_2) | {"n_inner": 100}, strict=True).spec
    assert narrow.layers[0].mlp.width == 100


def test_gpt2_scales():
    by_layer = dict(GPT_2) | {"scale_attn_by_inverse_layer_idx": True}
    scales = [layer.attention.scale for layer in describe(by_layer).spec.layers]
    assert scales == [0.125 / (layer + 1) for layer in range(12)]
    plain = dict(GPT_2) | {"scale_attn_weights": False}
    assert describe(plain).spec.layers[3].attention.scale == 1.0


@pytest.mark.parametrize("changes", [{"n_embd": 770}, {"n_positions": 0}, {"n_layer": None}])
def test_bad_gpt2(changes):
    with pytest.raises(CorruptFileError):
        describe(dict(GPT_2) | changes)


def test_gpt2_tensors():
    sources = describe(GPT_2).sources
    assert sources["layers.3.k"].rows == (768, 1536)
    assert sources["layers.3.k"].transpose
    assert sources["layers.3.k"].other_names == ("h.3.attn.c_attn.weight",)
    assert sources["layers.3.v_bias"].rows == (1536, 2304)
    assert not sources["layers.3.v_bias"].transpose
    assert sources["layers.3.o"].rows is None


def test_phi3_tensors():
    sources = describe(PRESETS["phi-4-mini"]).sources
    assert sources["layers.9.q"].rows == (0, 3072)
    assert sources["layers.9.v"].rows == (4096, 5120)
    assert sources["layers.9.up"].rows == (8192, 16_384)
    assert sources["layers.9.up"].name == "model.layers.9.mlp.gate_up_proj.weight"


@pytest.mark.parametrize(
    ("changes", "rotated"),
    [
        ({}, [True, True, True, False]),
        ({"no_rope_layer_interval": 2}, [True, False, True, False]),
        ({"no_rope_layers": [0, 1, 1, 0, 1, 1]}, [False, True, True, False]),
    ],
)
def test_smollm3_layers_without_rope(changes, rotated):
    layers = spec_of("smollm3", **changes).layers
    assert [layer.attention.rope is not None for layer in layers] == rotated
    assert all(layer.attention.window is None for layer in layers)
    windows = spec_of("smollm3", use_sliding_window=True, sliding_window=7, **changes).layers
    assert [layer.attention.window for layer in windows] == [None if r else 7 for r in rotated]


def test_smollm3_with_too_few_entries():
    with pytest.raises(CorruptFileError, match="3 no_rope_layers for 4"):
        spec_of("smollm3", no_rope_layers=[1, 1, 0])


def test_smollm2_is_llama():
    spec = describe(PRESETS["smollm2-135m"], strict=True).spec
    assert spec.model_type == "llama"
    with pytest.raises(UnsupportedModelError, match="rope_interleaved"):
        describe(dict(PRESETS["smollm2-135m"]) | {"rope_interleaved": True})


def test_gemma_means_the_approximate_gelu():
    spec = describe(PRESETS["gemma-2b"], strict=True).spec
    assert spec.layers[0].mlp.activation is Activation.GELU_TANH
    assert spec.embedding_scale == 2048**0.5
    assert spec.tie_embeddings


def test_granite_multipliers():
    spec = spec_of(
        "granite",
        embedding_multiplier=12,
        logits_scaling=8,
        residual_multiplier=0.22,
        attention_multiplier=0.015625,
    )
    assert (spec.embedding_scale, spec.logit_scale) == (12.0, 0.125)
    assert (spec.layers[0].attention_scale, spec.layers[0].mlp_scale) == (0.22, 0.22)
    assert spec.layers[0].attention.scale == 0.015625


def test_partial_rotation():
    assert spec_of("stablelm").layers[0].attention.rope.rotary_dim == 4
    assert spec_of("phi").layers[0].attention.rope.rotary_dim == 8
    section = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
    rope = spec_of("phi", rope_parameters=section, partial_rotary_factor=0.5).layers[0].attention
    assert rope.rope.rotary_dim == 12


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"partial_rotary_factor": 0.5}),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}),
        ("qwen2", {"clip_qkv": 8.0}),
        ("llama", {"residual_multiplier": 0.5}),
        ("phi3", {"attention_bias": True}),
        ("gemma", {"use_bidirectional_attention": True}),
    ],
)
def test_what_would_change_the_output_is_refused(model_type, changes):
    with pytest.raises(UnsupportedModelError, match=next(iter(changes)).split("_")[0]):
        spec_of(model_type, **changes)
