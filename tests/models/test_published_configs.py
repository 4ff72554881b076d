"""Published configs of newer families are understood to the last key that counts."""

import math

import pytest

from ridgeline.core.errors import UnsupportedModelError
from ridgeline.core.weight_uses import op_weights
from ridgeline.models import describe, lower

GLM_4_5_AIR = {
    "model_type": "glm4_moe", "attention_bias": True, "attention_dropout": 0.0,
    "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 10944, "max_position_embeddings": 131072, "moe_intermediate_size": 1408,
    "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46,
    "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
    "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1,
    "use_qk_norm": False, "vocab_size": 151552,
}  # fmt: skip
GLM_4_7_FLASH = {
    "model_type": "glm4_moe_lite", "vocab_size": 154880, "hidden_size": 2048,
    "intermediate_size": 10240, "moe_intermediate_size": 1536, "num_hidden_layers": 47,
    "num_attention_heads": 20, "num_key_value_heads": 20, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "attention_bias": False, "max_position_embeddings": 202752,
    "rope_theta": 1000000.0, "rope_scaling": None, "partial_rotary_factor": 1.0,
    "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
    "v_head_dim": 256, "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 4,
    "norm_topk_prob": True, "routed_scaling_factor": 1.8, "n_group": 1, "topk_group": 1,
    "topk_method": "noaux_tc", "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
}  # fmt: skip
MINIMAX_M2 = {
    "model_type": "minimax_m2", "hidden_act": "silu", "hidden_size": 3072,
    "intermediate_size": 1536, "num_hidden_layers": 62, "num_attention_heads": 48,
    "num_key_value_heads": 8, "head_dim": 128, "rotary_dim": 64, "num_local_experts": 256,
    "num_experts_per_tok": 8, "shared_intermediate_size": 0, "scoring_func": "sigmoid",
    "use_routing_bias": True, "output_router_logits": False, "use_qk_norm": True,
    "qk_norm_type": "per_layer", "max_position_embeddings": 204800, "vocab_size": 200064,
    "rms_norm_eps": 1e-6, "router_jitter_noise": 0.0, "num_mtp_modules": 3,
    "mtp_transformer_layers": 1, "use_mtp": True, "attention_bias": False,
    "tie_word_embeddings": False, "attn_type_list": [1] * 62, "rope_theta": 5000000,
}  # fmt: skip
ERNIE_21B = {
    "model_type": "ernie4_5_moe", "hidden_size": 2560, "intermediate_size": 12288,
    "moe_intermediate_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 20,
    "num_key_value_heads": 4, "head_dim": 128, "moe_num_experts": 64,
    "moe_num_shared_experts": 2, "moe_k": 6, "moe_layer_start_index": 1,
    "moe_layer_end_index": 27, "moe_layer_interval": 1, "vocab_size": 103424,
    "tie_word_embeddings": True, "hidden_act": "silu", "use_bias": False,
    "rms_norm_eps": 1e-5, "rope_theta": 500000, "max_position_embeddings": 131072,
}  # fmt: skip
QWEN_3_VL_4B = {
    "model_type": "qwen3_vl", "image_token_id": 151655, "tie_word_embeddings": True,
    "video_token_id": 151656, "vision_config": {"depth": 24},
    "text_config": {
        "model_type": "qwen3_vl_text", "attention_bias": False, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2560, "intermediate_size": 9728,
        "max_position_embeddings": 262144, "num_attention_heads": 32, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_theta": 5000000,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20],
                         "rope_type": "default"},
        "tie_word_embeddings": True, "vocab_size": 151936,
    },
}  # fmt: skip
HUNYUAN_7B = {
    "model_type": "hunyuan_v1_dense", "num_hidden_layers": 32, "hidden_size": 4096,
    "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128167, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5,
    "use_qk_norm": True, "use_cla": False, "rope_theta": 10000, "num_experts": 1,
    "rope_scaling": {"type": "dynamic", "alpha": 1000, "factor": 1}, "tie_word_embeddings": True,
}  # fmt: skip
DOTS = {
    "model_type": "dots1", "hidden_size": 4096, "num_hidden_layers": 62,
    "intermediate_size": 10944, "num_attention_heads": 32, "num_key_value_heads": 32,
    "rms_norm_eps": 1e-05, "vocab_size": 152064, "first_k_dense_replace": 1,
    "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 2,
    "num_experts_per_tok": 6, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "max_position_embeddings": 32768, "rope_theta": 10000000, "scoring_func": "noaux_tc",
    "n_group": None, "topk_group": None, "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
FALCON_H1_500M = {
    "model_type": "falcon_h1", "attention_bias": False, "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 0.9375, "embedding_multiplier": 5.656854249492381,
    "head_dim": 64, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 2048,
    "key_multiplier": 0.390625, "lm_head_multiplier": 0.0390625, "mamba_chunk_size": 128,
    "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_ssm": 1536,
    "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 24,
    "mamba_norm_before_gate": False, "mamba_proj_bias": False, "mamba_rms_norm": False,
    "mamba_use_mlp": True, "max_position_embeddings": 16384, "mlp_bias": False,
    "mlp_multipliers": [0.8838834764831844, 0.5859375], "num_attention_heads": 8,
    "num_hidden_layers": 36, "num_key_value_heads": 2, "projectors_bias": False,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 100000000000.0,
    "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.23570226039551587,
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    "tie_word_embeddings": False, "vocab_size": 32784,
}  # fmt: skip
GEMMA_3N_E4B = {
    "model_type": "gemma3n", "audio_config": {"hidden_size": 1536},
    "audio_soft_tokens_per_image": 188, "audio_token_id": 262273, "boa_token_id": 256000,
    "boi_token_id": 255999,
    "eoa_token_id": 262272, "eoi_token_id": 262144, "image_token_id": 262145,
    "vision_config": {"hidden_size": 2048}, "vision_soft_tokens_per_image": 256,
    "text_config": {
        "model_type": "gemma3n_text", "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 25,
        "altup_active_idx": 0, "altup_coef_clip": 120.0, "altup_correct_scale": True,
        "altup_lr_multiplier": 1.0, "altup_num_inputs": 4, "attention_bias": False,
        "attention_dropout": 0.0, "final_logit_softcapping": 30.0, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2048,
        "hidden_size_per_layer_input": 256, "intermediate_size": [16384] * 35,
        "laurel_rank": 64, "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        "max_position_embeddings": 32768, "num_attention_heads": 8, "num_hidden_layers": 35,
        "num_key_value_heads": 2, "num_kv_shared_layers": 15, "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000.0, "rope_scaling": None, "rope_theta": 1000000.0,
        "sliding_window": 512, "vocab_size": 262400, "vocab_size_per_layer_input": 262144,
    },
}  # fmt: skip
LLAMA_4_SCOUT = {
    "model_type": "llama4", "boi_token_index": 200080, "eoi_token_index": 200081,
    "image_token_index": 200092, "vision_config": {"hidden_size": 1408},
    "text_config": {
        "model_type": "llama4_text", "attention_bias": False, "attention_chunk_size": 8192,
        "attention_dropout": 0.0, "attn_scale": 0.1, "attn_temperature_tuning": 4,
        "floor_scale": 8192, "for_llm_compressor": False, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 5120, "interleave_moe_layer_step": 1, "intermediate_size": 8192,
        "intermediate_size_mlp": 16384, "max_position_embeddings": 10485760,
        "no_rope_layers": [], "num_attention_heads": 40, "num_experts_per_tok": 1,
        "num_hidden_layers": 48, "num_key_value_heads": 8, "num_local_experts": 16,
        "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
        "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "use_qk_norm": True,
        "vocab_size": 202048,
    },
}  # fmt: skip

# Billions of parameters as model cards have them, without towers and prediction layers.
BILLIONS = {
    "GLM-4.5-Air": (GLM_4_5_AIR, 107),
    "GLM-4.7-Flash": (GLM_4_7_FLASH, 30),
    "MiniMax-M2": (MINIMAX_M2, 229),
    "ERNIE-4.5-21B-A3B": (ERNIE_21B, 22),
    "Qwen3-VL-4B": (QWEN_3_VL_4B, 4),
    "Hunyuan-7B": (HUNYUAN_7B, 8),
    "dots.llm1": (DOTS, 143),
    "Falcon-H1-0.5B": (FALCON_H1_500M, 0.5),
    "Gemma-3n-E4B": (GEMMA_3N_E4B, 7),
    "Llama-4-Scout": (LLAMA_4_SCOUT, 108),
}


@pytest.mark.parametrize("name", BILLIONS)
def test_parameters(name):
    config, billions = BILLIONS[name]
    spec = describe(config, strict=True).spec
    weights = {w.name: w.shape for op in lower(spec) for w in op_weights(op)}
    count = sum(math.prod(shape) for shape in weights.values()) / 1e9
    assert round(count, 1 if billions < 1 else None) == billions


@pytest.mark.parametrize(
    ("config", "changes", "named"),
    [
        (MINIMAX_M2, {"attention_bias": True}, "attention_bias"),
        (MINIMAX_M2, {"qk_norm_type": "per_head"}, "qk_norm_type"),
        (HUNYUAN_7B, {"num_experts": 8}, "num_experts"),
        (HUNYUAN_7B, {"use_cla": True}, "use_cla"),
        (ERNIE_21B, {"use_bias": True}, "use_bias"),
        (GLM_4_7_FLASH, {"mlp_layer_types": ["sparse"] * 46 + ["dense"]}, "mlp_layer_types"),
        (GLM_4_5_AIR, {"scoring_func": "softmax"}, "scoring_func"),
        (FALCON_H1_500M, {"ssm_multipliers": [1.0, 1.0, 1.0, 1.0, 0.5]}, "first .* and last"),
        (FALCON_H1_500M, {"attention_bias": True}, "attention_bias"),
        (
            FALCON_H1_500M,
            {"mamba_rms_norm": True, "mamba_norm_before_gate": True},
            "mamba_norm_before_gate",
        ),
        ({"model_type": "phimoe"}, {}, "SparseMixer"),
    ],
)
def test_what_would_change_the_output_is_refused_by_name(config, changes, named):
    with pytest.raises(UnsupportedModelError, match=named):
        describe(config | changes)
