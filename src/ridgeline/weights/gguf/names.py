"""Where each architecture's weights lie in a GGUF file: canonical name to tensor name.

Source: ``gguf-py/gguf/constants.py`` of llama.cpp (``MODEL_TENSORS`` and ``TENSOR_NAMES``) and, for
what converters change, ``convert_hf_to_gguf.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ridgeline.models import TensorSource


def _sources(names: Mapping[str, str], prefixes: tuple[str, str]) -> dict[str, TensorSource]:
    ours, theirs = prefixes
    return {
        f"{ours}{name}": TensorSource(name=f"{theirs}{tensor}") for name, tensor in names.items()
    }


def _layers(names: Mapping[str, str]) -> dict[str, TensorSource]:
    return _sources(names, ("layers.{i}.", "blk.{i}."))


def _with_biases(names: Mapping[str, str]) -> dict[str, str]:
    """The ``.weight`` of each module and, beside it, its ``.bias``."""
    weights = {name: f"{module}.weight" for name, module in names.items()}
    return weights | {f"{name}_bias": f"{module}.bias" for name, module in names.items()}


_OUTER = _sources(
    {
        "embed": "token_embd.weight",
        "final_norm": "output_norm.weight",
        "final_norm_bias": "output_norm.bias",
        "head": "output.weight",
        "positions": "position_embd.weight",
    },
    ("", ""),
)
_ATTENTION = {
    "attention_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
}
_MLP = {"mlp_norm": "ffn_norm", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}
_EXPERTS = {
    "router": "ffn_gate_inp",
    "experts.gate": "ffn_gate_exps",
    "experts.up": "ffn_up_exps",
    "experts.down": "ffn_down_exps",
}
_LLAMA = _OUTER | _layers(_with_biases(_ATTENTION | _MLP | _EXPERTS))
_GEMMA = _LLAMA | _layers(
    {
        "attention_post_norm": "post_attention_norm.weight",
        "mlp_post_norm": "post_ffw_norm.weight",
    }
)
_FUSED_QKV = _LLAMA | _layers(_with_biases({"q": "attn_qkv", "k": "attn_qkv", "v": "attn_qkv"}))
_QKV: Mapping[str, tuple[str, ...]] = {
    "blk.{i}.attn_qkv.weight": ("layers.{i}.q", "layers.{i}.k", "layers.{i}.v")
}
_QKV_BIAS = {
    "blk.{i}.attn_qkv.bias": ("layers.{i}.q_bias", "layers.{i}.k_bias", "layers.{i}.v_bias")
}
_GATE_UP = {"blk.{i}.ffn_up.weight": ("layers.{i}.gate", "layers.{i}.up")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What is particular to one ``general.architecture``.

    Attributes:
        tensors: canonical name to tensor, both templates in ``{i}``.
        fused: tensor to the weights that it holds one below the other.
        interleaved: the rows of ``attn_q`` and ``attn_k`` alternate between the two halves of each
            head, as Meta's own layout has them.
        norm_offset: what converters added to the weights of all norms.
        in_config: tensors that say what a config says, and are no weights.
    """

    tensors: Mapping[str, TensorSource]
    fused: Mapping[str, tuple[str, ...]]
    interleaved: bool = False
    norm_offset: float = 0.0
    in_config: tuple[str, ...] = ()


_PHI3 = _FUSED_QKV | _layers({"gate": "ffn_up.weight", "up": "ffn_up.weight"})

ARCHITECTURES: Mapping[str, Architecture] = {
    # Mistral and Mixtral too.
    "llama": Architecture(
        tensors=_LLAMA, fused={}, interleaved=True, in_config=("rope_freqs.weight",)
    ),
    "qwen2": Architecture(tensors=_LLAMA, fused={}),
    "qwen3": Architecture(tensors=_LLAMA, fused={}),
    "gemma2": Architecture(tensors=_GEMMA, fused={}, norm_offset=1.0),
    "gemma3": Architecture(tensors=_GEMMA, fused={}, norm_offset=1.0),
    "phi3": Architecture(
        tensors=_PHI3,
        fused={**_QKV, **_GATE_UP},
        in_config=("rope_factors_long.weight", "rope_factors_short.weight"),
    ),
    "gpt2": Architecture(tensors=_FUSED_QKV, fused={**_QKV, **_QKV_BIAS}),
}

ARCHITECTURE_OF: Mapping[str, str] = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "gpt2": "gpt2",
}
"""``model_type`` of a config to the architecture that it is written as."""


def interleaved_rows(rows: int, heads: int) -> npt.NDArray[np.int64]:
    """Where each stored row of ``attn_q`` or ``attn_k`` belongs.

    llama.cpp rotates neighbours; ``LlamaModel.permute`` of the converter put row j of the first
    half of a head at 2j and row j of the second half at 2j + 1.
    """
    rows_HRP = np.arange(rows).reshape(heads, 2, rows // heads // 2)  # halves, then pairs
    return np.ascontiguousarray(rows_HRP.swapaxes(1, 2)).reshape(-1)
