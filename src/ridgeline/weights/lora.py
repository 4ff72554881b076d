"""LoRA adapters (Hu et al. 2021, arXiv 2106.09685) in PEFT's layout.

A folder with ``adapter_config.json`` and ``adapter_model.safetensors``. Its tensors are named
``base_model.model.<module>.lora_A.weight`` [r, in] and ``….lora_B.weight`` [out, r]; the adapted
weight is W + scale · B A, with scale = alpha / r, or alpha / √r if it is rank-stabilised.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.core.arrays import Array, cast
from ridgeline.core.checks import is_finite
from ridgeline.core.errors import CorruptFileError, UnsupportedModelError, WeightsMismatchError
from ridgeline.core.ops import MLP, Op, OutProject, QKVProject, Weight
from ridgeline.models import TensorSource, read_config
from ridgeline.models.config import show
from ridgeline.weights.files import ADAPTER_CONFIG_NAME
from ridgeline.weights.names import short_name
from ridgeline.weights.safetensors_file import SafetensorsFile

_PREFIX = "base_model.model."
_PARTS = {".lora_A.weight": "A", ".lora_B.weight": "B"}
_MAX_RANK = 4096

# Settings of PEFT that change what an adapter computes, and the values that mean "not used".
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (False, None),
    "use_bdlora": (None,),
    "kasa_config": (None,),
    "arrow_config": (None,),
    # The others (pissa, olora, corda, loftq, lora_ga) change the model's own weights.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal", "mica"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAWeights:
    """One weight's adapter: ``down`` [r, in] and ``up`` [out, r], which has the scale in it."""

    down: Array
    up: Array


Adapter = Mapping[str, LoRAWeights]  # by canonical name of the adapted weight
Config = Mapping[str, Any]


def load_lora(
    folder: Path, *, ops: Iterable[Op], sources: Mapping[str, TensorSource], dtype: str
) -> Adapter:
    """Read an adapter for a model with these ops, whose weights lie at ``sources``.

    Raises:
        ModelNotFoundError, CorruptFileError, DiskError: files are missing or damaged.
        UnsupportedModelError: it is not plain LoRA, or adapts what cannot be adapted.
        WeightsMismatchError: its tensors do not fit the model, or do not come in pairs.
    """
    config = read_config(folder / ADAPTER_CONFIG_NAME)
    _check_supported(config)
    users = adaptable(ops, sources)
    adapter: dict[str, LoRAWeights] = {}
    with SafetensorsFile(folder / "adapter_model.safetensors") as file:
        for module, parts in _modules(file.names()).items():
            if module not in users:
                raise UnsupportedModelError(
                    f"The adapter changes {short_name(module)}, which is not among the attention "
                    "and feed-forward matrices of this model."
                )
            if parts.keys() != {"A", "B"}:
                raise WeightsMismatchError(f"The adapter has half of {short_name(module)} only.")
            down, up = (cast(file.tensor(parts[part]), dtype) for part in "AB")
            _check_shapes(module, down, up, users[module])
            scaled = _scaled(up, _scale(config, module, rank=len(down)))
            for weight, source in users[module]:
                up = np.ascontiguousarray(source.select_rows(scaled))
                adapter[weight.name] = LoRAWeights(down=down, up=up)
    if not adapter:
        raise WeightsMismatchError(f"The adapter in {folder} has no tensors.")
    return adapter


def _check_supported(config: Config) -> None:
    if config.get("peft_type", "LORA") != "LORA":
        raise UnsupportedModelError("The adapter is not LoRA; other kinds are not supported.")
    for name, unused in _UNSUPPORTED.items():
        if name in config and config[name] not in unused:
            raise UnsupportedModelError(
                f"The adapter sets {name} to {show(config[name])}, which is not supported; merge "
                "it into the model instead."
            )


def adaptable(
    ops: Iterable[Op], sources: Mapping[str, TensorSource]
) -> dict[str, list[tuple[Weight, TensorSource]]]:
    """The weights that can be adapted, by the module that holds them in a checkpoint."""
    users: dict[str, list[tuple[Weight, TensorSource]]] = {}
    for op in ops:
        match op:
            case QKVProject():
                weights = [op.query, op.key, op.value]
            case OutProject():
                weights = [op.weight]
            case MLP():
                weights = [op.gate, op.up, op.down]
            case _:
                continue
        for weight in weights:
            if weight is None:
                continue
            source = sources[weight.name]
            for name in (source.name, *source.other_names):
                users.setdefault(name.removesuffix(".weight"), []).append((weight, source))
    return users


def _modules(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Module to its A and B tensors' names."""
    modules: dict[str, dict[str, str]] = {}
    for name in names:
        for suffix, part in _PARTS.items():
            if name.startswith(_PREFIX) and name.endswith(suffix):
                module = name.removeprefix(_PREFIX).removesuffix(suffix)
                modules.setdefault(module, {})[part] = name
                break
        else:
            raise UnsupportedModelError(f"The adapter's tensor {short_name(name)} is not LoRA's.")
    return modules


def _check_shapes(
    module: str,
    down: Array,
    up: Array,
    users: list[tuple[Weight, TensorSource]],
) -> None:
    outputs = max(source.stored_rows(weight.shape[0]) for weight, source in users)
    inputs = users[0][0].shape[1]
    if (
        down.ndim != 2
        or up.ndim != 2
        or not 0 < len(down) == up.shape[1] <= _MAX_RANK
        or (down.shape[1], len(up)) != (inputs, outputs)
    ):
        raise WeightsMismatchError(
            f"The adapter's matrices for {short_name(module)} are {list(down.shape)} and "
            f"{list(up.shape)}, for a weight of {[outputs, inputs]}."
        )


def _scaled(values: Array, scale: float) -> Array:
    """The products, rounded once."""
    work = np.dtype(np.float64 if values.dtype == np.float64 else np.float32)
    return (values.astype(work) * work.type(scale)).astype(values.dtype)


def _scale(config: Config, module: str, *, rank: int) -> float:
    alpha = config.get("lora_alpha", 8)  # PEFT's default
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise CorruptFileError("adapter_config.json gives an alpha_pattern that is not an object.")
    for pattern, value in patterns.items():
        if not pattern.replace("_", "").replace(".", "").isalnum():
            raise UnsupportedModelError("The adapter's alpha_pattern has a regular expression.")
        if module == pattern or module.endswith("." + pattern):
            alpha = value
            break
    if not is_finite(alpha):
        raise CorruptFileError("adapter_config.json gives an alpha that is not a number.")
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") is True else rank)
