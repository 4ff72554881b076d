"""Medusa's heads in files, and what they compute, in plain PyTorch (arXiv 2401.10774, 2.1.1)."""

import json

import torch
from safetensors.torch import save_file
from torch.nn import functional


def head_tensors(hidden_size, vocab_size, *, num_heads=3, num_blocks=1, seed=0, gain=3.0):
    """Random weights by the authors' names."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows, gain):
        return torch.randn(rows, hidden_size, generator=generator) * gain * hidden_size**-0.5

    tensors = {}
    for head in range(num_heads):
        for block in range(num_blocks):
            place = f"{head}.{block}.linear"
            tensors[f"{place}.weight"] = matrix(hidden_size, 1.0)
            tensors[f"{place}.bias"] = 0.5 * torch.randn(hidden_size, generator=generator)
        tensors[f"{head}.{num_blocks}.weight"] = matrix(vocab_size, gain)
    return tensors


def write_heads(folder, tensors, *, num_heads=3, num_blocks=1, prefix="", **config):
    folder.mkdir()
    config = {"medusa_num_heads": num_heads, "medusa_num_layers": num_blocks, **config}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {f"{prefix}{name}": each for name, each in tensors.items()}
    save_file(tensors, folder / "model.safetensors")


def head_logits(tensors, head, hidden, *, num_blocks=1):
    """Of one head, from the model's final hidden states ``[..., D]``, normed."""
    for block in range(num_blocks):
        place = f"{head}.{block}.linear"
        inner = functional.linear(hidden, tensors[f"{place}.weight"], tensors[f"{place}.bias"])
        hidden = hidden + functional.silu(inner)
    return functional.linear(hidden, tensors[f"{head}.{num_blocks}.weight"])
