"""The config of a GGUF file of Gemma 4, whose layers differ; for sources `dense_configs`."""

from ridgeline.core.errors import CorruptFileError, UnsupportedModelError
from ridgeline.models.fields import FULL, SLIDING
from ridgeline.weights.gguf.decoder_config import (
    Config,
    GGUFContent,
    decoder,
    for_each_layer,
    layer_types,
)
from ridgeline.weights.gguf.keys import CONFIG_KEYS, Keys

_KV_HEADS, _MLP_WIDTH = CONFIG_KEYS["num_key_value_heads"], CONFIG_KEYS["intermediate_size"]
_LAYER_EMBED = "per_layer_token_embd.weight"
_NEVER_TURNS = 1e29  # what a pair's frequency is divided by where it has no position, at least


def gemma4(keys: Keys, content: GGUFContent) -> Config:
    """The file says of each layer how many KV heads it has, and how wide its network is."""
    layers, names = keys.integer("block_count"), content.names()
    kv_heads, widths = (for_each_layer(keys, name) for name in (_KV_HEADS, _MLP_WIDTH))
    if 0 in kv_heads or 0 in widths:
        raise CorruptFileError("The GGUF file has layers without KV heads, or without a network.")
    kinds = layer_types(keys, layers, default=6)
    shared = keys.integer("attention.shared_kv_layers", default=0, minimum=0)
    own = max(layers - shared, 0)
    head_dims = {
        FULL: keys.integer("attention.key_length"),
        SLIDING: keys.integer("attention.key_length_swa"),
    }
    is_double = set(widths[own:]) == {2 * widths[0]}
    if widths != (widths[0],) * own + ((2 if is_double else 1) * widths[0],) * (layers - own):
        raise UnsupportedModelError(
            "The GGUF file gives the networks of Gemma 4 widths that are not supported: all are "
            "alike, or those behind K and V of others are twice as wide."
        )
    with_values = {
        f"blk.{layer}.attn_v.weight" in names
        for layer, kind in enumerate(kinds[:own])
        if kind == FULL
    }
    if len(with_values) == 2:
        raise UnsupportedModelError("The GGUF file has values of some global layers of Gemma 4.")
    width = keys.integer("embedding_length_per_layer_input", default=0, minimum=0)
    config = decoder(keys.with_values({_KV_HEADS: kv_heads[0], _MLP_WIDTH: widths[0]}))
    theta = config.pop("rope_theta")
    config.pop("partial_rotary_factor", None)
    experts = keys.integer("expert_count", default=0, minimum=0)
    if experts:
        config |= {
            "num_experts": experts,
            "top_k_experts": keys.integer("expert_used_count"),
            "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        }
    if width and _LAYER_EMBED in names:
        config["vocab_size_per_layer_input"] = content.shape(_LAYER_EMBED)[0]
    return config | {
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": kinds,
        "sliding_window": keys.integer(CONFIG_KEYS["sliding_window"]),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": is_double,
        "enable_moe_block": experts > 0,
        "attention_k_eq_v": with_values == {False},
        "attention_bias": "blk.0.attn_q.bias" in names,
        "final_logit_softcapping": keys.number(CONFIG_KEYS["final_logit_softcapping"], default=0.0)
        or None,
        "hidden_size_per_layer_input": width,
        "per_layer_config": {
            str(layer): {"head_dim": head_dims[kind], "num_key_value_heads": heads}
            for layer, (kind, heads) in enumerate(zip(kinds, kv_heads, strict=True))
        },
        "rope_parameters": {
            FULL: _proportional(content, head_dims[FULL]) | {"rope_theta": theta},
            SLIDING: {
                "rope_type": "default",
                "rope_theta": keys.number(CONFIG_KEYS["rope_local_base_freq"], default=10_000.0),
                "partial_rotary_factor": keys.integer(
                    "rope.dimension_count_swa", default=head_dims[SLIDING]
                )
                / head_dims[SLIDING],
            },
        },
    }


def _proportional(content: GGUFContent, head_dim: int) -> Config:
    """Of global layers, whose first pairs alone turn: the file divides their frequencies by one,
    and those of the others by so much that they stand still."""
    factors = content.vector("rope_freqs.weight")
    if factors is None:
        return {"rope_type": "proportional", "partial_rotary_factor": 1.0}
    turning = int((factors < _NEVER_TURNS).sum())
    if len(factors) != head_dim // 2 or (factors[:turning] != 1.0).any():
        raise UnsupportedModelError(
            "The GGUF file scales the rotary positions of Gemma 4 by rope_freqs.weight in a way "
            "that is not supported."
        )
    return {"rope_type": "proportional", "partial_rotary_factor": 2 * turning / head_dim}
