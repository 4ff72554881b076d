"""EAGLE-3 drafters in files, and what they compute, in plain PyTorch.

Written from section 3.1 of arXiv 2503.01840 and the modules of the package ``speculators``.
"""

import json

import torch
from safetensors.torch import save_file
from torch.nn import functional

FLAGS = ("norm_before_fc", "norm_before_residual", "norm_output")


def head_config(target, *, layer=None, draft_vocab_size=None, feature_layers=(0, 1, 2), **flags):
    """The authors' form of a config, for a target's config."""
    hidden = target["hidden_size"]
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 256,
        "vocab_size": target["vocab_size"],
        "draft_vocab_size": draft_vocab_size or target["vocab_size"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(feature_layers)},
        **(layer or {}),
        **flags,
    }


def as_speculators(config):
    """The same drafter's config as the package writes it."""
    own = {"draft_vocab_size", "eagle_config", "architectures", *FLAGS}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": config["draft_vocab_size"],
        "eagle_aux_hidden_state_layer_ids": config["eagle_config"][
            "eagle_aux_hidden_state_layer_ids"
        ],
        "transformer_layer_config": {k: v for k, v in config.items() if k not in own},
        **{flag: config[flag] for flag in FLAGS if flag in config},
    }


def head_tensors(config, *, seed=0, own_embedding=False, gain=3.0):
    """Random weights by the names of ``speculators``, and the map of its tokens."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows, columns):
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    def norm(width):
        return 1 + 0.1 * torch.randn(width, generator=generator)

    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = hidden * len(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
    vocab, rows = config["vocab_size"], config["draft_vocab_size"]
    tensors = {"fc.weight": matrix(hidden, width), "norm.weight": norm(hidden)}
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(width)
    if own_embedding:
        tensors["embed_tokens.weight"] = matrix(vocab, hidden)
    for index in range(config["num_hidden_layers"]):
        source = hidden if index else 2 * hidden
        layer = {
            "input_layernorm": norm(hidden),
            "self_attn.q_proj": matrix(heads * dim, source),
            "self_attn.k_proj": matrix(kv_heads * dim, source),
            "self_attn.v_proj": matrix(kv_heads * dim, source),
            "self_attn.o_proj": matrix(hidden, heads * dim),
            "post_attention_layernorm": norm(hidden),
            "mlp.gate_proj": matrix(inner, hidden),
            "mlp.up_proj": matrix(inner, hidden),
            "mlp.down_proj": matrix(hidden, inner),
        }
        if not index:
            layer["hidden_norm"] = norm(hidden)
        if config["model_type"] == "qwen3":
            layer |= {"self_attn.q_norm": norm(dim), "self_attn.k_norm": norm(dim)}
        tensors |= {f"layers.{index}.{name}.weight": each for name, each in layer.items()}
    tensors["lm_head.weight"] = matrix(rows, hidden) * gain
    ids = torch.randperm(vocab, generator=generator)[:rows].sort().values
    tensors["d2t"] = ids - torch.arange(rows)
    return tensors


def write_head(folder, config, tensors, *, speculators=False):
    """A folder in the authors' form, whose first layer is ``midlayer``, or in the package's."""
    folder.mkdir()
    if not speculators:
        tensors = {name.replace("layers.0.", "midlayer."): t for name, t in tensors.items()}
        mask = torch.zeros(config["vocab_size"], dtype=torch.bool)
        mask[tensors["d2t"] + torch.arange(len(tensors["d2t"]))] = True
        tensors["t2d"] = mask
    written = as_speculators(config) if speculators else config
    (folder / "config.json").write_text(json.dumps(written))
    save_file(tensors, folder / "model.safetensors")


class Drafter:
    """What a drafter computes of a whole sequence at once."""

    def __init__(self, config, tensors, embedding):
        self.config = config
        self.tensors = tensors
        self.embedding = tensors.get("embed_tokens.weight", embedding)

    def project(self, features_TW):
        """Of the target's features, as wide as the drafter."""
        if self.config.get("norm_before_fc"):
            features_TW = self._norm(features_TW, "input_norm")
        return features_TW @ self.tensors["fc.weight"].T

    def logits(self, token_ids, features_TD):
        """Logits ``[T, R]`` of its own tokens, and what it reads of its own ``[T, D]``.

        Row t has token ``token_ids[t]`` and the features of the position before.
        """
        config, x = self.config, features_TD
        for index in range(config["num_hidden_layers"]):
            prefix = f"layers.{index}"
            if index:
                h = self._norm(x, f"{prefix}.input_layernorm")
            else:
                embedded = self._norm(self.embedding[token_ids], f"{prefix}.input_layernorm")
                normed = self._norm(x, f"{prefix}.hidden_norm")
                h = torch.cat([embedded, normed], dim=-1)
                x = normed if config.get("norm_before_residual") else x
            x = x + self._attention(h, f"{prefix}.self_attn")
            h = self._norm(x, f"{prefix}.post_attention_layernorm")
            gate, up = self._linear(h, f"{prefix}.mlp.gate_proj"), f"{prefix}.mlp.up_proj"
            x = x + self._linear(
                functional.silu(gate) * self._linear(h, up), f"{prefix}.mlp.down_proj"
            )
        normed = self._norm(x, "norm")
        return self._linear(normed, "lm_head"), normed if config.get("norm_output") else x

    def _attention(self, h_TI, prefix):
        dim, heads = self.config["head_dim"], self.config["num_attention_heads"]
        q, k, v = (
            self._linear(h_TI, f"{prefix}.{name}_proj").unflatten(-1, (-1, dim)).transpose(0, 1)
            for name in "qkv"
        )
        if self.config["model_type"] == "qwen3":
            q, k = self._norm(q, f"{prefix}.q_norm"), self._norm(k, f"{prefix}.k_norm")
        frequencies = self.config["rope_theta"] ** (-torch.arange(0, dim, 2, dtype=q.dtype) / dim)
        angles = torch.arange(q.shape[1], dtype=q.dtype)[:, None] * frequencies.repeat(2)
        q, k = (
            each * angles.cos()
            + torch.cat([-each[..., dim // 2 :], each[..., : dim // 2]], -1) * angles.sin()
            for each in (q, k)
        )
        shared = heads // self.config["num_key_value_heads"]
        k, v = k.repeat_interleave(shared, 0), v.repeat_interleave(shared, 0)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self._linear(out.transpose(0, 1).flatten(1), f"{prefix}.o_proj")

    def _norm(self, x, name):
        return functional.rms_norm(
            x, x.shape[-1:], self.tensors[f"{name}.weight"], self.config["rms_norm_eps"]
        )

    def _linear(self, x, name):
        return x @ self.tensors[f"{name}.weight"].T
