"""What GGUF files say of models with states, as llama.cpp's ``conversion/`` writes them."""

from collections.abc import Iterator
from typing import Any

import gguf
import torch

from ridgeline.core.rounding import round_up

Config = dict[str, Any]
Named = tuple[str, torch.Tensor]

STATES = (
    "falcon-h1", "granitehybrid", "lfm2", "lfm2moe", "mamba2", "nemotron_h", "nemotron_h_moe",
    "qwen35", "qwen35moe", "qwen3next",
)  # fmt: skip
_EPS = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon")


def completed(config: Config) -> Config:
    """A config with all that the other families' have."""
    defaults = {
        "num_attention_heads": 0,
        "intermediate_size": 0,
        "max_position_embeddings": 2**20,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    if "layers_block_type" in config:
        defaults["num_hidden_layers"] = len(config["layers_block_type"])
    return {**defaults, **config, "rms_norm_eps": next(config[n] for n in _EPS if n in config)}


def write_states(writer: gguf.GGUFWriter, config: Config, architecture: str) -> None:
    layers = config["num_hidden_layers"]
    kinds = config.get("layers_block_type") or config.get("layer_types") or []
    if config["model_type"] == "bamba":
        attends = config["attn_layer_indices"]
        kinds = ["full_attention" if layer in attends else "mamba" for layer in range(layers)]
    if "full_attention" in kinds:
        kv_heads = config["num_key_value_heads"]
        writer.add_head_count_kv([kv_heads * (kind == "full_attention") for kind in kinds])
    if architecture.startswith("lfm2"):
        writer.add_shortconv_l_cache(config["conv_L_cache"])
        if architecture == "lfm2":
            width = int(2 * config["intermediate_size"] / 3)
            writer.add_feed_forward_length(round_up(width, 8))
        else:
            writer.add_leading_dense_block_count(config["num_dense_layers"])
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
            writer.add_expert_weights_scale(config["routed_scaling_factor"])
        return
    if architecture.startswith("qwen3"):
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_full_attention_interval(4)
        if "shared_expert_intermediate_size" in config:
            writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    heads, width, groups, states, length = _scan(config)
    writer.add_ssm_conv_kernel(length)
    writer.add_ssm_inner_size(width)
    writer.add_ssm_state_size(states)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_group_count(groups)
    if architecture == "granitehybrid":
        is_bamba = config["model_type"] == "bamba"
        rotates = is_bamba or config["position_embedding_type"] == "rope"
        writer.add_rope_scaling_finetuned(rotates)
    if architecture.startswith("nemotron_h"):
        moe = architecture == "nemotron_h_moe"
        size = config["moe_intermediate_size" if moe else "intermediate_size"]
        network = "moe" if moe else "mlp"
        writer.add_feed_forward_length([size * (kind == network) for kind in kinds])
        assert len(kinds) == layers


def _scan(config: Config) -> tuple[int, int, int, int, int]:
    """Heads, width, groups, size of states and length of convolutions."""
    if "linear_num_key_heads" in config:
        heads = config["linear_num_value_heads"]
        sizes = [
            config[f"linear_{n}"] for n in ("num_key_heads", "key_head_dim", "conv_kernel_dim")
        ]
        return heads, heads * config["linear_value_head_dim"], *sizes
    if "mamba_d_state" in config:
        heads = config["mamba_n_heads"]
        sizes = [config[f"mamba_{name}"] for name in ("n_groups", "d_state", "d_conv")]
        return heads, heads * config["mamba_d_head"], *sizes
    heads = config["mamba_num_heads" if "mamba_num_heads" in config else "num_heads"]
    width = config["mamba_head_dim" if "mamba_head_dim" in config else "head_dim"]
    states = config["ssm_state_size" if "ssm_state_size" in config else "state_size"]
    return heads, heads * width, config["n_groups"], states, config["conv_kernel"]


def state_tensor(name: str, values: torch.Tensor, config: Config, architecture: str) -> Named:
    if architecture.startswith("nemotron_h"):
        name = name.replace("model.", "backbone.")
        if ".experts." in name:
            name = name.replace("backbone", "model").replace("mixer", "mlp")
    if architecture == "lfm2moe":
        name = name.replace("model.layers", "layers") if ".experts." in name else name
        name = name.replace("expert_bias", "expert_bias.bias")
    if architecture == "falcon-h1":
        values = values * _multiplier(name, values, config)
    if "conv" in name and values.ndim == 3:
        values = values.squeeze(1)
    if architecture.startswith("qwen3"):
        return _delta_tensor(name, values, config, architecture)
    if name.endswith("A_log"):
        values = -torch.exp(values)[:, None]
    elif name.endswith(".D"):
        values = values[:, None]
    elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        values = values.reshape(_scan(config)[2], -1)
    return name.replace(".dt_bias", ".dt_proj.bias"), values


def delta_parts(name: str, values: torch.Tensor, config: Config) -> Iterator[Named]:
    """Qwen3-Next's projections, those of each key head apart."""
    keys, dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    own = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    parts = values.view(keys, 2 * (dim + own), -1).split([dim, dim, own, own], dim=1)
    query, key, value, gate = (part.flatten(0, 1) for part in parts)
    yield name.replace("qkvz", "qkv"), torch.cat([query, key, value])
    yield name.replace("qkvz", "z"), gate


def _delta_tensor(name: str, values: torch.Tensor, config: Config, architecture: str) -> Named:
    """Qwen 3.5's value heads go round the key heads; all norms but one have a unit offset."""
    if name.endswith("norm.weight") and "linear_attn" not in name:
        values = values + 1
    if name.endswith("A_log"):
        values = -torch.exp(values)
    if "linear_attn" in name and architecture != "qwen3next":
        keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]

        def tiled(part: torch.Tensor) -> torch.Tensor:
            grouped = part.reshape(keys, heads // keys, len(part) // heads, *part.shape[1:])
            return grouped.transpose(0, 1).reshape(part.shape)

        module = name.split("linear_attn.")[1].removesuffix(".weight")
        size = heads * config["linear_value_head_dim"]
        if module in ("in_proj_qkv", "conv1d"):
            values = torch.cat([values[:-size], tiled(values[-size:])])
        elif module == "out_proj":
            values = tiled(values.T).T
        elif module != "norm":
            values = tiled(values)
    return name.replace(".dt_bias", ".dt_proj.bias"), values


def _multiplier(name: str, values: torch.Tensor, config: Config) -> torch.Tensor | float:
    """What the converter multiplies a matrix of Falcon-H1 by."""
    gate, down = config["mlp_multipliers"]
    attention = config["attention_in_multiplier"]
    found = {
        "down_proj": down,
        "gate_proj": gate,
        "k_proj": attention * config["key_multiplier"],
        "q_proj": attention,
        "v_proj": attention,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    module = name.removesuffix(".weight").rpartition(".")[2]
    if module != "in_proj":
        return found.get(module, 1.0)
    heads, width, groups, states, _ = _scan(config)
    sizes = torch.tensor([width, width, groups * states, groups * states, heads])
    factors = torch.tensor(config["ssm_multipliers"]).repeat_interleave(sizes)
    return factors[:, None] * config["ssm_in_multiplier"]
