"""Models whose layers read the K and V of earlier ones (cross-layer attention, Brandon et al. 2024,
arXiv 2405.12981), as `ridgeline convert --share` makes them of others.

The config is that of the model that it was made of, whose type is ``base_model_type``, with
``kv_layers``: for each layer that whose K and V it reads, or −1 for its own. No other engine knows
this ``model_type``, and each refuses it by its name; with the old one they would read it, and make
up the weights that are not there.
"""

from dataclasses import replace

from ridgeline.core.cache_groups import kv_shape
from ridgeline.core.errors import CorruptFileError, UnsupportedModelError
from ridgeline.core.spec import AttentionSpec, LayerSpec, ModelSpec
from ridgeline.models import llama, ministral, mistral, qwen2
from ridgeline.models.config import ConfigReader, show
from ridgeline.models.family import Family
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS

SHARED_KV = "ridgeline_shared_kv"
_BASES = {each.model_type: each for each in (
    llama.FAMILY, ministral.FAMILY, mistral.FAMILY, qwen2.FAMILY,
)}  # fmt: skip


def build(config: ConfigReader) -> ModelSpec:
    """The spec of the base, in which some layers have the K and V of others.

    Raises:
        UnsupportedModelError: there is no such base.
        CorruptFileError: a layer would read K and V of a later one, or of one without, or of
            another shape.
    """
    base = config.text("base_model_type")
    if base not in _BASES:
        raise UnsupportedModelError(
            f"config.json shares KV in a model of base_model_type {show(base)}; supported are "
            f"{', '.join(_BASES)}."
        )
    spec = _BASES[base].build(config)
    sources = config.integers("kv_layers", minimum=-1)
    if sources is None or len(sources) != len(spec.layers):
        raise CorruptFileError(f"config.json needs kv_layers for {len(spec.layers)} layers.")
    layers: list[LayerSpec] = []
    for index, (layer, source) in enumerate(zip(spec.layers, sources, strict=True)):
        attention = layer.attention
        assert isinstance(attention, AttentionSpec)
        if source >= 0:
            theirs = layers[source].attention if source < index else None
            if (
                not isinstance(theirs, AttentionSpec)
                or theirs.kv_layer is not None
                or kv_shape(theirs) != kv_shape(attention)
            ):
                raise CorruptFileError(
                    f"config.json has layer {index} read K and V of layer {source}, which is none "
                    "before it with K and V of that shape."
                )
            attention = replace(attention, kv_layer=source)
        layers.append(replace(layer, attention=attention))
    return replace(spec, model_type=SHARED_KV, layers=tuple(layers))


FAMILY = Family(model_type=SHARED_KV, build=build, tensors=LLAMA_TENSORS, ignored=LLAMA_IGNORED)
