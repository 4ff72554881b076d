"""Configs of GGUF architectures with experts: a function for each; for sources `dense_configs`."""

from collections.abc import Callable, Mapping

from ridgeline.core.errors import CorruptFileError
from ridgeline.models.fields import FULL
from ridgeline.weights.gguf.decoder_config import (
    Config,
    GGUFContent,
    decoder,
    layer_types,
    with_growth,
    with_scaling,
)
from ridgeline.weights.gguf.dense_configs import WHOLE_HEADS, multipliers, scaled
from ridgeline.weights.gguf.keys import CONFIG_KEYS, Keys

_SIGMOID = 2  # ``enum llama_expert_gating_func_type``
_DENSE = "leading_dense_block_count"
_WIDTH = "expert_feed_forward_length"


def expert_counts(keys: Keys) -> Config:
    """How many experts there are, and how many of them a token meets."""
    return {
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
    }


def _local_counts(keys: Keys) -> Config:
    counts = expert_counts(keys)
    return counts | {"num_local_experts": counts.pop("num_experts")}


def height(content: GGUFContent, module: str) -> int:
    """Rows of the matrix of that name in the first layer that has one; 0 if none has."""
    suffix = f".{module}.weight"
    shapes = (content.shape(name) for name in content.names() if name.endswith(suffix))
    return next((shape[-2] for shape in shapes if len(shape) > 1), 0)


def _qwen2moe(keys: Keys, content: GGUFContent) -> Config:
    config = with_scaling(decoder(keys), keys, content) | expert_counts(keys)
    return config | {
        "model_type": "qwen2_moe",
        "moe_intermediate_size": keys.integer(_WIDTH),
        "shared_expert_intermediate_size": height(content, "ffn_gate_shexp"),
        "qkv_bias": "blk.0.attn_q.bias" in content.names(),
        "use_sliding_window": False,
    }


def _qwen3moe(keys: Keys, content: GGUFContent) -> Config:
    """The weights of a token's experts add up to one, as they do in every published model."""
    return scaled(
        keys,
        content,
        "qwen3_moe",
        moe_intermediate_size=keys.integer(_WIDTH),
        norm_topk_prob=True,
        **expert_counts(keys),
    )


def _gpt_oss(keys: Keys, content: GGUFContent) -> Config:
    """Windows by turns, sliding first; YaRN between the exact bounds."""
    config = scaled(keys, content, "gpt_oss", **_local_counts(keys))
    scaling = config.get("rope_scaling")
    if not isinstance(scaling, dict):
        raise CorruptFileError("The GGUF file of gpt-oss has no rope scaling.")
    layers = keys.integer("block_count")
    scaling["truncate"] = False
    return config | {
        "intermediate_size": keys.integer(_WIDTH),
        "sliding_window": keys.integer(CONFIG_KEYS["sliding_window"]),
        "layer_types": layer_types(keys, layers, default=2),
    }


def _olmoe(keys: Keys, content: GGUFContent) -> Config:
    return scaled(keys, content, "olmoe", norm_topk_prob=False, **expert_counts(keys))


def _granitemoe(keys: Keys, content: GGUFContent) -> Config:
    return scaled(
        keys,
        content,
        "granitemoeshared",
        shared_intermediate_size=height(content, "ffn_gate_shexp"),
        **_local_counts(keys),
        **multipliers(keys),
    )


def _ernie4_5_moe(keys: Keys, content: GGUFContent) -> Config:
    config = scaled(keys, content, "ernie4_5_moe")
    width = keys.integer(_WIDTH)
    return config | {
        "use_bias": config.pop("attention_bias"),
        "moe_num_experts": keys.integer("expert_count"),
        "moe_k": keys.integer("expert_used_count"),
        "moe_intermediate_size": width,
        "moe_num_shared_experts": height(content, "ffn_gate_shexp") // width,
        "moe_layer_interval": keys.integer("interleave_moe_layer_step", default=1),
        "moe_layer_start_index": keys.integer(_DENSE, default=0, minimum=0),
    }


def routed(keys: Keys, content: GGUFContent) -> Config:
    """What models with DeepSeek's experts say of them."""
    width = keys.integer(_WIDTH)
    config: Config = {
        "n_routed_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": width,
        "n_shared_experts": height(content, "ffn_gate_shexp") // width,
        "first_k_dense_replace": keys.integer(_DENSE, default=0, minimum=0),
        "routed_scaling_factor": keys.number("expert_weights_scale", default=0.0) or 1.0,
        "norm_topk_prob": keys.get("expert_weights_norm") is True,
    }
    groups = keys.integer("expert_group_count", default=0, minimum=0)
    used = keys.integer("expert_group_used_count", default=1)
    return config | {"n_group": max(groups, 1), "topk_group": used if groups > 1 else 1}


def without_extra_layers(keys: Keys, config: Config) -> Config:
    """The layers of the file, less those that predict one more token."""
    extra = keys.integer("nextn_predict_layers", default=0, minimum=0)
    layers = keys.integer("block_count") - extra
    if layers < 1:
        raise CorruptFileError(f"The GGUF file has {extra} layers of nextn, and no others.")
    return config | {"num_hidden_layers": layers}


