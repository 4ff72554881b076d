"""Where each architecture's weights lie in a GGUF file: canonical name to tensor name.

Source: ``gguf-py/gguf/constants.py`` of llama.cpp (``MODEL_TENSORS`` and ``TENSOR_NAMES``) and, for
what converters change, ``convert_hf_to_gguf.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ridgeline.core.spec import MOST_STREAMS
from ridgeline.models import TensorSource
from ridgeline.models.tensor_names import fused_tensors


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
        "head_bias": "output.bias",
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
_WITH_POST_NORMS = _LLAMA | _layers(
    {
        "attention_post_norm": "post_attention_norm.weight",
        "mlp_post_norm": "post_ffw_norm.weight",
    }
)
_SHARED = _LLAMA | _layers(
    {
        "shared.gate": "ffn_gate_shexp.weight",
        "shared.up": "ffn_up_shexp.weight",
        "shared.down": "ffn_down_shexp.weight",
        "shared.output_gate": "ffn_gate_inp_shexp.weight",
    }
)
_CORRECTED = _SHARED | {
    "layers.{i}.correction_bias": TensorSource(name="blk.{i}.exp_probs_b.bias", row_vector=True)
}
_LAYER_INPUTS = _sources(
    {
        "layer_embed": "per_layer_token_embd.weight",
        "layer_projection": "per_layer_model_proj.weight",
        "layer_projection_norm": "per_layer_proj_norm.weight",
    },
    ("", ""),
) | _layers(
    {
        "input_gate": "inp_gate.weight",
        "input_up": "proj.weight",
        "input_norm": "post_norm.weight",
        "scale": "layer_output_scale.weight",
    }
)
_STREAMS: Mapping[str, tuple[str, ...]] = {
    f"altup_{theirs}.weight": tuple(f"streams.{k}.{ours}" for k in range(1, MOST_STREAMS))
    for ours, theirs in (("split", "proj"), ("join", "unembd_proj"))
}
_ALTUP = fused_tensors(_STREAMS) | _layers(
    {
        "stream_router": "altup_router.weight",
        "stream_norm": "altup_router_norm.weight",
        "predict": "altup_predict_coef.weight",
        "correct": "altup_correct_coef.weight",
        "correct_scale": "altup_correct_scale.weight",
        "laurel_down": "laurel_l.weight",
        "laurel_up": "laurel_r.weight",
        "laurel_norm": "laurel_post_norm.weight",
    }
)
_STACKED_GATE_UP: Mapping[str, tuple[str, ...]] = {
    "blk.{i}.ffn_gate_up_exps.weight": ("layers.{i}.experts.gate", "layers.{i}.experts.up")
}
_GATE_UP_EXPERTS = _layers(dict.fromkeys(("experts.gate", "experts.up"), "ffn_gate_up_exps.weight"))
_EXPERTS_BESIDE = _GATE_UP_EXPERTS | _layers(
    {
        "router_norm": "ffn_gate_inp.scale",
        "expert_scale": "ffn_down_exps.scale",
        "mlp_own_norm": "post_ffw_norm_1.weight",
        "experts_norm": "pre_ffw_norm_2.weight",
        "experts_own_norm": "post_ffw_norm_2.weight",
    }
)
# Where the norm before the feed-forward network has the name of one behind attention.
_OTHER_NORM = _layers({"mlp_norm": "post_attention_norm.weight"})
_LATENT = _CORRECTED | _layers(
    {
        "q_a": "attn_q_a.weight",
        "q_a_norm": "attn_q_a_norm.weight",
        "kv_a": "attn_kv_a_mqa.weight",
        "kv_a_norm": "attn_kv_a_norm.weight",
        "kv_b": "attn_kv_b.weight",
    }
)
_LATENT_QUERY = {
    "layers.{i}.q": TensorSource(
        name="blk.{i}.attn_q_b.weight", other_names=("blk.{i}.attn_q.weight",)
    )
}
_FUSED_QKV = _LLAMA | _layers(_with_biases({"q": "attn_qkv", "k": "attn_qkv", "v": "attn_qkv"}))
_QKV: Mapping[str, tuple[str, ...]] = {
    "blk.{i}.attn_qkv.weight": ("layers.{i}.q", "layers.{i}.k", "layers.{i}.v")
}
_QKV_BIAS = {
    "blk.{i}.attn_qkv.bias": ("layers.{i}.q_bias", "layers.{i}.k_bias", "layers.{i}.v_bias")
}
_GATE_UP = {"blk.{i}.ffn_up.weight": ("layers.{i}.gate", "layers.{i}.up")}


_SCAN_PROJECTED = ("scan_gate", "scan_mixed", "scan_step")
_SCAN = _layers(
    {
        **_with_biases(dict.fromkeys(_SCAN_PROJECTED, "ssm_in") | {"scan_out": "ssm_out"}),
        **_with_biases({"scan_conv": "ssm_conv1d"}),
        "scan_decay_log": "ssm_a",
        "scan_step_offset": "ssm_dt.bias",
        "scan_skip": "ssm_d",
        "scan_norm": "ssm_norm.weight",
    }
)
_MIXED, _FACTORS = ("delta_query", "delta_key", "delta_value"), ("delta_beta", "delta_decay")
_DELTA = _layers(
    {
        **_with_biases({"gate_heads": "attn_q"}),
        **dict.fromkeys(_MIXED, "attn_qkv.weight"),
        "delta_gate": "attn_gate.weight",
        "delta_beta": "ssm_beta.weight",
        "delta_decay": "ssm_alpha.weight",
        "delta_conv": "ssm_conv1d.weight",
        "delta_decay_log": "ssm_a",
        "delta_decay_bias": "ssm_dt.bias",
        "delta_norm": "ssm_norm.weight",
        "delta_out": "ssm_out.weight",
    }
)
_CONV_PROJECTED = ("conv_in_gate", "conv_out_gate", "conv_value")
_CONVS = _layers(
    _with_biases(
        dict.fromkeys(_CONV_PROJECTED, "shortconv.in_proj")
        | {"conv": "shortconv.conv", "conv_out": "shortconv.out_proj"}
    )
) | {"final_norm": TensorSource(name="token_embd_norm.weight", other_names=("output_norm.weight",))}


def _split(module: str, parts: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """The weights that a module's matrix has below each other, and so its bias."""
    return {
        f"blk.{{i}}.{module}.{kind}": tuple(f"layers.{{i}}.{part}{suffix}" for part in parts)
        for kind, suffix in (("weight", ""), ("bias", "_bias"))
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What is particular to one ``general.architecture``.

    Attributes:
        tensors: canonical name to tensor, both templates in ``{i}``.
        fused: tensor to the weights that it holds one below the other.
        fused_heads: the same by turns, for each head (`Family.fused_heads`).
        interleaved: the rows of ``attn_q`` and ``attn_k`` alternate between the two halves of each
            head, as Meta's own layout has them.
        norm_offset: what converters added to the weights of all norms.
        in_config: tensors that say what a config says, and are no weights.
        splits_kv_b: the matrix from latents to heads may be stored as ``attn_k_b``, whose matrices
            are transposed, and ``attn_v_b`` (`latents`).
        ignored: regular expressions for the names of tensors that may be left over.
        tiled_values: value heads of linear attention go round the key heads, and are not those of
            each key head together.
    """

    tensors: Mapping[str, TensorSource]
    fused: Mapping[str, tuple[str, ...]]
    fused_heads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    interleaved: bool = False
    norm_offset: float = 0.0
    in_config: tuple[str, ...] = ()
    splits_kv_b: bool = False
    ignored: tuple[str, ...] = ()
    tiled_values: bool = False


_FREQS = ("rope_freqs.weight",)
# What layers that read K and V of others do not use.
_UNUSED_KV = (r"blk\.\d+\.attn_([kv]|k_norm)\.weight",)
_GLM4 = _WITH_POST_NORMS | _layers({"gate": "ffn_up.weight", "up": "ffn_up.weight"})
_SCAN_FUSED = _split("ssm_in", _SCAN_PROJECTED)
_DELTA_FUSED = _split("attn_qkv", _MIXED)
_GATED_HEADS = _split("attn_q", ("q", "gate_heads"))
_CONV_FUSED = _split("shortconv.in_proj", _CONV_PROJECTED)
# A layer has one branch, and one norm.
_NEMOTRON_H = _CORRECTED | _SCAN | _layers({"mlp_norm": "attn_norm.weight"})
_FALCON_H1 = (
    _LLAMA
    | _SCAN
    | {
        "layers.{i}.mlp_norm": TensorSource(
            name="blk.{i}.ffn_norm", other_names=("blk.{i}.ffn_norm.weight",)
        )
    }
)
_PHI3 = _FUSED_QKV | _layers({"gate": "ffn_up.weight", "up": "ffn_up.weight"})

ARCHITECTURES: Mapping[str, Architecture] = {
    # Mistral and Mixtral too.
    "llama": Architecture(tensors=_LLAMA, fused={}, interleaved=True, in_config=_FREQS),
    "qwen2": Architecture(tensors=_LLAMA, fused={}),
    "qwen3": Architecture(tensors=_LLAMA, fused={}),
    "gemma2": Architecture(tensors=_WITH_POST_NORMS, fused={}, norm_offset=1.0),
    "gemma3": Architecture(tensors=_WITH_POST_NORMS, fused={}, norm_offset=1.0),
    "phi3": Architecture(
        tensors=_PHI3,
        fused={**_QKV, **_GATE_UP},
        in_config=("rope_factors_long.weight", "rope_factors_short.weight"),
    ),
    "gpt2": Architecture(tensors=_FUSED_QKV, fused={**_QKV, **_QKV_BIAS}),
    "afmoe": Architecture(
        tensors=_CORRECTED | _WITH_POST_NORMS | _layers({"gate_heads": "attn_gate.weight"}),
        fused={},
    ),
    "arcee": Architecture(tensors=_LLAMA, fused={}, interleaved=True, in_config=_FREQS),
    "cohere2": Architecture(tensors=_LLAMA, fused={}),
    "command-r": Architecture(tensors=_LLAMA, fused={}),
    "deepseek2": Architecture(tensors=_LATENT | _LATENT_QUERY, fused={}, splits_kv_b=True),
    "dots1": Architecture(tensors=_CORRECTED, fused={}),
    "ernie4_5": Architecture(tensors=_LLAMA, fused={}),
    "ernie4_5-moe": Architecture(tensors=_CORRECTED, fused={}),
    "exaone4": Architecture(tensors=_WITH_POST_NORMS, fused={}, in_config=_FREQS),
    "exaone-moe": Architecture(tensors=_CORRECTED, fused={}, in_config=_FREQS),
    "falcon-h1": Architecture(tensors=_FALCON_H1, fused=_SCAN_FUSED),
    "gemma": Architecture(tensors=_LLAMA, fused={}, norm_offset=1.0),
    "gemma3n": Architecture(
        tensors=_WITH_POST_NORMS | _LAYER_INPUTS | _ALTUP,
        fused=_STREAMS,
        ignored=_UNUSED_KV,
    ),
    "gemma4": Architecture(
        tensors=_WITH_POST_NORMS | _LAYER_INPUTS | _EXPERTS_BESIDE,
        fused=_STACKED_GATE_UP,
        in_config=_FREQS,
        ignored=_UNUSED_KV,
    ),
    "glm-dsa": Architecture(
        tensors=_LATENT | _LATENT_QUERY,
        fused={},
        splits_kv_b=True,
        ignored=(r"blk\.\d+\.indexer\..*",),
    ),
    "glm4": Architecture(tensors=_GLM4, fused=_GATE_UP),
    "glm4moe": Architecture(tensors=_CORRECTED | _OTHER_NORM, fused={}),
    "gpt-oss": Architecture(
        tensors=_LLAMA | _OTHER_NORM | _layers({"sinks": "attn_sinks.weight"}), fused={}
    ),
    "granite": Architecture(tensors=_LLAMA, fused={}, interleaved=True, in_config=_FREQS),
    "granitemoe": Architecture(tensors=_SHARED, fused={}, interleaved=True, in_config=_FREQS),
    "granitehybrid": Architecture(
        tensors=_SHARED | _SCAN, fused=_SCAN_FUSED, interleaved=True, in_config=_FREQS
    ),
    "hunyuan-dense": Architecture(tensors=_LLAMA, fused={}),
    "hunyuan-moe": Architecture(tensors=_SHARED, fused={}),
    "jais2": Architecture(tensors=_LLAMA, fused={}),
    "lfm2": Architecture(tensors=_LLAMA | _CONVS, fused=_CONV_FUSED),
    "lfm2moe": Architecture(tensors=_CORRECTED | _CONVS, fused=_CONV_FUSED),
    "mamba2": Architecture(tensors=_LLAMA | _SCAN, fused=_SCAN_FUSED),
    "minimax-m2": Architecture(tensors=_CORRECTED, fused={}),
    "mistral3": Architecture(tensors=_LLAMA, fused={}, interleaved=True, in_config=_FREQS),
    "mistral4": Architecture(
        tensors=_LATENT | _LATENT_QUERY | _GATE_UP_EXPERTS,
        fused=_STACKED_GATE_UP,
        in_config=_FREQS,
        splits_kv_b=True,
    ),
    "nemotron": Architecture(tensors=_LLAMA, fused={}, norm_offset=1.0),
    "nemotron_h": Architecture(tensors=_NEMOTRON_H, fused=_SCAN_FUSED),
    "nemotron_h_moe": Architecture(tensors=_NEMOTRON_H, fused=_SCAN_FUSED),
    "olmo": Architecture(tensors=_LLAMA, fused={}, interleaved=True),
    "olmo2": Architecture(tensors=_WITH_POST_NORMS, fused={}),
    "olmoe": Architecture(tensors=_SHARED, fused={}),
    "phi2": Architecture(tensors=_LLAMA, fused={}),
    "qwen2moe": Architecture(tensors=_SHARED, fused={}),
    "qwen2vl": Architecture(tensors=_LLAMA, fused={}),
    "qwen35": Architecture(
        tensors=_LLAMA | _OTHER_NORM | _DELTA,
        fused=_DELTA_FUSED,
        fused_heads=_GATED_HEADS,
        norm_offset=1.0,
        tiled_values=True,
    ),
    "qwen35moe": Architecture(
        tensors=_SHARED | _OTHER_NORM | _DELTA,
        fused=_DELTA_FUSED,
        fused_heads=_GATED_HEADS,
        norm_offset=1.0,
        tiled_values=True,
    ),
    "qwen3moe": Architecture(tensors=_SHARED, fused={}),
    "qwen3next": Architecture(
        tensors=_SHARED | _OTHER_NORM | _DELTA | _layers(dict.fromkeys(_FACTORS, "ssm_ba.weight")),
        fused=_DELTA_FUSED,
        fused_heads=_GATED_HEADS
        | {"blk.{i}.ssm_ba.weight": tuple(f"layers.{{i}}.{name}" for name in _FACTORS)},
        norm_offset=1.0,
    ),
    "qwen3vl": Architecture(tensors=_LLAMA, fused={}),
    "qwen3vlmoe": Architecture(tensors=_SHARED, fused={}),
    "seed_oss": Architecture(tensors=_LLAMA | _OTHER_NORM, fused={}),
    "smollm3": Architecture(tensors=_LLAMA, fused={}, interleaved=True, in_config=_FREQS),
    "stablelm": Architecture(tensors=_LLAMA, fused={}),
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


def tiled_rows(key_heads: int, value_heads: int, width: int) -> npt.NDArray[np.int64]:
    """Where each stored row of value heads belongs: the heads of a key head together."""
    rows_KRv = np.arange(value_heads * width).reshape(key_heads, value_heads // key_heads, width)
    return np.ascontiguousarray(rows_KRv.swapaxes(0, 1)).reshape(-1)


def interleaved_rows(rows: int, heads: int) -> npt.NDArray[np.int64]:
    """Where each stored row of ``attn_q`` or ``attn_k`` belongs.

    llama.cpp rotates neighbours; ``LlamaModel.permute`` of the converter put row j of the first
    half of a head at 2j and row j of the second half at 2j + 1.
    """
    rows_HRP = np.arange(rows).reshape(heads, 2, rows // heads // 2)  # halves, then pairs
    return np.ascontiguousarray(rows_HRP.swapaxes(1, 2)).reshape(-1)
