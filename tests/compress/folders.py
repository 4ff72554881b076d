"""Model folders with random weights and the embedded model's tokenizer."""

import json
import shutil

import torch
from safetensors.torch import save_file
from tests.tiny import CONFIG

from ridgeline.kernels.tensors import as_tensor
from ridgeline.models import describe, lower
from ridgeline.weights import dummy_weights, locate_model

SMALL = CONFIG | {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
}
BIASED = SMALL | {"model_type": "qwen2", "num_key_value_heads": 1}
FUSED = SMALL | {"model_type": "phi3", "pad_token_id": 0}
EXPERTS = SMALL | {
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 32,
}
LATENT = SMALL | {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}


def write_folder(path, config=SMALL, *, seed=0, change=None):
    """Write the folder of a config; ``change`` may alter the weights by canonical name."""
    path.mkdir(parents=True)
    definition = describe(config)
    random = dummy_weights(lower(definition.spec), dtype="float32", seed=seed)
    weights = {name: as_tensor(weight) for name, weight in random.items()}
    if change is not None:
        change(weights)
    tensors = {}
    for name, weight in weights.items():
        source = definition.sources[name]
        if "{e}" in source.name:
            for expert in range(len(weight)):
                tensors[source.of_expert(expert).name] = weight[expert].bfloat16().clone()
        elif source.rows is not None:
            tensors.setdefault(source.name, []).append((source.rows, weight.bfloat16()))
        else:
            tensors[source.name] = weight.bfloat16()
    for name, parts in tensors.items():
        if isinstance(parts, list):
            rows = sorted(parts, key=lambda part: part[0])
            tensors[name] = torch.cat([values for _, values in rows])
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    source = locate_model(None)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / file, path / file)
    return path
