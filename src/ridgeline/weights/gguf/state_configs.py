"""Configs of GGUF architectures whose layers keep states; for sources `dense_configs`.

Which layers attend is said by KV heads for each layer: there are none where a state stands instead.
"""

from collections.abc import Callable, Mapping

from ridgeline.core.errors import CorruptFileError, UnsupportedModelError
from ridgeline.models.fields import FULL
from ridgeline.models.lfm2 import CONV
from ridgeline.models.mamba_config import LINEAR
from ridgeline.weights.gguf.decoder_config import (
    MAX_LAYERS,
    Config,
    GGUFContent,
    for_each_layer,
)
from ridgeline.weights.gguf.dense_configs import WHOLE_HEADS, multipliers, scaled
from ridgeline.weights.gguf.expert_configs import (
    expert_counts,
    height,
    routed,
    without_extra_layers,
)
from ridgeline.weights.gguf.keys import CONFIG_KEYS, Keys

_KV_HEADS = CONFIG_KEYS["num_key_value_heads"]
_MLP_WIDTH = CONFIG_KEYS["intermediate_size"]


def _same_where_there(keys: Keys, *names: str) -> Keys:
    """The keys, with one number for all layers where those that are not 0 are the same."""
    found: dict[str, object] = {}
    for name in names:
        values = set(for_each_layer(keys, name)) - {0}
        if len(values) > 1:
            raise UnsupportedModelError(
                f"The GGUF file gives layers different {keys.architecture}.{name}, which is not "
                "supported."
            )
        found[name] = values.pop() if values else 1
    return keys.with_values(found)


def _scan(keys: Keys, content: GGUFContent) -> Config:
    """Mamba-2's sizes, by the names of Bamba's configs."""
    heads, width = keys.integer("ssm.time_step_rank"), keys.integer("ssm.inner_size")
    names = content.names()
    if width % heads:
        raise CorruptFileError(f"The GGUF file gives {heads} heads of states a width of {width}.")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": width // heads,
        "mamba_n_groups": keys.integer("ssm.group_count"),
        "mamba_d_state": keys.integer("ssm.state_size"),
        "mamba_d_conv": keys.integer("ssm.conv_kernel"),
        "mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in names),
        "mamba_proj_bias": any(name.endswith(".ssm_in.bias") for name in names),
    }


def _mamba2(keys: Keys, content: GGUFContent) -> Config:
    scan, hidden = _scan(keys, content), keys.integer("embedding_length")
    return {
        "model_type": "mamba2",
        "hidden_size": hidden,
        "num_hidden_layers": keys.integer("block_count"),
        "max_position_embeddings": keys.integer("context_length"),
        "layer_norm_epsilon": keys.number(CONFIG_KEYS["rms_norm_eps"]),
        "num_heads": scan["mamba_n_heads"],
        "head_dim": scan["mamba_d_head"],
        "n_groups": scan["mamba_n_groups"],
        "state_size": scan["mamba_d_state"],
        "conv_kernel": scan["mamba_d_conv"],
        "use_conv_bias": scan["mamba_conv_bias"],
        "use_bias": scan["mamba_proj_bias"],
        "expand": keys.integer("ssm.inner_size") // hidden,
    }


def _kinds(keys: Keys, other: str) -> list[str]:
    return [FULL if heads else other for heads in for_each_layer(keys, _KV_HEADS)]


def _lfm2(keys: Keys, content: GGUFContent) -> Config:
    """The width of networks is the adjusted one."""
    config = scaled(_same_where_there(keys, _KV_HEADS), content, "lfm2")
    del config["attention_bias"]
    return config | {
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": keys.integer("shortconv.l_cache"),
        "conv_bias": any(name.endswith(".shortconv.conv.bias") for name in content.names()),
        "layer_types": _kinds(keys, CONV),
        "norm_eps": config.pop("rms_norm_eps"),
    }


def _lfm2moe(keys: Keys, content: GGUFContent) -> Config:
    names = content.names()
    config = _lfm2(keys, content)
    del config["block_auto_adjust_ff_dim"]
    return config | {
        "model_type": "lfm2_moe",
        "num_dense_layers": keys.integer("leading_dense_block_count", default=0, minimum=0),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "routed_scaling_factor": keys.number("expert_weights_scale", default=1.0),
        "use_expert_bias": any(name.endswith(".exp_probs_b.bias") for name in names),
        **expert_counts(keys),
    }


def _granitehybrid(keys: Keys, content: GGUFContent) -> Config:
    """Granite 4; positions are rotated unless the file says otherwise."""
    same = _same_where_there(keys, _KV_HEADS)
    experts = keys.integer("expert_count", default=0, minimum=0)
    config = scaled(same, content, "granitemoehybrid", **multipliers(keys), **_scan(keys, content))
    config |= {
        "attention_bias": any(name.endswith(".attn_q.bias") for name in content.names()),
        "layer_types": _kinds(keys, LINEAR),
        "mamba_expand": keys.integer("ssm.inner_size") // keys.integer("embedding_length"),
        "num_local_experts": experts,
        "position_embedding_type": (
            "nope" if keys.get("rope.scaling.finetuned") is False else "rope"
        ),
        "shared_intermediate_size": height(content, "ffn_gate_shexp" if experts else "ffn_gate"),
    }
    if experts:
        config["num_experts_per_tok"] = keys.integer("expert_used_count")
    elif config["position_embedding_type"] == "rope" and keys.get("embedding_scale") is None:
        return _bamba(keys, content, config)
    return config


