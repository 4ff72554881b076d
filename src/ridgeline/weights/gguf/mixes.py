"""Which format each tensor of a file gets: llama.cpp's mixes.

Source: ``llama_tensor_get_type_impl``, ``tensor_allows_quantization`` and ``tensor_type_fallback``
of llama.cpp (``src/llama-quant.cpp``), for the architectures that are written.
"""

import re

from ridgeline.core.gguf_file_types import FILE_TYPES
from ridgeline.core.spec import AttentionSpec, ModelSpec, MoESpec

_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.weight")
_KEPT = ("_norm.weight", "ffn_gate_inp.weight", "position_embd.weight")
# What is taken where rows are no whole blocks of 256.
_FALLBACK = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_BLOCK_ELEMENTS = 256
_SMALL_BLOCK_ELEMENTS = 32
_FLOATS = ("F32", "F16", "BF16")


def fitting_format(mixed: str, columns: int) -> str:
    """The format of a mix, or what stands for it where ``columns`` are no whole blocks."""
    if mixed in _FLOATS:
        return mixed
    if columns % _SMALL_BLOCK_ELEMENTS:
        return "F16"
    return _FALLBACK.get(mixed, mixed) if columns % _BLOCK_ELEMENTS else mixed


def mixed_format(
    name: str,
    shape: tuple[int, ...],
    file_type: str,
    spec: ModelSpec,
    *,
    with_importance: bool = False,
) -> str:
    """F32 for vectors, norms and routers, else as the mix says."""
    usual = FILE_TYPES[file_type].format
    if len(shape) < 2 or not name.endswith(".weight") or name.endswith(_KEPT):
        return "F32"
    if usual in _FLOATS:
        return usual
    if name == "output.weight" or (name == "token_embd.weight" and spec.tie_embeddings):
        return "Q8_0" if usual == "Q8_0" else "Q6_K"
    match = _LAYER.fullmatch(name)
    if match is None:
        return usual
    layer, module, layers = int(match[1]), match[2], len(spec.layers)
    attention, mlp = spec.layers[0].attention, spec.layers[0].mlp
    assert isinstance(attention, AttentionSpec)
    experts = mlp.num_experts if isinstance(mlp, MoESpec) else 0
    grouping = attention.num_heads // attention.num_kv_heads
    more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    if module in ("attn_v", "attn_qkv"):
        if experts == 8:
            return "Q8_0"
        found = {
            "q2_k": "Q4_K" if grouping >= 4 else "Q3_K",
            "q3_k_m": "Q5_K" if layer < 2 else "Q4_K",
            "q3_k_l": "Q5_K",
            "q4_k_s": "Q5_K" if layer < 4 else usual,
            "q4_k_m": "Q6_K" if more else usual,
            "q5_k_m": "Q6_K" if more else usual,
        }.get(file_type, usual)
        # 80 layers and grouped heads: to llama.cpp a 70B.
        is_70b = layers == 80 and grouping > 1 and spec.model_type in ("llama", "qwen2")
        return "Q5_K" if is_70b and found in ("Q3_K", "Q4_K") else found
    if module == "attn_k" and experts == 8:
        return "Q8_0"
    if module == "attn_output":
        if experts == 8:
            eight = ("q2_k", "q3_k_s", "q3_k_m", "q4_k_s", "q4_k_m")
            return "Q5_K" if file_type in eight else usual
        return {"q2_k": "Q3_K", "q3_k_m": "Q4_K", "q3_k_l": "Q5_K"}.get(file_type, usual)
    if module in ("ffn_down", "ffn_down_exps"):
        return {
            "q2_k": "Q3_K",
            "q3_k_m": "Q5_K" if layer < layers // 16 else "Q4_K",
            "q3_k_l": "Q5_K",
            "q4_k_s": "Q5_K" if layer < layers // 8 else usual,
            "q4_k_m": "Q6_K" if more else usual,
            "q5_k_m": "Q6_K" if more else usual,
            "q4_0": "Q4_1" if with_importance and layer < layers // 8 else usual,
        }.get(file_type, usual)
    return usual
