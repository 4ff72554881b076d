"""Configs of GGUF architectures without experts, beyond the first: a function for each.

Sources: ``conversion/*.py`` of llama.cpp for what files say, ``src/models/*.cpp`` for what they
leave to the reader.
"""

import math
from collections.abc import Callable, Mapping

from ridgeline.models.fields import FULL
from ridgeline.weights.gguf.decoder_config import (
    Config,
    GGUFContent,
    decoder,
    layer_types,
    with_growth,
    with_scaling,
)
from ridgeline.weights.gguf.keys import CONFIG_KEYS, Keys

# What a file that does not say another number rotates, in families that have another default.
WHOLE_HEADS: Config = {"partial_rotary_factor": 1.0}
_HEADS = CONFIG_KEYS["num_attention_heads"]


def scaled(keys: Keys, content: GGUFContent, model_type: str, **more: object) -> Config:
    """A decoder with scaled rotary positions and biases where there are any."""
    names = content.names()
    return with_scaling(decoder(keys), keys, content) | {
        "model_type": model_type,
        "attention_bias": "blk.0.attn_q.bias" in names,
        **more,
    }


def _layer_norm(keys: Keys, name: str = "layer_norm_eps") -> Config:
    """A decoder with LayerNorm, whose epsilon has this name in the family's configs."""
    return decoder(keys, norm={name: keys.number(CONFIG_KEYS["layer_norm_epsilon"])})


def _gemma(keys: Keys, content: GGUFContent) -> Config:
    return scaled(keys, content, "gemma", hidden_activation="gelu_pytorch_tanh")


def _olmo(keys: Keys, content: GGUFContent) -> Config:
    config = with_scaling(decoder(keys, norm={}), keys, content) | {
        "model_type": "olmo",
        "attention_bias": "blk.0.attn_q.bias" in content.names(),
    }
    clip = keys.number("attention.clamp_kqv", default=0.0)
    return config | {"clip_qkv": clip} if clip else config


def _olmo2(keys: Keys, content: GGUFContent) -> Config:
    """OLMo 2, and with windows OLMo 3, whose windowed layers have unscaled positions."""
    config = scaled(keys, content, "olmo2")
    window = keys.integer(CONFIG_KEYS["sliding_window"], default=0, minimum=0)
    if not window:
        return config
    kinds = layer_types(keys, keys.integer("block_count"), default=4)
    return config | {"model_type": "olmo3", "sliding_window": window, "layer_types": kinds}


def multipliers(keys: Keys) -> Config:
    """Granite's."""
    head_scale = 1 / math.sqrt(keys.integer("embedding_length") / keys.integer(_HEADS))
    return {
        "attention_multiplier": keys.number("attention.scale", default=0.0) or head_scale,
        "embedding_multiplier": keys.number("embedding_scale", default=1.0),
        "residual_multiplier": keys.number("residual_scale", default=1.0),
        "logits_scaling": keys.number("logit_scale", default=1.0),
    }


def _granite(keys: Keys, content: GGUFContent) -> Config:
    mlp_bias = "blk.0.ffn_gate.bias" in content.names()
    return scaled(keys, content, "granite", mlp_bias=mlp_bias, **multipliers(keys))


def _smollm3(keys: Keys, content: GGUFContent) -> Config:
    """The file does not say that every fourth layer has no positions."""
    mlp_bias = "blk.0.ffn_gate.bias" in content.names()
    return scaled(keys, content, "smollm3", mlp_bias=mlp_bias, no_rope_layer_interval=4)


def _phi2(keys: Keys, _: GGUFContent) -> Config:
    return (
        WHOLE_HEADS
        | _layer_norm(keys)
        | {
            "model_type": "phi",
            "hidden_act": "gelu_new",
        }
    )


def _seed_oss(keys: Keys, content: GGUFContent) -> Config:
    names = content.names()
    return scaled(
        keys,
        content,
        "seed_oss",
        attention_out_bias="blk.0.attn_output.bias" in names,
        mlp_bias="blk.0.ffn_gate.bias" in names,
    )


