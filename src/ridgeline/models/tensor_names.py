"""Tensor names that most families share (Hugging Face's ``LlamaForCausalLM``)."""

from collections.abc import Mapping

from ridgeline.models.family import TensorSource

_LAYER_MODULES = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_WITH_BIAS = ("q", "k", "v", "o", "gate", "up", "down")


def layer_tensors(modules: Mapping[str, str], *, bias: bool = False) -> dict[str, TensorSource]:
    """Declarations of the ``.weight`` of some modules of each layer, and of their ``.bias``."""
    prefix = "model.layers.{i}."
    weights = {
        f"layers.{{i}}.{name}": TensorSource(name=f"{prefix}{module}.weight")
        for name, module in modules.items()
    }
    biases = {
        f"layers.{{i}}.{name}_bias": TensorSource(name=f"{prefix}{module}.bias")
        for name, module in modules.items()
    }
    return weights | biases if bias else weights


def fused_tensors(fused: Mapping[str, tuple[str, ...]]) -> dict[str, TensorSource]:
    """Declarations of the weights that share a tensor (`Family.fused`)."""
    return {
        weight: TensorSource(name=tensor) for tensor, weights in fused.items() for weight in weights
    }


LLAMA_TENSORS = {
    "embed": TensorSource(name="model.embed_tokens.weight"),
    "final_norm": TensorSource(name="model.norm.weight"),
    "head": TensorSource(name="lm_head.weight"),
    **layer_tensors(_LAYER_MODULES),
    **layer_tensors({name: _LAYER_MODULES[name] for name in _WITH_BIAS}, bias=True),
}
# For families with LayerNorm: the biases of Llama's norms.
NORM_BIASES = {
    "final_norm_bias": TensorSource(name="model.norm.bias"),
    **layer_tensors(
        {name: _LAYER_MODULES[name] for name in ("attention_norm", "mlp_norm")}, bias=True
    ),
}
LLAMA_IGNORED = (r".*\.rotary_emb\.inv_freq",)  # old checkpoints carry what the config gives

GEMMA_TENSORS = LLAMA_TENSORS | layer_tensors(
    {
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }
)
