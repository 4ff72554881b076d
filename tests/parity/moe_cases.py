"""Tiny mixtures of experts and models with latent attention.

Seeds are chosen so that no router comes near a tie (`tests.parity.routers`).
"""

from tests.parity.cases import YARN, Case

_MIXTRAL = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 40}
_QWEN = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_QWEN_2 = _QWEN | {"shared_expert_intermediate_size": 40}
_DEEPSEEK = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
}
_GROUPED = {"n_group": 4, "topk_group": 2}
_MSCALE = YARN | {"truncate": False, "mscale": 0.7, "mscale_all_dim": 0.4}
_GPT_OSS = {
    "num_hidden_layers": 4,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "intermediate_size": 40,
    "head_dim": 16,
    "sliding_window": 11,
    "swiglu_limit": 1.5,
    "rope_parameters": YARN | {"truncate": False},
}


def _case(family: str, name: str, base: dict[str, object], seed: int = 0, **more: object) -> Case:
    return Case(family=family, name=name, changes=base | more, seed=seed)


MOE_CASES = [
    _case("mixtral", "plain", _MIXTRAL),
    _case("mixtral", "window", _MIXTRAL, sliding_window=13, head_dim=24, tie_word_embeddings=True),
    _case("mixtral", "top-1", _MIXTRAL, num_experts_per_tok=1, hidden_act="gelu"),
    _case("qwen2_moe", "plain", _QWEN_2),
    _case("qwen2_moe", "normed", _QWEN_2, norm_topk_prob=True, mlp_only_layers=[1]),
    _case(
        "qwen2_moe",
        "steps-windows",
        _QWEN_2,
        num_hidden_layers=4,
        decoder_sparse_step=2,
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=3,
        qkv_bias=False,
    ),
    _case("qwen3_moe", "normed", _QWEN, norm_topk_prob=True, head_dim=24),
    _case(
        "qwen3_moe",
        "biases-window",
        _QWEN,
        mlp_only_layers=[0],
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=9,
        tie_word_embeddings=True,
    ),
    _case("deepseek_v2", "lite", _DEEPSEEK, q_lora_rank=None, rope_parameters=_MSCALE),
    _case(
        "deepseek_v2",
        "published",
        _DEEPSEEK,
        q_lora_rank=None,
        rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
    ),
    _case(
        "deepseek_v2",
        "groups-biases",
        _DEEPSEEK,
        **_GROUPED,
        topk_method="group_limited_greedy",
        q_lora_rank=24,
        attention_bias=True,
        routed_scaling_factor=3.0,
    ),
    _case("deepseek_v3", "groups", _DEEPSEEK, **_GROUPED, q_lora_rank=24),
    _case(
        "deepseek_v3",
        "yarn-biases",
        _DEEPSEEK,
        **_GROUPED,
        q_lora_rank=24,
        attention_bias=True,
        rope_parameters=_MSCALE,
    ),
    _case(
        "deepseek_v3",
        "flat-halves",
        _DEEPSEEK,
        n_group=1,
        topk_group=1,
        q_lora_rank=None,
        norm_topk_prob=False,
        rope_interleave=False,
        first_k_dense_replace=0,
    ),
    _case("gpt_oss", "plain", _GPT_OSS, seed=1),
    _case("gpt_oss", "published", _GPT_OSS, swiglu_limit=7.0),
    _case(
        "gpt_oss",
        "no-biases",
        _GPT_OSS,
        attention_bias=False,
        swiglu_alpha=1.3,
        layer_types=["full_attention", "full_attention", "sliding_attention", "full_attention"],
        rope_parameters=YARN,
        tie_word_embeddings=True,
    ),
]

MOE_TELLING = (
    "mixtral-window",
    "qwen2_moe-plain",
    "qwen2_moe-normed",
    "qwen3_moe-biases-window",
    "deepseek_v2-lite",
    "deepseek_v2-groups-biases",
    "deepseek_v3-yarn-biases",
    "deepseek_v3-flat-halves",
    "gpt_oss-plain",
)