def _exaone4(keys: Keys, content: GGUFContent) -> Config:
    config = scaled(keys, content, "exaone4")
    del config["attention_bias"]
    layers = keys.integer("block_count")
    window = keys.integer(CONFIG_KEYS["sliding_window"], default=0, minimum=0)
    kinds = layer_types(keys, layers, default=4) if window else [FULL] * layers
    return config | {"sliding_window": window or None, "layer_types": kinds}


def _ernie4_5(keys: Keys, content: GGUFContent) -> Config:
    config = scaled(keys, content, "ernie4_5")
    return config | {"use_bias": config.pop("attention_bias")}


def _glm4(keys: Keys, content: GGUFContent) -> Config:
    return WHOLE_HEADS | scaled(keys, content, "glm4")


def _hunyuan(keys: Keys, content: GGUFContent) -> Config:
    return scaled(keys, content, "hunyuan_v1_dense")


def _arcee(keys: Keys, content: GGUFContent) -> Config:
    return scaled(keys, content, "arcee", mlp_bias="blk.0.ffn_up.bias" in content.names())


def _nemotron(keys: Keys, content: GGUFContent) -> Config:
    names = content.names()
    return (
        WHOLE_HEADS
        | _layer_norm(keys, "norm_eps")
        | {
            "model_type": "nemotron",
            "attention_bias": "blk.0.attn_q.bias" in names,
            "mlp_bias": "blk.0.ffn_up.bias" in names,
        }
    )


def _jais2(keys: Keys, content: GGUFContent) -> Config:
    names = content.names()
    return _layer_norm(keys) | {
        "model_type": "jais2",
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_up.bias" in names,
    }


def _command_r(keys: Keys, content: GGUFContent) -> Config:
    names = content.names()
    return _layer_norm(keys) | {
        "model_type": "cohere",
        "attention_bias": "blk.0.attn_q.bias" in names,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in names,
        "logit_scale": keys.number("logit_scale"),
    }


def _cohere2(keys: Keys, _: GGUFContent) -> Config:
    layers = keys.integer("block_count")
    return _layer_norm(keys) | {
        "model_type": "cohere2",
        "logit_scale": keys.number("logit_scale"),
        "sliding_window": keys.integer(CONFIG_KEYS["sliding_window"]),
        "layer_types": layer_types(keys, layers, default=4),
    }


def _stablelm(keys: Keys, content: GGUFContent) -> Config:
    names = content.names()
    return (
        WHOLE_HEADS
        | _layer_norm(keys)
        | {
            "model_type": "stablelm",
            "use_parallel_residual": keys.get("use_parallel_residual") is not False
            and "blk.0.ffn_norm.weight" not in names,
            "use_qkv_bias": "blk.0.attn_q.bias" in names,
            "qk_layernorm": "blk.0.attn_q_norm.weight" in names,
        }
    )


def _mistral3(keys: Keys, content: GGUFContent) -> Config:
    """Ministral 3: a multiplier of YaRN's logarithm says that its two mscales cancel out."""
    config = scaled(keys, content, "ministral3")
    del config["attention_bias"]
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict) and keys.number("rope.scaling.yarn_log_multiplier", default=0.0):
        scaling |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    return with_growth(config, keys)


def _qwen2vl(keys: Keys, content: GGUFContent) -> Config:
    """The text model; the vision tower lies in a file of its own."""
    config = scaled(keys, content, "qwen2", use_sliding_window=False)
    del config["attention_bias"]
    return config


def _qwen3vl(keys: Keys, content: GGUFContent) -> Config:
    return scaled(keys, content, "qwen3", use_sliding_window=False)


DENSE_BUILDERS: Mapping[str, Callable[[Keys, GGUFContent], Config]] = {
    "arcee": _arcee,
    "cohere2": _cohere2,
    "command-r": _command_r,
    "ernie4_5": _ernie4_5,
    "exaone4": _exaone4,
    "gemma": _gemma,
    "glm4": _glm4,
    "granite": _granite,
    "hunyuan-dense": _hunyuan,
    "jais2": _jais2,
    "mistral3": _mistral3,
    "nemotron": _nemotron,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "phi2": _phi2,
    "qwen2vl": _qwen2vl,
    "qwen3vl": _qwen3vl,
    "seed_oss": _seed_oss,
    "smollm3": _smollm3,
    "stablelm": _stablelm,
}
