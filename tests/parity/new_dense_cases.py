"""Tiny models of families without experts from 2024 on, and of text models beside vision towers."""

from tests.parity.cases import SIZES, THETA, YARN, Case


def _case(family: str, name: str, **changes: object) -> Case:
    return Case(family=family, name=name, changes={"pad_token_id": 0} | changes)


def _vision(family: str, name: str, **text: object) -> Case:
    """Its text model is `SIZES` with changes; the vision tower is as small as can be."""
    return Case(
        family=family,
        name=f"vision-{name}",
        changes={"text_config": SIZES | {"pad_token_id": 0} | text},
    )


_THETA: dict[str, object] = {"rope_theta": THETA, "rope_type": "default"}
_BY_TURNS = ["full_attention", "sliding_attention", "full_attention"]
_LOCAL = {"rope_type": "default", "rope_theta": 300.0}
_LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": THETA}
_GROWING = YARN | {"llama_4_scaling_beta": 0.4, "mscale": 1.0, "mscale_all_dim": 1.0,
                   "original_max_position_embeddings": 20}  # fmt: skip
_GRANITE: dict[str, object] = {
    "embedding_multiplier": 1.4, "attention_multiplier": 0.2, "residual_multiplier": 0.7,
    "logits_scaling": 0.8,
}  # fmt: skip
_ALPHA = {"rope_type": "dynamic", "alpha": 30.0, "factor": 1.0, "rope_theta": 200.0}
_MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": THETA}

_GEMMA_4: dict[str, object] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 9,
    "head_dim": 16,
    "global_head_dim": 24,
    "hidden_size_per_layer_input": 0,
    "rms_norm_eps": 0.6,  # as embeddings are scaled by 8
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": THETA,
        },
        "sliding_attention": _LOCAL,
    },
}  # fmt: skip

_TWO_LAYERS = {
    "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]
}  # fmt: skip
_LAYER_INPUTS = {"hidden_size_per_layer_input": 20, "vocab_size_per_layer_input": 199}

_GEMMA_3N: dict[str, object] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 9,
    "head_dim": 16,
    "hidden_size_per_layer_input": 20,
    "vocab_size_per_layer_input": 150,  # of 199 tokens
    "rms_norm_eps": 0.6,
    "laurel_rank": 6,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": THETA},
        "sliding_attention": _LOCAL,
    },
}  # fmt: skip

_NEOX: dict[str, object] = {
    "layer_norm_eps": 0.03,
    "num_key_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 0.5},
}

