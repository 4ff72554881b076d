"""Tiny models of the families that keep states of sequences."""

from tests.parity.cases import SIZES, THETA, Case

_KINDS = ["conv", "full_attention", "conv", "conv"]
_LFM2: dict[str, object] = {
    "num_hidden_layers": 4,
    "layer_types": _KINDS,
    "norm_eps": 0.03,
    "block_multiple_of": 8,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
}

_LFM2_EXPERTS: dict[str, object] = {
    "num_dense_layers": 1,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.7,
}


def _lfm2(name: str, **changes: object) -> Case:
    return Case(family="lfm2", name=name, changes=_LFM2 | changes)


_HYBRID: dict[str, object] = {
    "num_hidden_layers": 3,
    "head_dim": 24,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 40,  # wider than one tile of the kernel
    "rope_parameters": {
        "rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 0.25,
    },
}  # fmt: skip
_EXPERTS: dict[str, object] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "mlp_only_layers": [1],
}


def _hybrid(family: str, name: str, **changes: object) -> Case:
    return Case(family=family, name=name, changes=_HYBRID | changes)


_SCAN: dict[str, object] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 40,  # wider than one tile of the kernel
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_expand": 2,
    "hidden_size": 80,
}
_GRANITE: dict[str, object] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_intermediate_size": 40,
    "intermediate_size": 24,
    "num_local_experts": 6,
    "embedding_multiplier": 1.4,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 0.8,
    "pad_token_id": 0,
}
_FALCON: dict[str, object] = {
    "head_dim": 24,
    "mamba_d_ssm": 160,
    "mamba_norm_before_gate": False,
    "embedding_multiplier": 1.4,
    "lm_head_multiplier": 0.7,
    "key_multiplier": 0.8,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.8, 0.7, 1.3, 1.2, 0.8],
    "mlp_multipliers": [0.9, 0.6],
    "pad_token_id": 0,
}
_NEMOTRON: dict[str, object] = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
    "head_dim": 24,
    "mamba_num_heads": 6,
    "mamba_head_dim": 40,
    "n_groups": 2,
    "ssm_state_size": 12,
    "conv_kernel": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 1.7,
    "layer_norm_epsilon": 0.03,
    "mlp_hidden_act": "relu2",
}


def _case(family: str, name: str, base: dict[str, object], **changes: object) -> Case:
    return Case(family=family, name=name, changes=base | changes)


STATE_CASES = [
    _case("granitemoehybrid", "experts", _SCAN | _GRANITE, mamba_proj_bias=True),
    _case(
        "granitemoehybrid",
        "dense-rope",
        _SCAN | _GRANITE,
        num_local_experts=0,
        position_embedding_type="rope",
        mamba_conv_bias=False,
        mamba_d_conv=3,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    _case("bamba", "plain", _SCAN, attn_layer_indices=[1], attention_bias=True),
    _case("falcon_h1", "plain", _SCAN | _FALCON),
    _case(
        "falcon_h1",
        "normed-biases",
        _SCAN | _FALCON,
        mamba_rms_norm=True,
        mamba_proj_bias=True,
        projectors_bias=True,
        attention_bias=True,
        mlp_bias=True,
        mamba_conv_bias=False,
        mamba_d_ssm=None,
        attention_in_multiplier=1.25,
        ssm_multipliers=None,
        mlp_multipliers=[1.0, 0.6],
        tie_word_embeddings=True,
    ),
    _case("nemotron_h", "experts", _NEMOTRON),
    _case(
        "nemotron_h",
        "dense",
        _NEMOTRON,
        layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"],
        use_bias=True,
        mlp_bias=True,
    ),
    _case(
        "mamba2",
        "plain",
        {
            "num_heads": 4,
            "head_dim": 32,
            "n_groups": 2,
            "state_size": 12,
            "layer_norm_epsilon": 0.03,
        },
    ),
    _hybrid("qwen3_next", "experts", **_EXPERTS),
    _hybrid("qwen3_next", "published", **_EXPERTS | {"mlp_only_layers": []}),
    _hybrid(
        "qwen3_next",
        "biases",
        **_EXPERTS,
        attention_bias=True,
        norm_topk_prob=False,
        linear_num_key_heads=3,
        linear_conv_kernel_dim=3,
        num_key_value_heads=4,
    ),
    _hybrid("qwen3_5_text", "plain"),
    _hybrid(
        "qwen3_5_text",
        "tied",
        tie_word_embeddings=True,
        linear_num_value_heads=2,
        attention_bias=True,
    ),
    _hybrid("qwen3_5_moe_text", "plain", **_EXPERTS),
    Case(family="qwen3_5_moe", name="vision", changes={"text_config": SIZES | _HYBRID | _EXPERTS}),
    _case("lfm2_moe", "plain", _LFM2 | _LFM2_EXPERTS),
    _case(
        "lfm2_moe",
        "untied",
        _LFM2 | _LFM2_EXPERTS,
        use_expert_bias=False,
        norm_topk_prob=False,
        num_dense_layers=2,
        tie_word_embeddings=False,
    ),
    _lfm2("plain"),
    # Wider than one tile of the kernel for convolutions.
    _lfm2("biases", conv_bias=True, conv_L_cache=5, tie_word_embeddings=False, hidden_size=288),
]

STATE_TELLING = (
    "lfm2-biases", "qwen3_next-biases", "qwen3_5_text-tied", "granitemoehybrid-experts",
    "falcon_h1-plain", "falcon_h1-normed-biases", "nemotron_h-dense", "nemotron_h-experts",
    "lfm2_moe-plain",
)  # fmt: skip
