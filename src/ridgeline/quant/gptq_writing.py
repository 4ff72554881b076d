"""Writing what `gptq` reads: format v1 for symmetric codes, v2 for zero points.

Modules that are left as they are stand in ``dynamic`` (GPTQModel): ``-:`` and a regular expression
that their names match from the beginning.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ridgeline.core.arrays import Array
from ridgeline.core.rounding import ceil_div
from ridgeline.quant.bits import pack_rows, pack_words

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def gptq_parts(
    codes_OI: Array, scales_OG: Array, zeros_OG: Array | None, bits: int
) -> dict[str, Array]:
    """The tensors of a layer, by suffix. Codes are signed unless there are zeros.

    Symmetric codes get the zero point 2^(bits−1), which v1 stores less one.
    """
    outputs, inputs = codes_OI.shape
    groups = scales_OG.shape[1]
    middle = 1 << (bits - 1)
    if zeros_OG is None:
        codes_OI = codes_OI + middle
        zeros_GO = np.full((groups, outputs), middle - 1)
    else:
        zeros_GO = zeros_OG.T
    size = ceil_div(inputs, groups)
    return {
        ".qweight": np.ascontiguousarray(pack_rows(codes_OI, bits).T),
        ".qzeros": pack_words(zeros_GO, bits),
        ".scales": np.ascontiguousarray(scales_OG.T),
        ".g_idx": np.arange(inputs, dtype=np.int32) // np.int32(size),
    }


def gptq_config(
    *, bits: int, group_size: int, symmetric: bool, ignore: Sequence[str]
) -> dict[str, Any]:
    """The ``quantization_config`` of config.json. ``ignore``: modules that are left as they are."""
    config: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "sym": symmetric,
        "desc_act": False,
        "lm_head": False,
        "checkpoint_format": "gptq" if symmetric else "gptq_v2",
    }
    left = [module for module in ignore if module != "lm_head"]
    if left:
        config["dynamic"] = {f"-:^{_pattern(module)}$": {} for module in left}
    return config


def _pattern(module: str) -> str:
    """A regular expression for a module, and for the one that vLLM makes of it and its siblings."""
    parent, _, name = module.rpartition(".")
    fused = next((whole for whole, parts in _FUSED.items() if name in parts), None)
    names = re.escape(name) if fused is None else f"({name}|{fused})"
    return re.escape(f"{parent}.") + names if parent else names