def _bamba(keys: Keys, content: GGUFContent, config: Config) -> Config:
    """Bamba has Granite 4's architecture, but positions and no multipliers. Files do not always
    say that half of each head is rotated."""
    kinds = _kinds(keys, LINEAR)
    dropped = ("layer_types", "num_local_experts", "position_embedding_type",
               "shared_intermediate_size", *multipliers(keys))  # fmt: skip
    return {
        "partial_rotary_factor": 0.5,
        **{name: value for name, value in config.items() if name not in dropped},
        "model_type": "bamba",
        "attn_layer_indices": [layer for layer, kind in enumerate(kinds) if kind == FULL],
        "mlp_bias": "blk.0.ffn_gate.bias" in content.names(),
    }


def _nemotron_h(keys: Keys, content: GGUFContent) -> Config:
    """A layer is what it has tensors of."""
    experts = keys.integer("expert_count", default=0, minimum=0)
    config = scaled(_same_where_there(keys, _KV_HEADS, _MLP_WIDTH), content, "nemotron_h")
    scan = _scan(keys, content)
    for name in ("attention_bias", "rope_theta"):
        del config[name]
    config |= {
        "intermediate_size": height(content, "ffn_up") or config["intermediate_size"],
        "layer_norm_epsilon": config.pop("rms_norm_eps"),
        "mamba_num_heads": scan["mamba_n_heads"],
        "mamba_head_dim": scan["mamba_d_head"],
        "n_groups": scan["mamba_n_groups"],
        "ssm_state_size": scan["mamba_d_state"],
        "conv_kernel": scan["mamba_d_conv"],
        "use_conv_bias": scan["mamba_conv_bias"],
        "use_bias": scan["mamba_proj_bias"],
        "mlp_bias": any(name.endswith(".ffn_up.bias") for name in content.names()),
    }
    if experts:
        config |= routed(keys, content) | {
            "n_shared_experts": 1,
            "moe_shared_expert_intermediate_size": height(content, "ffn_up_shexp"),
        }
        del config["first_k_dense_replace"]
        if height(content, "ffn_latent_down"):
            config["moe_latent_size"] = height(content, "ffn_latent_down")
    config = without_extra_layers(keys, config)
    layers = config["num_hidden_layers"]
    assert isinstance(layers, int)
    names = frozenset(content.names())
    return config | {"layers_block_type": [_branch(names, layer) for layer in range(layers)]}


def _branch(names: frozenset[str], layer: int) -> str:
    """What the only branch of a layer is."""
    kinds = {"attn_q": FULL, "ffn_up": "mlp", "ffn_up_exps": "moe"}
    found = (kind for module, kind in kinds.items() if f"blk.{layer}.{module}.weight" in names)
    return next(found, LINEAR)


def _falcon_h1(keys: Keys, content: GGUFContent) -> Config:
    """Converters have multiplied the matrices by the multipliers."""
    names = content.names()
    return scaled(keys, content, "falcon_h1", **_scan(keys, content)) | {
        "mamba_d_ssm": keys.integer("ssm.inner_size"),
        "mamba_norm_before_gate": False,
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in names,
        "mlp_bias": "blk.0.ffn_up.bias" in names,
        "projectors_bias": "blk.0.ssm_out.bias" in names,
    }


def _delta(keys: Keys, content: GGUFContent, model_type: str) -> Config:
    """Qwen3-Next and its relatives: layers without queries are those of the gated delta rule."""
    names = content.names()
    heads, width = keys.integer("ssm.time_step_rank"), keys.integer("ssm.inner_size")
    if width % heads:
        raise CorruptFileError(f"The GGUF file gives {heads} heads of values a width of {width}.")
    config = WHOLE_HEADS | scaled(keys, content, model_type)
    config = without_extra_layers(keys, config)
    layers = config["num_hidden_layers"]
    assert isinstance(layers, int)
    if layers > MAX_LAYERS:
        raise CorruptFileError(f"The GGUF file claims {layers} layers.")
    return config | {
        "attention_bias": any(name.endswith(".attn_q.bias") for name in names),
        "layer_types": [
            FULL if f"blk.{layer}.attn_q.weight" in names else LINEAR for layer in range(layers)
        ],
        "linear_num_key_heads": keys.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": keys.integer("ssm.state_size"),
        "linear_value_head_dim": width // heads,
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel"),
    }


def _delta_experts(keys: Keys, content: GGUFContent, model_type: str) -> Config:
    return _delta(keys, content, model_type) | {
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": height(content, "ffn_gate_shexp"),
        **expert_counts(keys),
    }


def _qwen3next(keys: Keys, content: GGUFContent) -> Config:
    return _delta_experts(keys, content, "qwen3_next")


def _qwen35(keys: Keys, content: GGUFContent) -> Config:
    return _delta(keys, content, "qwen3_5_text")


def _qwen35moe(keys: Keys, content: GGUFContent) -> Config:
    config = _delta_experts(keys, content, "qwen3_5_moe_text")
    del config["intermediate_size"]
    return config


STATE_BUILDERS: Mapping[str, Callable[[Keys, GGUFContent], Config]] = {
    "falcon-h1": _falcon_h1,
    "granitehybrid": _granitehybrid,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2moe,
    "mamba2": _mamba2,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35moe,
    "qwen3next": _qwen3next,
}
