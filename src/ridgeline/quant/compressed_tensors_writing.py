"""Writing what `compressed_tensors` reads: integers packed into words, and whole bytes.

The layouts are that file's. 3, 5, 6 and 7 bits are packed densely, as compressed-tensors has done
since 0.18; releases before it padded each word.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ridgeline.core.arrays import Array
from ridgeline.quant.bits import pack_rows, pack_words

VERSION = "0.19.0"


def packed_parts(
    codes_OI: Array,
    scales_OG: Array,
    zeros_OG: Array | None,
    bits: int,
) -> dict[str, Array]:
    """The tensors of ``pack-quantized``, by suffix. Codes are signed unless there are zeros."""
    middle = 0 if zeros_OG is not None else 1 << (bits - 1)
    parts = {
        ".weight_packed": pack_rows(codes_OI + middle, bits),
        ".weight_scale": np.ascontiguousarray(scales_OG),
        ".weight_shape": np.array(codes_OI.shape, dtype=np.int64),
    }
    if zeros_OG is not None:
        parts[".weight_zero_point"] = np.ascontiguousarray(pack_words(zeros_OG.T, bits).T)
    return parts


def byte_parts(codes_OI: Array, scales_O1: Array) -> dict[str, Array]:
    """The tensors of ``int-quantized``, one scale a row."""
    return {".weight": codes_OI.astype(np.int8), ".weight_scale": np.ascontiguousarray(scales_O1)}


def quantization_config(
    *,
    form: str,
    targets: Mapping[int, Sequence[str]],
    group_size: int | None,
    symmetric: bool,
    ignore: Sequence[str],
    dynamic_activations: bool = False,
) -> dict[str, Any]:
    """The ``quantization_config`` of config.json.

    ``targets`` are modules by the bits of their codes, by name or all of a class (``Linear``).
    ``ignore`` are the modules that stay as they are, by name or pattern (``re:…``). A
    ``group_size`` of ``None`` is a scale a row. ``dynamic_activations``: who runs the model rounds
    each token's activations to 8 bits.
    """
    activations = None
    if dynamic_activations:
        activations = _arguments(bits=8, strategy="token", symmetric=True, dynamic=True)
    strategy = "channel" if group_size is None else "group"
    groups = {
        f"group_{number}": {
            "targets": list(targets[bits]),
            "format": form,
            "input_activations": activations,
            "output_activations": None,
            "weights": _arguments(
                bits=bits,
                strategy=strategy,
                symmetric=symmetric,
                group_size=group_size,
                dynamic=False,
            ),
        }
        for number, bits in enumerate(sorted(targets))
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "version": VERSION,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        "config_groups": groups,
    }


def _arguments(
    *, bits: int, strategy: str, symmetric: bool, dynamic: bool, group_size: int | None = None
) -> Mapping[str, Any]:
    return {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": strategy,
        "group_size": group_size,
        "actorder": None,
        "block_structure": None,
        "dynamic": dynamic,
        "observer": None if dynamic else "minmax",
        "observer_kwargs": {},
    }
