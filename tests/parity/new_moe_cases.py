"""Tiny mixtures of experts of families from 2024 on; for seeds see `moe_cases`."""

from tests.parity.cases import LLAMA_3, SIZES, THETA, YARN, Case

_EXPERTS: dict[str, object] = {
    "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 40,
}  # fmt: skip
_SIGMOID: dict[str, object] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
_GRANITE: dict[str, object] = {
    "embedding_multiplier": 1.4,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 0.8,
}
_LATENT: dict[str, object] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
_INDEXER = {"index_topk": 104, "index_head_dim": 16, "index_n_heads": 2}
_AFMOE: dict[str, object] = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "num_shared_experts": 2, "route_scale": 1.7, "head_dim": 24, "sliding_window": 9,
    "num_hidden_layers": 4, "mup_enabled": True,
}  # fmt: skip
_ERNIE: dict[str, object] = {
    "moe_num_experts": 6,
    "moe_k": 3,
    "moe_intermediate_size": 24,
    "moe_num_shared_experts": 2,
}
_THETA: dict[str, object] = {"rope_type": "default", "rope_theta": THETA}
_LOCAL: dict[str, object] = {"rope_type": "default", "rope_theta": 300.0}
_GROWING: dict[str, object] = YARN | {
    "llama_4_scaling_beta": 0.4, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 20,
}  # fmt: skip
_HUNYUAN: dict[str, object] = {"num_experts": 6, "moe_topk": 3, "intermediate_size": 40}
_QWEN_VL: dict[str, object] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "head_dim": 24,
    "rope_parameters": {"rope_type": "default", "mrope_section": [4, 4, 4], "rope_theta": THETA},
}


def _case(
    family: str, name: str, base: dict[str, object], /, seed: int = 0, **more: object
) -> Case:
    changes = {"pad_token_id": 0, "norm_topk_prob": True} | base | more
    return Case(family=family, name=name, changes=changes, seed=seed)


_LLAMA_4: dict[str, object] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "num_local_experts": 6,
    "intermediate_size_mlp": 80,
    "attention_chunk_size": 6,
    "floor_scale": 5,
    "attn_scale": 0.3,
    "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
}

NEW_MOE_CASES = [
    _case("llama4_text", "scout", _LLAMA_4),
    _case("llama4_text", "maverick", _LLAMA_4, interleave_moe_layer_step=2, use_qk_norm=False,
          no_rope_layers=[1, 0, 1, 0], num_experts_per_tok=2, attention_bias=True,
          attn_temperature_tuning=False, rope_parameters=LLAMA_3),
    _case("afmoe", "windows", _AFMOE, layer_types=["sliding_attention", "full_attention"] * 2),
    _case("afmoe", "plain", _AFMOE, global_attn_every_n_layers=3, mup_enabled=False),
    _case("olmoe", "plain", _EXPERTS | {"num_experts": 6}, norm_topk_prob=False),
    _case("olmoe", "normed-biases", _EXPERTS | {"num_experts": 6}, attention_bias=True),
    _case("ernie4_5_moe", "plain", _ERNIE),
    _case("ernie4_5_moe", "some-layers", _ERNIE, num_hidden_layers=4, moe_layer_start_index=0,
          moe_layer_end_index=2, moe_layer_interval=2, moe_num_shared_experts=0,
          tie_word_embeddings=False),
    _case("glm4_moe", "plain", _SIGMOID, head_dim=24, use_qk_norm=True, attention_bias=True,
          partial_rotary_factor=0.75),
    _case("glm4_moe", "groups", _SIGMOID, head_dim=16, n_group=4, topk_group=2,
          norm_topk_prob=False, num_key_value_heads=4),
    _case("glm4_moe_lite", "plain", _SIGMOID | _LATENT,
          mlp_layer_types=["dense", "sparse", "sparse"]),
    _case("granitemoe", "plain", _EXPERTS | _GRANITE),
    _case("granitemoeshared", "biases", _EXPERTS | _GRANITE, shared_intermediate_size=24,
          attention_bias=True, tie_word_embeddings=True),
    _case("minimax_m2", "plain", _EXPERTS, head_dim=24, rotary_dim=16),
    _case("dots1", "windows", _SIGMOID, sliding_window=9, max_window_layers=1,
          attention_bias=True),
    _case("dots1", "plain", _SIGMOID, sliding_window=None, num_key_value_heads=4),
    _case("kimi_k2", "plain", _SIGMOID | _LATENT, n_group=1, topk_group=1,
          rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}),
    _case("deepseek_v32", "all-chosen", _SIGMOID | _LATENT, n_group=4, topk_group=2, **_INDEXER,
          rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}),
    _case("glm_moe_dsa", "shared-choice", _SIGMOID | _LATENT, n_group=1, topk_group=1, **_INDEXER,
          index_topk_freq=2),
    _case("exaone_moe", "windows", _QWEN_VL | {"rope_parameters": _THETA}, sliding_window=9,
          layer_types=["sliding_attention", "full_attention", "sliding_attention"],
          num_shared_experts=2, routed_scaling_factor=1.7,
          mlp_layer_types=["dense", "sparse", "sparse"]),
    _case("granitemoe_swa", "windows", _EXPERTS | _GRANITE, shared_intermediate_size=24,
          sliding_window=9),
    _case("mellum", "two-ropes", _QWEN_VL, sliding_window=9,
          layer_types=["full_attention", "sliding_attention", "full_attention"],
          mlp_layer_types=["sparse", "sparse", "dense"],
          rope_parameters={"full_attention": YARN, "sliding_attention": _LOCAL}),
    _case("mistral4", "growing", _SIGMOID | _LATENT, rope_parameters=_GROWING),
    _case("mistral4", "groups", _SIGMOID | _LATENT, n_group=4, topk_group=2,
          rope_parameters=_GROWING | {"llama_4_scaling_beta": 0.1}),
    _case("solar_open", "plain", _SIGMOID | {"first_k_dense_replace": 0}, head_dim=24,
          attention_bias=True),
    _case("flex_olmo", "plain", _EXPERTS | {"num_experts": 6}),
    _case("hy_v3", "plain", _QWEN_VL, num_shared_experts=1, head_dim=24, rope_parameters=_THETA,
          router_scaling_factor=1.7, mlp_layer_types=["dense", "sparse", "sparse"]),
    _case("hunyuan_v1_moe", "plain", _HUNYUAN, head_dim=24),
    Case(family="mistral3", name="vision-latent",
         changes={"text_config": SIZES | {"pad_token_id": 0, "model_type": "mistral4",
                                          "rope_parameters": _GROWING} | _SIGMOID | _LATENT}),
    Case(family="qwen3_vl_moe", name="vision-stacked",
         changes={"text_config": SIZES | {"pad_token_id": 0} | _QWEN_VL}),
]  # fmt: skip

NEW_MOE_TELLING = (
    "llama4_text-scout",
    "llama4_text-maverick",
    "afmoe-plain",
    "olmoe-normed-biases",
    "ernie4_5_moe-plain",
    "glm4_moe-plain",
    "granitemoeshared-biases",
    "minimax_m2-plain",
    "dots1-windows",
    "hunyuan_v1_moe-plain",
)
