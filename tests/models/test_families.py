"""What families read from configs: old and new spellings, and what each key becomes."""

import logging

import pytest

from ridgeline.core.rope_spec import DynamicScaling, LinearScaling, Llama3Scaling, YarnScaling
from ridgeline.core.spec import Activation
from ridgeline.models import PRESETS, describe

LLAMA_3 = PRESETS["llama-3.2-1b"]
SMALL = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1000,
}


def spec_of(model_type, **changes):
    return describe(SMALL | {"model_type": model_type} | changes, strict=True).spec


def attention_of(model_type, layer=0, **changes):
    return spec_of(model_type, **changes).layers[layer].attention


def scaling_of(**changes):
    return attention_of("llama", **changes).rope.scaling


def windows_of(model_type, **changes):
    return [layer.attention.window for layer in spec_of(model_type, **changes).layers]


def test_spellings_of_rope_are_one():
    scaling = {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    base = {k: v for k, v in LLAMA_3.items() if k not in ("rope_theta", "rope_scaling")}
    specs = [
        describe(base | spelling, strict=True).spec
        for spelling in (
            {"rope_theta": 5e5, "rope_scaling": scaling | {"rope_type": "llama3"}},
            {"rope_theta": 5e5, "rope_scaling": scaling | {"type": "llama3"}},
            {
                "rope_theta": 5e5,
                "rope_scaling": scaling | {"type": "llama3", "rope_type": "llama3"},
            },
            {"rope_parameters": scaling | {"rope_type": "llama3", "rope_theta": 5e5}},
            {"rope_theta": 5e5, "rope_parameters": scaling | {"rope_type": "llama3"}},
        )
    ]
    assert all(spec == specs[0] for spec in specs)
    rope = specs[0].layers[0].attention.rope
    assert rope.theta == 5e5
    assert rope.scaling == Llama3Scaling(
        factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
    )


def test_rope_scalings():
    assert scaling_of() is None
    assert scaling_of(rope_scaling={"type": "default"}) is None
    assert scaling_of(rope_scaling={"type": "linear", "factor": 2}) == LinearScaling(factor=2.0)
    assert scaling_of(rope_scaling={"type": "dynamic", "factor": 2.5}) == DynamicScaling(
        factor=2.5, original_max_position=1000
    )
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 250}
    assert scaling_of(rope_scaling=yarn) == YarnScaling(
        factor=4.0,
        original_max_position=250,
        beta_fast=32.0,
        beta_slow=1.0,
        attention_factor=pytest.approx(1.138629436),
    )
    assert scaling_of(rope_scaling=yarn | {"attention_factor": 1.5}).attention_factor == 1.5
    assert scaling_of(rope_scaling=yarn | {"factor": None}).factor == 4.0
    assert scaling_of(rope_scaling=yarn | {"beta_fast": 0, "beta_slow": 0}).beta_fast == 32.0
    ratio = scaling_of(rope_scaling=yarn | {"mscale": 1.0, "mscale_all_dim": 1.0})
    assert ratio.attention_factor == 1.0


def test_original_length_beside_the_section_has_priority():
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 250}
    scaling = scaling_of(rope_scaling=yarn, original_max_position_embeddings=500)
    assert scaling.original_max_position == 500


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 1000),
        ({"type": "linear", "factor": 2.0}, 2000),
        ({"type": "dynamic", "factor": 2.5}, 2500),
        ({"type": "yarn", "factor": 4.0}, 4000),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 250}, 1000),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 500}, 2000),
    ],
)
def test_longest_context(scaling, longest):
    assert spec_of("llama", rope_scaling=scaling).max_position == longest


def test_llama_heads():
    attention = attention_of("llama")
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (4, 2, 16)
    assert attention_of("llama", num_key_value_heads=None).num_kv_heads == 4
    wide = attention_of("llama", head_dim=24)
    assert (wide.head_dim, wide.scale, wide.rope.rotary_dim) == (24, 24**-0.5, 24)


def test_biases():
    llama = spec_of("llama", attention_bias=True, mlp_bias=True).layers[0]
    assert llama.attention.qkv_bias
    assert llama.attention.out_bias
    assert llama.mlp.bias
    qwen2 = attention_of("qwen2")
    assert qwen2.qkv_bias
    assert not qwen2.out_bias
    qwen3 = attention_of("qwen3", attention_bias=True)
    assert qwen3.qkv_bias
    assert qwen3.out_bias
    assert not attention_of("qwen3").qkv_bias


def test_mistral_windows():
    assert windows_of("mistral") == [4096] * 4  # version 0.1's default
    assert windows_of("mistral", sliding_window=None) == [None] * 4
    assert windows_of("mistral", sliding_window=7) == [7] * 4


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_qwen_windows(model_type):
    assert windows_of(model_type, sliding_window=9) == [None] * 4
    on = {"use_sliding_window": True, "sliding_window": 9}
    assert windows_of(model_type, **on, max_window_layers=3) == [None, None, None, 9]
    assert windows_of(model_type, **on) == [None] * 4
    kinds = ["sliding_attention", "full_attention"] * 2
    assert windows_of(model_type, **on, layer_types=kinds) == [9, None, 9, None]
    assert windows_of(model_type, use_sliding_window=True, sliding_window=None) == [None] * 4


def test_qwen3_norms_and_head_width():
    attention = attention_of("qwen3", rms_norm_eps=1e-5)
    assert attention.head_dim == 128
    assert attention.qk_norm.eps == 1e-5
    assert not attention.qk_norm.unit_offset


def test_gemma2():
    spec = spec_of("gemma2", sliding_window=9, query_pre_attn_scalar=100, hidden_act="silu")
    assert [layer.attention.window for layer in spec.layers] == [9, None, 9, None]
    layer = spec.layers[0]
    assert layer.attention.scale == 0.1
    assert (layer.attention.softcap, spec.logit_softcap) == (50.0, 30.0)
    assert layer.attention.head_dim == 256
    assert layer.mlp.activation is Activation.GELU_TANH
    assert layer.attention_norm.unit_offset
    assert layer.attention_post_norm == layer.mlp_post_norm == spec.final_norm
    assert spec.embedding_scale == 8.0
    assert spec.tie_embeddings
    plain = spec_of("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert plain.logit_softcap is plain.layers[0].attention.softcap is None


def test_gemma3_old_and_new_spelling():
    old = spec_of(
        "gemma3_text",
        rope_theta=5e5,
        rope_local_base_freq=2e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window_pattern=2,
        sliding_window=9,
    )
    new = spec_of(
        "gemma3_text",
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=9,
    )
    assert old == new
    local, global_ = (layer.attention for layer in old.layers[:2])
    assert (local.window, local.rope.theta, local.rope.scaling) == (9, 2e4, None)
    assert (global_.window, global_.rope.theta) == (None, 5e5)
    assert global_.rope.scaling == LinearScaling(factor=8.0)
    assert old.max_position == 1000
    assert local.qk_norm.unit_offset


def test_gemma3_with_vision_is_its_text_model(caplog):
    # The hub's config of Gemma 3 4B, which leaves out what its class has as defaults.
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0",
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    }
    with caplog.at_level(logging.WARNING):
        definition = describe(config, strict=True)
    assert "vision tower" in caplog.records[0].getMessage()
    spec = definition.spec
    assert (spec.vocab_size, len(spec.layers), definition.dtype) == (262_208, 34, "bfloat16")
    attention = spec.layers[5].attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (8, 4, 256)
    assert attention.rope.scaling == LinearScaling(factor=8.0)
    name = definition.sources["layers.5.q"].name
    assert name == "language_model.model.layers.5.self_attn.q_proj.weight"