NEW_DENSE_CASES = [
    _case("gpt_neox", "parallel", **_NEOX),
    _case("gpt_neox", "sequential", **_NEOX, use_parallel_residual=False, attention_bias=False,
          hidden_act="gelu_new"),
    _case("gemma3n_text", "shared-kv", **_GEMMA_3N, num_kv_shared_layers=2, attention_bias=True,
          activation_sparsity_pattern=[0.8, 0.6, 0.0, 0.0], final_logit_softcapping=5.0,
          intermediate_size=[96, 80, 64, 72]),
    _case("gemma3n_text", "unscaled", **_GEMMA_3N | _TWO_LAYERS, num_kv_shared_layers=0,
          activation_sparsity_pattern=[0.0, 0.9], altup_num_inputs=3, altup_correct_scale=False),
    _case("gemma4_text", "keys-as-values", **_GEMMA_4, attention_k_eq_v=True,
          num_global_key_value_heads=1, attention_bias=True, final_logit_softcapping=5.0),
    _case("gemma4_text", "shared-kv", **_GEMMA_4, num_kv_shared_layers=2,
          use_double_wide_mlp=True),
    _case("gemma4_text", "layer-inputs", **_GEMMA_4 | _LAYER_INPUTS, num_kv_shared_layers=2),
    _case("gemma4_text", "experts", **_GEMMA_4 | _TWO_LAYERS, enable_moe_block=True,
          num_experts=6, top_k_experts=3, moe_intermediate_size=24),
    _vision("gemma4", "plain", **_GEMMA_4),
    _case("seed_oss", "plain", head_dim=24, rope_parameters=_THETA),
    _case("seed_oss", "other-biases", head_dim=16, attention_bias=False, attention_out_bias=True,
          mlp_bias=True, tie_word_embeddings=True),
    _case("olmo3", "windows", num_hidden_layers=4, sliding_window=9,
          rope_parameters={"full_attention": YARN, "sliding_attention": _THETA}),
    _case("olmo3", "two-ropes", layer_types=_BY_TURNS, sliding_window=13, attention_bias=True,
          rope_parameters={"full_attention": _LINEAR, "sliding_attention": _LOCAL}),
    _case("cohere2", "windows", num_hidden_layers=4, layer_norm_eps=0.03, sliding_window=9,
          logit_scale=0.9),
    _case("cohere2", "biases", layer_types=_BY_TURNS, layer_norm_eps=0.03, sliding_window=13,
          logit_scale=1.2, attention_bias=True, num_key_value_heads=4, tie_word_embeddings=False),
    _case("exaone4", "windows", num_hidden_layers=4, sliding_window=9),
    _case("exaone4", "no-windows", sliding_window=None, tie_word_embeddings=True, head_dim=24,
          layer_types=["full_attention"] * 3),
    _case("ernie4_5", "plain", head_dim=24),
    _case("ernie4_5", "biases", head_dim=16, use_bias=True, tie_word_embeddings=False),
    _case("glm", "plain", head_dim=24, partial_rotary_factor=0.75),
    _case("glm", "no-biases", head_dim=16, attention_bias=False, num_key_value_heads=1),
    _case("glm4", "plain", head_dim=24, tie_word_embeddings=True),
    _case("arcee", "plain"),
    _case("apertus", "biases", num_hidden_layers=2, attention_bias=True, rope_parameters=_THETA),
    _case("bitnet", "plain"),
    _case("bitnet", "biases", attention_bias=True, tie_word_embeddings=True),
    _case("arcee", "biases", attention_bias=True, mlp_bias=True, head_dim=24),
    _case("nemotron", "plain", norm_eps=0.03),
    _case("nemotron", "biases", norm_eps=0.03, attention_bias=True, mlp_bias=True, head_dim=24,
          partial_rotary_factor=0.75),
    _case("ministral", "windows", layer_types=_BY_TURNS, sliding_window=9, head_dim=24),
    _case("ministral3", "growing", rope_parameters=_GROWING, head_dim=24),
    _case("ministral3", "window", rope_parameters=_GROWING | {"truncate": False}, head_dim=16,
          sliding_window=13),
    _case("hunyuan_v1_dense", "plain", head_dim=24),
    _case("hunyuan_v1_dense", "alpha", head_dim=16, rope_parameters=_ALPHA, attention_bias=True,
          tie_word_embeddings=True),
    _case("granite_swa", "windows", num_hidden_layers=4, sliding_window=9, **_GRANITE,
          layer_rope_theta=[THETA, 300, 0, 300]),
    _case("helium", "plain", head_dim=16),
    _case("hyperclovax", "plain", **_GRANITE, head_dim=16),
    _case("hyperclovax", "no-norms", use_post_norm=False, attention_bias=True, mlp_bias=True),
    _case("jais2", "plain", layer_norm_eps=0.03, head_dim=24),
    _case("vaultgemma", "softcaps", num_hidden_layers=4, head_dim=16, sliding_window=11,
          query_pre_attn_scalar=11, attn_logit_softcapping=3.0, final_logit_softcapping=5.0),
    _case("cwm", "windows", head_dim=24, sliding_window=9, num_hidden_layers=4),
    _case("youtu", "plain", q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16,
          qk_rope_head_dim=8, v_head_dim=20, num_key_value_heads=4),
    _case("internlm3", "plain", head_dim=24),
    _case("iquestcoder", "plain", head_dim=24),
    _vision("mistral3", "growing", model_type="ministral3", head_dim=24, rope_parameters=_GROWING),
    _vision("mistral3", "window", model_type="mistral", head_dim=16, sliding_window=13),
    _vision("qwen2_vl", "windows", rope_parameters=_MROPE, use_sliding_window=True,
            sliding_window=9, max_window_layers=1),
    _vision("qwen2_5_vl", "plain", rope_parameters=_MROPE),
    _vision("qwen3_vl", "biases", rope_parameters=_MROPE | {"mrope_interleaved": True},
            head_dim=24, attention_bias=True),
]  # fmt: skip

NEW_DENSE_TELLING = (
    "gpt_neox-parallel",
    "gemma3n_text-shared-kv",
    "gemma4_text-keys-as-values",
    "gemma4_text-shared-kv",
    "gemma4_text-layer-inputs",
    "gemma4_text-experts",
    "seed_oss-other-biases",
    "olmo3-two-ropes",
    "cohere2-biases",
    "exaone4-windows",
    "ernie4_5-biases",
    "glm-plain",
    "glm4-plain",
    "arcee-biases",
    "apertus-biases",
    "nemotron-biases",
    "ministral3-window",
    "hunyuan_v1_dense-alpha",
    "granite_swa-windows",
)
