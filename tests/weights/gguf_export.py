"""Random checkpoints as Hugging Face lays them out, and the same written as GGUF.

Names come from the ``gguf`` package's own map; what changes besides is as in llama.cpp's
``convert_hf_to_gguf.py``.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from ridgeline.core.weight_uses import op_weights
from ridgeline.models import describe, lower
from ridgeline.models.family import TensorSource

Tensors = dict[str, torch.Tensor]
# Values that bfloat16 holds exactly, so that every plain format can.
STEP = 2.0**-8


def write_checkpoint(config: Mapping[str, object], folder: Path, seed: int = 0) -> None:
    """A folder with ``config.json`` and random weights under the family's own names."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    definition = describe(config)
    generator = torch.Generator().manual_seed(seed)
    parts: dict[str, list[torch.Tensor]] = {}
    placed: dict[str, TensorSource] = {}
    shapes = {w.name: w.shape for op in lower(definition.spec) for w in op_weights(op)}
    for name, shape in shapes.items():
        source = definition.sources[name]
        values = torch.randn(shape, generator=generator) * (shape[-1] ** -0.5)
        if name.endswith("norm"):
            values = 0.2 * torch.randn(shape, generator=generator)
            values += 0.0 if "gemma" in str(config["model_type"]) else 1.0
        values = (values / STEP).round() * STEP
        experts = [(source.of_expert(e), v) for e, v in enumerate(values)]
        for place, part in experts if "{e}" in source.name else [(source, values)]:
            parts.setdefault(place.name, []).append(part)
            placed[place.name] = place
    tensors = {name: torch.cat(found) for name, found in parts.items()}
    save_file(
        {n: (t.mT if placed[n].transpose else t).contiguous() for n, t in tensors.items()},
        folder / "model.safetensors",
    )


def export(
    folder: Path,
    path: Path,
    architecture: str,
    *,
    matrices: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    tokenizer: Mapping[str, object] | None = None,
    more: Mapping[str, object] | None = None,
    **writer_options: int,
) -> None:
    """Write the checkpoint in ``folder`` as a GGUF file, matrices in the given format.

    ``more`` are further keys of the architecture.
    """
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    writer = gguf.GGUFWriter(path, architecture, **writer_options)
    write_keys(writer, config, architecture)
    writer.add_file_type({"F32": 0, "F16": 1, "BF16": 32}.get(matrices.name, 7))
    for key, value in (tokenizer or {}).items():
        kind, inner = _kind(value)
        is_id = key.endswith("_id")
        writer.add_key_value(
            f"tokenizer.{key}", value, gguf.GGUFValueType.UINT32 if is_id else kind, inner
        )
    for key, value in (more or {}).items():
        writer.add_key_value(f"{architecture}.{key}", value, *_kind(value))
    for name, values in _renamed(tensors, config, architecture).items():
        data = values.float().numpy()
        kind = matrices if data.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _kind(value: object) -> tuple[gguf.GGUFValueType, gguf.GGUFValueType | None]:
    if isinstance(value, list):
        return gguf.GGUFValueType.ARRAY, _kind(value[0])[0]
    if isinstance(value, int) and not isinstance(value, bool):
        return gguf.GGUFValueType.INT32, None
    return gguf.GGUFValueType.get_type(value), None


def write_keys(writer: gguf.GGUFWriter, config: dict, architecture: str) -> None:
    """What the converter writes: ``set_gguf_parameters``."""
    get, of_gpt2 = config.get, architecture == "gpt2"
    heads = config["n_head" if of_gpt2 else "num_attention_heads"]
    writer.add_context_length(config["n_positions" if of_gpt2 else "max_position_embeddings"])
    writer.add_embedding_length(config["n_embd" if of_gpt2 else "hidden_size"])
    writer.add_block_count(config["n_layer" if of_gpt2 else "num_hidden_layers"])
    writer.add_head_count(heads)
    if of_gpt2:
        writer.add_feed_forward_length(4 * config["n_embd"])
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        return
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count_kv(get("num_key_value_heads", heads))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    head_dim = get("head_dim", config["hidden_size"] // heads)
    writer.add_rope_dimension_count(int(head_dim * get("partial_rotary_factor", 1.0)))
    if "head_dim" in config:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_rope_freq_base(get("rope_theta", 10_000.0))
    scaling = get("rope_scaling") or {}
    if scaling.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope_type"]))
        writer.add_rope_scaling_factor(scaling["factor"])
    if scaling.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    if "num_local_experts" in config:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if architecture == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if get(name):
            getattr(writer, f"add_{name}")(config[name])


def _renamed(tensors: Tensors, config: dict, architecture: str) -> Tensors:
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    arch = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(arch, layers)
    found = {}
    for name, values in _stacked(tensors, config).items():
        changed = _changed(name, values, config, architecture)
        found[names.get_name(name, try_suffixes=(".weight", ".bias"))] = changed
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "llama3":
        found["rope_freqs.weight"] = llama3_factors(config, scaling)
    for kind in ("long", "short"):
        if f"{kind}_factor" in scaling:
            found[f"rope_factors_{kind}.weight"] = torch.tensor(scaling[f"{kind}_factor"])
    return found


def _stacked(tensors: Tensors, config: dict) -> Tensors:
    """Mixtral's experts, all of a layer in one tensor."""
    found = {name: values for name, values in tensors.items() if ".experts." not in name}
    for layer in range(config.get("num_hidden_layers", 0)):
        for kind in ("w1", "w2", "w3") if "num_local_experts" in config else ():
            prefix = f"model.layers.{layer}.block_sparse_moe.experts"
            every = [tensors[f"{prefix}.{e}.{kind}.weight"]
                     for e in range(config["num_local_experts"])]  # fmt: skip
            found[f"layers.{layer}.feed_forward.experts.{kind}.weight"] = torch.stack(every)
    return found


def _changed(name: str, values: torch.Tensor, config: dict, architecture: str) -> torch.Tensor:
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return values + 1
    if architecture == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return values.T.contiguous()
    if architecture == "llama":
        heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
        for kind, count in heads.items():
            if name.endswith((f"{kind}_proj.weight", f"{kind}_proj.bias")):
                split = values.reshape(count, 2, values.shape[0] // count // 2, *values.shape[1:])
                return split.swapaxes(1, 2).reshape(values.shape)
    return values


def llama3_factors(config: dict, scaling: dict) -> torch.Tensor:
    """``generate_extra_tensors`` of the converter's LlamaModel."""
    dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    freqs = 1.0 / (config["rope_theta"] ** (np.arange(0, dim, 2, dtype=np.float32) / dim))
    context, factors = scaling["original_max_position_embeddings"], []
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    for freq in freqs:
        wavelength = 2 * math.pi / freq
        smooth = (context / wavelength - low) / (high - low)
        smooth = min(max(smooth, 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return torch.tensor(factors, dtype=torch.float32)
