"""A checkpoint of transformers written as GGUF, of families that `tests.weights` does not write.

Names are the ``gguf`` package's own map; what changes besides is as in llama.cpp's ``conversion/``.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from tests.parity.gguf_states import STATES, completed, delta_parts, state_tensor, write_states
from tests.weights.gguf_export import llama3_factors

Config = dict[str, Any]

_PERMUTED = ("arcee", "granite", "granitehybrid", "granitemoe", "mistral3", "olmo", "smollm3")
_LATENT = ("deepseek2", "glm-dsa", "mistral4")
_LAYER_NORMS = ("cohere2", "command-r", "jais2", "nemotron", "olmo", "phi2", "stablelm")
_NORMS_PLUS_ONE = ("gemma", "nemotron")
_EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.(\w+)\.weight")
_STREAM = re.compile(r"(.+\.altup_\w*projections)\.(\d+)\.weight")
_STACKED = ("gemma4_text", "mistral4")  # gates above the rest, as transformers has them
_VECTORS = ("sinks", "layer_scalar", "correct_output_scale")
_SCALES = {"router.scale": "ffn_gate_inp", "router.per_expert_scale": "ffn_down_exps"}
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_USED = ("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk")


def write_gguf(folder: Path, path: Path, architecture: str) -> None:
    """Write the model in ``folder``, all tensors in float32."""
    config = json.loads((folder / "config.json").read_text())
    config = config | config.get("text_config", {})
    if architecture in STATES:
        config = completed(config)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_file_type(0)
    _write_sizes(writer, config, architecture)
    _write_rope(writer, config, architecture)
    _write_experts(writer, config, architecture)
    _write_others(writer, config, architecture)
    if architecture in STATES:
        write_states(writer, config, architecture)
    arch = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, values in _tensors(load_file(folder / "model.safetensors"), config, architecture):
        if architecture in STATES:
            name, values = state_tensor(name, values, config, architecture)
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        layer, _, scale = name.removeprefix("model.layers.").partition(".")
        if scale in _SCALES:
            found = f"blk.{layer}.{_SCALES[scale]}.scale"
        assert found is not None, name
        writer.add_tensor(found, values.float().contiguous().numpy())
    rope = _rope(config)
    if rope["rope_type"] == "proportional":
        width = _global_width(config)
        turning = int(width * rope["partial_rotary_factor"] / 2)
        factors = [1.0] * turning + [1e30] * (width // 2 - turning)
        writer.add_tensor("rope_freqs.weight", torch.tensor(factors).numpy())
    if rope["rope_type"] == "llama3":
        flat = config | {"rope_theta": rope["rope_theta"]}
        writer.add_tensor("rope_freqs.weight", llama3_factors(flat, rope).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _rope(config: Config) -> Config:
    rope = config["rope_parameters"]
    return rope.get("full_attention", rope)


def _write_sizes(writer: gguf.GGUFWriter, config: Config, architecture: str) -> None:
    heads = config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    latent = architecture in _LATENT
    writer.add_head_count_kv(1 if latent else config.get("num_key_value_heads") or heads)
    if architecture in _LAYER_NORMS:
        keys = ("layer_norm_eps", "norm_eps", "layer_norm_epsilon")
        writer.add_layer_norm_eps(next((config[key] for key in keys if key in config), 1e-5))
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if architecture == "gemma3n":
        _write_gemma3n(writer, config)
    if architecture == "gemma4":
        _write_gemma4(writer, config, _global_width(config))
    elif config.get("head_dim") and not latent:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])


def _global_width(config: Config) -> int:
    """Of the heads of the last layer, which is a global one."""
    own = config["per_layer_config"].get(str(config["num_hidden_layers"] - 1), {})
    return own.get("head_dim", config["head_dim"])


def _write_gemma3n(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_altup_active_idx(config["altup_active_idx"])
    writer.add_altup_num_inputs(config["altup_num_inputs"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    parts = torch.tensor(config["activation_sparsity_pattern"])
    writer.add_activation_sparsity_scale(torch.distributions.Normal(0, 1).icdf(parts).tolist())
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _write_gemma4(writer: gguf.GGUFWriter, config: Config, global_width: int) -> None:
    layers, shared = config["num_hidden_layers"], config["num_kv_shared_layers"]
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"] or 0)
    for width, names in (
        (global_width, ("key_length", "value_length")),
        (config["head_dim"], ("key_length_swa", "value_length_swa")),
    ):
        for name in names:
            getattr(writer, f"add_{name}")(width)
    writer.add_rope_dimension_count(global_width)
    writer.add_rope_dimension_count_swa(config["head_dim"])
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    if config["use_double_wide_mlp"]:
        width = config["intermediate_size"]
        writer.add_feed_forward_length(
            [width * (1 if layer < layers - shared else 2) for layer in range(layers)]
        )
    heads = config["num_key_value_heads"]
    own = [config["per_layer_config"].get(str(layer), {}) for layer in range(layers)]
    if config["attention_k_eq_v"]:
        writer.add_head_count_kv([each.get("num_key_value_heads", heads) for each in own])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _write_rope(writer: gguf.GGUFWriter, config: Config, architecture: str) -> None:
    rope, theta = _rope(config), _rope(config)["rope_theta"]
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if rope.get("alpha"):
        theta *= rope["alpha"] ** (width / (width - 2))
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_rope_freq_base(theta)
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if architecture == "mistral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    if architecture in ("mistral3", "mistral4"):
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if architecture in _LATENT and "mscale_all_dim" in rope:
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    if architecture in _LATENT:
        writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    elif "partial_rotary_factor" in rope and rope["rope_type"] != "proportional":
        writer.add_rope_dimension_count(int(rope["partial_rotary_factor"] * width))


def _write_experts(writer: gguf.GGUFWriter, config: Config, architecture: str) -> None:
    if architecture in ("afmoe", "exaone-moe"):
        names = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
        if architecture == "afmoe":
            names |= {
                "first_k_dense_replace": "num_dense_layers", "routed_scaling_factor": "route_scale"
            }  # fmt: skip
        config = config | {name: config[theirs] for name, theirs in names.items()}
    counts = [config[name] for name in _COUNTS if config.get(name)]
    if not counts or architecture == "nemotron_h":
        return
    writer.add_expert_count(counts[0])
    writer.add_expert_used_count(next(config[name] for name in _USED if config.get(name)))
    if architecture in ("gpt-oss", "minimax-m2", "hunyuan-moe"):
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    elif "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "n_routed_experts" in config:
        dense = config.get("first_k_dense_replace")
        if dense is None and "mlp_layer_types" in config:
            dense = config["mlp_layer_types"].count("dense")
        if dense is not None:
            writer.add_leading_dense_block_count(dense)
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(bool(config.get("norm_topk_prob")))
        v2 = config["model_type"] == "deepseek_v2"
        kind = gguf.ExpertGatingFuncType.SOFTMAX if v2 else gguf.ExpertGatingFuncType.SIGMOID
        writer.add_expert_gating_func(kind)
        if (config.get("n_group") or 1) > 1:
            writer.add_expert_group_count(config["n_group"])
            writer.add_expert_group_used_count(config["topk_group"])
    if architecture == "ernie4_5-moe":
        writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
        writer.add_leading_dense_block_count(config["moe_layer_start_index"])


def _write_others(writer: gguf.GGUFWriter, config: Config, architecture: str) -> None:
    if architecture in _LATENT:
        rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
        writer.add_kv_lora_rank(rank)
        writer.add_key_length(rank + rope)
        writer.add_value_length(rank)
        writer.add_key_length_mla(config["qk_nope_head_dim"] + rope)
        writer.add_value_length_mla(config["v_head_dim"])
        if architecture == "glm-dsa":
            writer.add_indexer_top_k(config["index_topk"])
        if config.get("q_lora_rank"):
            writer.add_q_lora_rank(config["q_lora_rank"])
    if architecture.startswith("granite") and config["model_type"] != "bamba":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if architecture in ("cohere2", "command-r"):
        writer.add_logit_scale(config["logit_scale"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if config.get("sliding_window") and "layer_types" in config:
        writer.add_sliding_window(config["sliding_window"])
        if architecture not in ("gpt-oss", "cohere2"):
            windowed = [kind == "sliding_attention" for kind in config["layer_types"]]
            writer.add_sliding_window_pattern(windowed)
    if config.get("clip_qkv"):
        writer.add_clamp_kqv(config["clip_qkv"])
    if architecture == "stablelm":
        writer.add_parallel_residual(config["use_parallel_residual"])


def _tensors(
    tensors: dict[str, torch.Tensor], config: Config, architecture: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """As a converter yields them, before names are mapped."""
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, values in tensors.items():
        name = name.replace("model.language_model.", "model.")
        if "visual." in name:
            continue
        if found := _EXPERT.fullmatch(name):
            stack = experts.setdefault(f"{found[1]}.experts.{found[3]}.weight", {})
            stack[int(found[2])] = values
            continue
        if found := _STREAM.fullmatch(name):
            experts.setdefault(f"{found[1]}.weight", {})[int(found[2])] = values
            continue
        for part, cut in _parts(name, values, config):
            yield part, _changed(part, cut, config, architecture)
    for name, stack in experts.items():
        yield name, torch.stack([stack[index] for index in range(len(stack))])


def _parts(name: str, values: torch.Tensor, config: Config) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that a converter makes of one."""
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    name = name.replace("mlp.expert_bias", "mlp.expert_bias.bias")
    if name.endswith("kv_b_proj.weight"):
        widths = [config["qk_nope_head_dim"], config["v_head_dim"]]
        heads = values.view(config["num_attention_heads"], sum(widths), -1)
        keys, both = heads.split(widths, dim=1)
        yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
        yield name.replace("kv_b_proj", "v_b_proj"), both
    elif name.endswith("in_proj_qkvz.weight"):
        yield from delta_parts(name, values, config)
    elif name.endswith("input_linear.weight"):
        experts = "block_sparse_moe" in name
        base = name.replace("block_sparse_moe.input_linear.weight", "mlp.experts.")
        alone = not config["num_local_experts"]
        shared = "mlp." if alone else "mlp.shared_experts."
        base = base.replace("shared_mlp.input_linear.weight", shared)
        gate, up = values.chunk(2, dim=-2)
        assert experts or values.ndim == 2
        yield f"{base}gate_proj.weight", gate
        yield f"{base}up_proj.weight", up
    elif name.endswith("shared_mlp.output_linear.weight") and not config["num_local_experts"]:
        yield name.replace("shared_mlp.output_linear", "mlp.down_proj"), values
    elif name.endswith("gate_up_proj") and config["model_type"] == "gpt_oss":
        both = values.transpose(-1, -2)
        yield name.replace("gate_up_proj", "gate_proj.weight"), both[:, ::2]
        yield name.replace("gate_up_proj", "up_proj.weight"), both[:, 1::2]
    elif name.endswith("gate_up_proj_bias"):
        yield name.replace("gate_up_proj_bias", "gate_proj.bias"), values[..., ::2]
        yield name.replace("gate_up_proj_bias", "up_proj.bias"), values[..., 1::2]
    elif name.endswith("experts.gate_up_proj") and config["model_type"] in _STACKED:
        yield f"{name}.weight", values
    elif name.endswith("experts.gate_up_proj"):  # Qwen 3 VL's, as transformers writes it
        for kind, part in zip(("gate", "up"), values.chunk(2, dim=-2), strict=True):
            yield name.replace("gate_up_proj", f"{kind}_proj.weight"), part
    elif name.endswith("experts.down_proj"):
        turned = config["model_type"] == "gpt_oss"
        yield f"{name}.weight", values.transpose(-1, -2) if turned else values
    elif name.endswith("down_proj_bias"):
        yield name.replace("down_proj_bias", "down_proj.bias"), values
    else:
        yield (
            f"{name}.weight"
            if name.endswith(("sinks", "layer_scalar", "correct_output_scale"))
            else name,
            values,
        )


def _changed(name: str, values: torch.Tensor, config: Config, architecture: str) -> torch.Tensor:
    if architecture in _NORMS_PLUS_ONE and name.endswith("norm.weight"):
        return values + 1
    heads = {"q": config["num_attention_heads"], "k": config.get("num_key_value_heads")}
    for kind, count in heads.items():
        ends = (f"{kind}_proj.weight", f"{kind}_proj.bias")
        if architecture in _PERMUTED and count and name.endswith(ends):
            halves = values.reshape(count, 2, values.shape[0] // count // 2, *values.shape[1:])
            return halves.swapaxes(1, 2).reshape(values.shape)
    return values