def _glm4moe(keys: Keys, content: GGUFContent) -> Config:
    config = WHOLE_HEADS | scaled(keys, content, "glm4_moe")
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in content.names()
    return without_extra_layers(keys, config | routed(keys, content))


def _dots1(keys: Keys, content: GGUFContent) -> Config:
    return scaled(keys, content, "dots1", sliding_window=None) | routed(keys, content)


def _exaone_moe(keys: Keys, content: GGUFContent) -> Config:
    """Layers without a window are not rotated; those that predict one more token are left out."""
    config = without_extra_layers(keys, scaled(keys, content, "exaone_moe"))
    del config["attention_bias"]
    config |= routed(keys, content)
    layers = config["num_hidden_layers"]
    assert isinstance(layers, int)
    window = keys.integer(CONFIG_KEYS["sliding_window"], default=0, minimum=0)
    return config | {
        "num_experts": config.pop("n_routed_experts"),
        "num_shared_experts": config.pop("n_shared_experts"),
        "sliding_window": window or None,
        "layer_types": layer_types(keys, layers, default=4) if window else [FULL] * layers,
    }


def _minimax_m2(keys: Keys, content: GGUFContent) -> Config:
    config = scaled(keys, content, "minimax_m2", **_local_counts(keys))
    del config["attention_bias"]
    return config | {
        "intermediate_size": keys.integer(_WIDTH),
        "rotary_dim": keys.integer("rope.dimension_count"),
    }


def _hunyuan_moe(keys: Keys, content: GGUFContent) -> Config:
    counts = expert_counts(keys)
    return scaled(
        keys,
        content,
        "hunyuan_v1_moe",
        intermediate_size=keys.integer(_WIDTH),
        num_experts=counts["num_experts"],
        moe_topk=counts["num_experts_per_tok"],
    )


def _deepseek2(keys: Keys, content: GGUFContent) -> Config:
    """DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash: told apart by how experts are scored.

    Since 2025 files have the widths of the absorbed form, and those of heads under names of
    their own.
    """
    heads = keys.integer(CONFIG_KEYS["num_attention_heads"])
    rope_dim = keys.integer("rope.dimension_count")
    whole = keys.integer("attention.key_length_mla", default=keys.integer("attention.key_length"))
    value = keys.integer(
        "attention.value_length_mla", default=keys.integer("attention.value_length")
    )
    rank = keys.integer("attention.q_lora_rank", default=0, minimum=0)
    if rope_dim >= whole:
        raise CorruptFileError(f"The GGUF file rotates {rope_dim} of the {whole} elements of K.")
    config = decoder(keys, head_dim=rope_dim)
    config = with_scaling(config, keys, content) | routed(keys, content)
    del config["head_dim"]
    scaling = config.get("rope_scaling")
    multiplier = keys.number("rope.scaling.yarn_log_multiplier", default=0.0)
    if isinstance(scaling, dict) and multiplier:
        mscale = round(multiplier * 10, 6)  # the file has a tenth of it
        scaling |= {"mscale": mscale, "mscale_all_dim": mscale}
    config |= {
        "model_type": "deepseek_v2",
        "num_key_value_heads": heads,
        "q_lora_rank": rank or None,
        "kv_lora_rank": keys.integer("attention.kv_lora_rank"),
        "qk_nope_head_dim": whole - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": value,
    }
    if keys.architecture == "mistral4":
        # Of groups the best two experts count.
        return with_growth(config, keys) | {"model_type": "mistral4"}
    if keys.architecture == "glm-dsa":
        limit = {"index_topk": keys.integer("attention.indexer.top_k")}
        return without_extra_layers(keys, config | limit | {"model_type": "glm_moe_dsa"})
    if keys.integer("expert_gating_func", default=1, minimum=0) == _SIGMOID:
        return without_extra_layers(keys, config | {"model_type": "deepseek_v3"})
    if config["n_group"] != 1:
        config["topk_method"] = "group_limited_greedy"
    return config


def _afmoe(keys: Keys, content: GGUFContent) -> Config:
    """Embeddings are times √D, as in every published model."""
    config = scaled(keys, content, "afmoe") | routed(keys, content)
    return config | {
        "num_experts": config.pop("n_routed_experts"),
        "mup_enabled": True,
        "sliding_window": keys.integer(CONFIG_KEYS["sliding_window"]),
        "layer_types": layer_types(keys, keys.integer("block_count"), default=4),
    }


EXPERT_BUILDERS: Mapping[str, Callable[[Keys, GGUFContent], Config]] = {
    "afmoe": _afmoe,
    "deepseek2": _deepseek2,
    "dots1": _dots1,
    "ernie4_5-moe": _ernie4_5_moe,
    "glm4moe": _glm4moe,
    "exaone-moe": _exaone_moe,
    "glm-dsa": _deepseek2,
    "gpt-oss": _gpt_oss,
    "granitemoe": _granitemoe,
    "hunyuan-moe": _hunyuan_moe,
    "minimax-m2": _minimax_m2,
    "mistral4": _deepseek2,
    "olmoe": _olmoe,
    "qwen2moe": _qwen2moe,
    "qwen3moe": _qwen3moe,
    "qwen3vlmoe": _qwen3moe,
}
