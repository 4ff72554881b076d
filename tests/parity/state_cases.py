"""Tiny models of the families that keep states of sequences."""

from tests.parity.cases import THETA, Case

_KINDS = ["conv", "full_attention", "conv", "conv"]
_LFM2: dict[str, object] = {
    "num_hidden_layers": 4,
    "layer_types": _KINDS,
    "norm_eps": 0.03,
    "block_multiple_of": 8,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
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


STATE_CASES = [
    _hybrid("qwen3_next", "experts", **_EXPERTS),
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
    _lfm2("plain"),
    # Wider than one tile of the kernel for convolutions.
    _lfm2("biases", conv_bias=True, conv_L_cache=5, tie_word_embeddings=False, hidden_size=288),
]

STATE_TELLING = ("lfm2-biases", "qwen3_next-biases", "qwen3_5_text-tied")
