"""From a model to the metadata of its GGUF file: the inverse of `config`.

What is written is read again with `describe_gguf` and compared with the model that it came from, so
that whatever GGUF cannot say of a model is refused and not lost.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ridgeline.core.errors import UnsupportedModelError
from ridgeline.core.rope_spec import RopeSpec
from ridgeline.core.spec import AttentionSpec, MLPSpec, ModelSpec, MoESpec
from ridgeline.models import ModelDefinition, inverse_frequencies, rope_attention_factor
from ridgeline.models.config import show
from ridgeline.models.fields import FULL
from ridgeline.weights.gguf.config import describe_gguf
from ridgeline.weights.gguf.decoder_config import DECODER_SIZES, GPT2_SIZES, GGUFContent
from ridgeline.weights.gguf.keys import CONFIG_KEYS
from ridgeline.weights.gguf.names import ARCHITECTURE_OF
from ridgeline.weights.gguf.rope import rope_content
from ridgeline.weights.gguf.values import Metadata

_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchitectureContent:
    """What a GGUF file says of a model, beside its weights.

    Attributes:
        architecture: ``general.architecture``.
        metadata: keys with that prefix.
        tensors: those that say what a config says, such as ``rope_freqs.weight``.
    """

    architecture: str
    metadata: Metadata
    tensors: Mapping[str, npt.NDArray[np.float32]]


def architecture_content(
    definition: ModelDefinition, config: Mapping[str, Any]
) -> ArchitectureContent:
    """What GGUF has to say of a model whose ``config.json`` is ``config``.

    Raises:
        UnsupportedModelError: GGUF has no architecture for it, or Ridgeline does not write it.
    """
    spec = definition.spec
    if spec.model_type not in ARCHITECTURE_OF:
        raise UnsupportedModelError(
            f"Models of type {show(spec.model_type)} are not written as GGUF; those that are: "
            f"{', '.join(ARCHITECTURE_OF)}."
        )
    architecture = ARCHITECTURE_OF[spec.model_type]
    tensors: Mapping[str, npt.NDArray[np.float32]] = {}
    if architecture == "gpt2":
        values = _gpt2(spec)
    else:
        values, tensors = _decoder(spec, config, architecture)
    metadata = {f"{architecture}.{key}": value for key, value in values.items()}
    return ArchitectureContent(architecture=architecture, metadata=metadata, tensors=tensors)


def check_content(content: GGUFContent, definition: ModelDefinition) -> None:
    """Refuse a file that would be read as another model than ``definition``.

    Raises:
        UnsupportedModelError: the model has something that GGUF cannot say; names it.
    """
    found = describe_gguf(content).spec
    different = _difference(replace(found, model_type=definition.spec.model_type), definition.spec)
    if different is not None:
        raise UnsupportedModelError(
            f"GGUF cannot say all of this {definition.spec.model_type} model: {different}."
        )


def _decoder(
    spec: ModelSpec, config: Mapping[str, Any], architecture: str
) -> tuple[dict[str, object], dict[str, npt.NDArray[np.float32]]]:
    layer = spec.layers[0]
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(attention, AttentionSpec)
    assert mlp is not None, "of families with GGUF files"
    # Of layers of two kinds those that see everything have the rope that is scaled.
    ropes = [each.attention for each in spec.layers if isinstance(each.attention, AttentionSpec)]
    rope = next((each.rope for each in ropes if each.window is None), attention.rope)
    assert rope is not None
    windows = [each.window for each in ropes]
    values: dict[str, object] = {
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": len(spec.layers),
        "intermediate_size": mlp.width,
        # As the config has it: before scaling is counted in.
        "max_position_embeddings": int(config.get("max_position_embeddings", spec.max_position)),
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "rms_norm_eps": _norm_eps(spec),
        "rope_theta": float(rope.theta),
    }
    assert set(DECODER_SIZES) <= values.keys()
    if isinstance(mlp, MoESpec):
        values["num_local_experts"] = mlp.num_experts
        values["num_experts_per_tok"] = mlp.routing.top_k
    if any(windows):
        values["sliding_window"] = next(window for window in windows if window)
    if attention.softcap is not None:
        values["attn_logit_softcapping"] = attention.softcap
    if spec.logit_softcap is not None:
        values["final_logit_softcapping"] = spec.logit_softcap
    metadata = {CONFIG_KEYS[name]: value for name, value in values.items()}
    metadata |= {
        "vocab_size": spec.vocab_size,
        "attention.key_length": attention.head_dim,
        "attention.value_length": attention.head_dim,
        "rope.dimension_count": rope.rotary_dim,
    }
    if architecture == "gemma3":
        local = next((each.rope for each in ropes if each.window is not None), None)
        metadata[CONFIG_KEYS["rope_local_base_freq"]] = float((local or rope).theta)
        metadata["attention.sliding_window_pattern"] = np.array(
            [window is not None for window in windows]
        )
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    scaling = scaling.get(FULL, scaling)
    keys, tensors = rope_content(rope, scaling, config)
    return metadata | keys, tensors


def _gpt2(spec: ModelSpec) -> dict[str, object]:
    attention, mlp = spec.layers[0].attention, spec.layers[0].mlp
    assert isinstance(attention, AttentionSpec)
    assert isinstance(mlp, MLPSpec)
    values: dict[str, object] = {
        "n_embd": spec.hidden_size,
        "n_layer": len(spec.layers),
        "n_head": attention.num_heads,
        "n_inner": mlp.width,
        "n_positions": spec.max_position,
        "layer_norm_epsilon": _norm_eps(spec),
    }
    assert set(GPT2_SIZES) <= values.keys()
    return {CONFIG_KEYS[name]: value for name, value in values.items()}


def _difference(found: object, wanted: object, where: str = "") -> str | None:
    """The first field in which two specs differ, with both values; ``None`` if they do not."""
    if isinstance(found, RopeSpec) and isinstance(wanted, RopeSpec):
        return None if _same_rope(found, wanted) else f"{where} would become {found}"
    if is_dataclass(found) and type(found) is type(wanted):
        parts = [
            (f"{where}.{field.name}" if where else field.name, field.name)
            for field in fields(found)
        ]
        pairs = [(getattr(found, name), getattr(wanted, name), path) for path, name in parts]
    elif isinstance(found, tuple) and isinstance(wanted, tuple) and len(found) == len(wanted):
        pairs = [
            (a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(found, wanted, strict=True))
        ]
    elif isinstance(found, float) and isinstance(wanted, float):
        close = bool(np.isclose(found, wanted, rtol=1e-6, atol=0))
        return None if close else f"{where} is {wanted} and would become {found}"
    else:
        return None if found == wanted else f"{where} is {wanted} and would become {found}"
    return next((text for pair in pairs if (text := _difference(*pair)) is not None), None)


def _same_rope(found: RopeSpec, wanted: RopeSpec) -> bool:
    """Whether positions are rotated alike: the numbers count, not how they are spelt."""
    if found.rotary_dim != wanted.rotary_dim or found.interleaved != wanted.interleaved:
        return False
    if not np.isclose(rope_attention_factor(found), rope_attention_factor(wanted), rtol=_TOLERANCE):
        return False
    return all(
        np.allclose(
            inverse_frequencies(found, sequence_length=length),
            inverse_frequencies(wanted, sequence_length=length),
            rtol=_TOLERANCE,
            atol=0,
        )
        for length in (1, 1 << 20)
    )


def _norm_eps(spec: ModelSpec) -> float:
    assert spec.final_norm is not None, "no architecture of these is an encoder"
    return spec.final_norm.eps
