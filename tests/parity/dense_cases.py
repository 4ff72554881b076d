"""Tiny models of the dense families beyond the first: norms, positions and multipliers."""

from dataclasses import replace

from tests.parity.cases import LLAMA_3, THETA, YARN, Case

_SHORT = [1.0, 1.1, 1.3, 1.2, 1.7, 2.0, 2.5, 3.0]
_LONG = [1.0, 1.5, 2.0, 4.0, 6.0, 9.0, 14.0, 20.0]


def _long_rope(original: int, **more: object) -> dict[str, object]:
    """LongRoPE over heads of 16; the length outside of the section is the one that counts."""
    section = {"rope_type": "longrope", "short_factor": _SHORT, "long_factor": _LONG}
    return {
        "original_max_position_embeddings": original,
        "rope_parameters": {"rope_theta": THETA} | section | more,
    }


def _case(family: str, name: str, **changes: object) -> Case:
    return Case(family=family, name=name, changes={"pad_token_id": 0} | changes)


_LAYER_NORM: dict[str, object] = {"layer_norm_eps": 0.03}
_GPT_2: dict[str, object] = {
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
    "layer_norm_epsilon": 0.03,
}
_GRANITE: dict[str, object] = {
    "embedding_multiplier": 1.4,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 0.8,
}
_THETA: dict[str, object] = {"rope_theta": THETA, "rope_type": "default"}

DENSE_CASES = [
    _case("phi3", "plain"),
    _case("phi3", "partial-window", partial_rotary_factor=0.75, sliding_window=13),
    _case("phi3", "partial-tied", rope_parameters=_THETA | {"partial_rotary_factor": 0.5},
          num_key_value_heads=4, tie_word_embeddings=True),
    replace(_case("phi3", "longrope-within", **_long_rope(104, factor=4.0)), max_model_len=104),
    _case("phi3", "longrope-beyond", **_long_rope(71, attention_factor=1.3), sliding_window=40),
    _case("olmo2", "plain"),
    _case("olmo2", "biases", attention_bias=True, num_key_value_heads=4),
    _case("olmo2", "tied-yarn", tie_word_embeddings=True, rope_parameters=YARN),
    _case("gpt2", "plain", **_GPT_2),
    _case("gpt2", "inner-relu", **_GPT_2, n_inner=80, activation_function="relu"),
    _case("gpt2", "scales", **_GPT_2, scale_attn_weights=False,
          scale_attn_by_inverse_layer_idx=True, tie_word_embeddings=False),
    _case("smollm3", "interval", no_rope_layer_interval=2),
    _case("smollm3", "listed-biases", no_rope_layers=[0, 1, 1], attention_bias=True, mlp_bias=True,
          tie_word_embeddings=False),
    _case("smollm3", "windows", no_rope_layer_interval=3, use_sliding_window=True,
          sliding_window=11),
    _case("smollm3", "published", num_hidden_layers=5),
    _case("gemma", "plain", head_dim=24),
    _case("gemma", "legacy-gelu", head_dim=16, hidden_act="gelu", num_key_value_heads=1,
          attention_bias=True),
    _case("granite", "multipliers", **_GRANITE),
    _case("granite", "biases-tied", **_GRANITE, attention_bias=True, mlp_bias=True,
          tie_word_embeddings=True, rope_parameters=LLAMA_3),
    _case("starcoder2", "window", norm_epsilon=0.03, sliding_window=13),
    _case("starcoder2", "no-biases", norm_epsilon=0.03, use_bias=False, hidden_act="gelu",
          tie_word_embeddings=False),
    _case("stablelm", "plain", **_LAYER_NORM),
    _case("stablelm", "parallel-biases", **_LAYER_NORM, use_parallel_residual=True,
          use_qkv_bias=True, partial_rotary_factor=0.5),
    _case("stablelm", "head-norms", **_LAYER_NORM, qk_layernorm=True),
    _case("olmo", "plain"),
    _case("olmo", "clipped", clip_qkv=2.5, attention_bias=True),
    _case("cohere", "plain", **_LAYER_NORM, logit_scale=0.9, tie_word_embeddings=False),
    _case("cohere", "head-norms", **_LAYER_NORM, logit_scale=1.2, use_qk_norm=True,
          attention_bias=True),
    _case("phi", "plain", **_LAYER_NORM),
    _case("phi", "grouped", **_LAYER_NORM, num_key_value_heads=1, partial_rotary_factor=0.75),
    _case("phi", "head-norms", **_LAYER_NORM, qk_layernorm=True),
]  # fmt: skip

DENSE_TELLING = (
    "phi3-partial-window",
    "phi3-longrope-within",
    "phi3-longrope-beyond",
    "olmo2-biases",
    "gpt2-plain",
    "gpt2-scales",
    "smollm3-windows",
    "gemma-legacy-gelu",
    "granite-multipliers",
    "starcoder2-window",
    "stablelm-parallel-biases",
    "stablelm-head-norms",
    "olmo-clipped",
    "cohere-head-norms",
    "phi-grouped",
    "phi-head-norms",
)
