"""Mixtures of experts and latent attention: sizes of published models, and what is refused."""

import math
import re

import pytest

from ridgeline.core.cache_groups import kv_groups
from ridgeline.core.errors import CorruptFileError, UnsupportedModelError
from ridgeline.core.spec import MLASpec, MoESpec
from ridgeline.core.weight_uses import op_weights
from ridgeline.models import PRESETS, describe, lower

# Total parameters: the sums over the published checkpoints' tensors (their safetensors indices),
# for DeepSeek-V3 without the extra prediction layer. The papers and model cards round them to
# 46.7B, 14.3B, 30.5B, 15.7B, 671B, 20.9B and 116.8B.
PARAMETERS = {
    "mixtral-8x7b": 46_702_792_704,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen3-30b-a3b": 30_532_122_624,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}


def spec_of(name, **changes):
    return describe(PRESETS[name] | changes, strict=True).spec


@pytest.mark.parametrize(("name", "expected"), PARAMETERS.items())
def test_parameters_of_published_models(name, expected):
    weights = {w.name: w.shape for op in lower(spec_of(name)) for w in op_weights(op)}
    assert sum(math.prod(shape) for shape in weights.values()) == expected


def test_deepseek_v3_caches_one_latent_per_token():
    """512 latent and 64 rotary elements in each layer, not 2 · 128 heads of 192 and 128."""
    spec = spec_of("deepseek-v3")
    (group,) = kv_groups(spec)
    assert (group.num_kv_heads, group.k_width, group.v_width) == (1, 576, 0)
    assert group.elements_per_token == 61 * 576
    assert group.elements_per_token * 2 == 70_272  # bytes in bfloat16


def test_gpt_oss_caches_windowed_and_full_layers_apart():
    windowed, full = kv_groups(spec_of("gpt-oss-20b"))
    assert (windowed.window, full.window) == (128, None)
    assert windowed.layers == tuple(range(0, 24, 2))
    assert windowed.elements_per_token == full.elements_per_token == 12 * 2 * 8 * 64


def test_deepseek_scale_holds_the_square_of_mscale():
    attention = spec_of("deepseek-v3").layers[0].attention
    assert isinstance(attention, MLASpec)
    mscale = 0.1 * math.log(40) + 1
    assert attention.scale == pytest.approx(192**-0.5 * mscale**2, rel=1e-12)
    assert attention.rope.scaling.attention_factor == 1.0


def test_layers_with_experts():
    assert [isinstance(layer.mlp, MoESpec) for layer in spec_of("deepseek-v3").layers[:5]] == (
        [False] * 3 + [True] * 2
    )
    steps = spec_of("qwen3-30b-a3b", decoder_sparse_step=3, mlp_only_layers=[5])
    sparse = [index for index, layer in enumerate(steps.layers) if isinstance(layer.mlp, MoESpec)]
    assert sparse[:3] == [2, 8, 11]


@pytest.mark.parametrize(
    ("preset", "changes", "names"),
    [
        ("deepseek-v2-lite", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek-v2-lite", {"scoring_func": "sigmoid"}, "scoring_func"),
        ("deepseek-v2-lite", {"topk_method": "noaux_tc"}, "topk_method"),
        ("deepseek-v2-lite", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("deepseek-v2-lite", {"mlp_bias": True}, "mlp_bias"),
        ("deepseek-v3", {"topk_method": "greedy"}, "topk_method"),
        ("deepseek-v3", {"num_key_value_heads": 8}, "num_key_value_heads"),
        ("deepseek-v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim"),
        ("gpt-oss-20b", {"hidden_act": "gelu"}, "hidden_act"),
        ("qwen3-30b-a3b", {"decoder_sparse_step": 100}, "experts"),
        ("llama-3.1-8b", {"num_local_experts": 8}, "num_local_experts"),
    ],
)
def test_what_would_change_the_output_is_refused(preset, changes, names):
    with pytest.raises(UnsupportedModelError, match=names):
        spec_of(preset, **changes)


@pytest.mark.parametrize(
    ("preset", "changes", "names"),
    [
        ("mixtral-8x7b", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ("mixtral-8x7b", {"num_local_experts": None}, "num_local_experts"),
        ("deepseek-v3", {"n_group": 7}, "n_group"),
        ("deepseek-v3", {"topk_group": 9}, "topk_group"),
        ("deepseek-v3", {"n_group": 256}, "topk_group"),
        ("deepseek-v3", {"n_group": 64, "topk_group": 1}, "topk_group"),
        ("qwen3-30b-a3b", {"mlp_only_layers": [1, True]}, "mlp_only_layers"),
        ("qwen3-30b-a3b", {"mlp_only_layers": "all"}, "mlp_only_layers"),
        ("gpt-oss-20b", {"rope_scaling": None}, "rope_scaling"),
    ],
)
def test_contradictions_are_named(preset, changes, names):
    with pytest.raises(CorruptFileError, match=names):
        spec_of(preset, **changes)


def test_experts_may_be_counted_under_the_name_that_transformers_writes():
    config = {k: v for k, v in PRESETS["qwen3-30b-a3b"].items() if k != "num_experts"}
    assert describe(config | {"num_local_experts": 128}).spec == spec_of("qwen3-30b-a3b")


def test_the_extra_prediction_layer_of_deepseek_v3_may_be_left_over():
    definition = describe(PRESETS["deepseek-v3"])
    left_over = ["model.layers.61.eh_proj.weight", "model.layers.61.mlp.experts.0.up_proj.weight"]
    for name in left_over:
        assert any(re.fullmatch(pattern, name) for pattern in definition.ignored)
    used = "model.layers.60.mlp.experts.0.up_proj.weight"
    assert not any(re.fullmatch(pattern, used) for pattern in definition.ignored)


def test_the_context_of_deepseek_v32_ends_where_its_indexer_would_choose(caplog):
    config = PRESETS["deepseek-v3"] | {"model_type": "deepseek_v32", "index_topk": 2048}
    assert describe(config, strict=True).spec.max_position == 2048
    assert "its context is the 2048 tokens" in caplog.text
