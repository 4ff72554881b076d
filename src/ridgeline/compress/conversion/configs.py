"""What a converted model is: its spec, and the config.json that says so, to others where they can.

Windows on every layer make a llama a mistral, on some a ministral; KV that layers share is said by
a ``model_type`` of our own, which others refuse by its name (`models.shared_kv`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ridgeline.compress.conversion.recipe import ConversionRecipe
from ridgeline.core.cache_groups import kv_shape, shares_kv
from ridgeline.core.errors import ModelFileError, SettingsError, UnsupportedModelError
from ridgeline.core.spec import AttentionSpec, LayerSpec, ModelSpec
from ridgeline.models import ModelDefinition, describe
from ridgeline.models.fields import FULL, SLIDING
from ridgeline.models.shared_kv import SHARED_KV

_ARCHITECTURES = {"mistral": "MistralForCausalLM", "ministral": "MinistralForCausalLM"}
_AS_LLAMA = ("llama", *_ARCHITECTURES)
_WITHOUT_EFFECT = ("attention_bias", "mlp_bias", "pretraining_tp", "rope_scaling")


def converted_spec(spec: ModelSpec, recipe: ConversionRecipe) -> ModelSpec:
    """
    Raises:
        SettingsError: the heads are no whole groups, no layer is the one to be full, or a setting
            would change nothing.
        UnsupportedModelError: a layer has other attention than can be converted; layers that would
            share K and V see differently far.
    """
    if shares_kv(spec):
        raise UnsupportedModelError("The layers of this model share their KV already.")
    if recipe.full_every > len(spec.layers):
        raise SettingsError(
            f"full_every {recipe.full_every} names no layer of these {len(spec.layers)}: leave it "
            "out, and windows are on all."
        )
    if recipe.window >= spec.max_position:
        raise SettingsError(
            f"A window of {recipe.window} hides nothing of a context of {spec.max_position} tokens."
        )
    heads = {getattr(layer.attention, "num_kv_heads", None) for layer in spec.layers}
    if heads == {recipe.kv_heads}:
        raise SettingsError(f"All layers have {recipe.kv_heads} KV heads: leave kv_heads out.")
    layers: list[LayerSpec] = []
    for index, layer in enumerate(spec.layers):
        attention = layer.attention
        if not isinstance(attention, AttentionSpec) or layer.state is not None:
            raise UnsupportedModelError(
                f"Layer {index} has no attention of heads with K and V: it cannot be converted."
            )
        if recipe.is_calibrated:
            _check_linear(index, attention)
        attention = _converted(index, attention, recipe)
        first = index - index % recipe.share
        if first < index:
            source = layers[first].attention
            assert isinstance(source, AttentionSpec)
            if kv_shape(source) != kv_shape(attention):
                raise UnsupportedModelError(
                    f"Layers {first} and {index} have other heads or windows: they share no KV."
                )
            attention = replace(attention, kv_layer=first)
        layers.append(replace(layer, attention=attention))
    return replace(spec, layers=tuple(layers))


def _converted(index: int, attention: AttentionSpec, recipe: ConversionRecipe) -> AttentionSpec:
    if recipe.kv_heads:
        if attention.num_kv_heads % recipe.kv_heads:
            raise SettingsError(
                f"kv_heads must be a divisor of the {attention.num_kv_heads} KV heads here."
            )
        attention = replace(attention, num_kv_heads=recipe.kv_heads)
    is_full = recipe.full_every and (index + 1) % recipe.full_every == 0
    if recipe.window and not is_full:
        window = min(recipe.window, attention.window or recipe.window)
        attention = replace(attention, window=window)
    return attention


def _check_linear(index: int, attention: AttentionSpec) -> None:
    """Whether heads are linear in what the layer gets, up to rotary positions."""
    others = {
        "norms on its heads": attention.qk_norm or attention.value_norm,
        "a norm behind its heads": attention.out_norm,
        "clipped heads": attention.qkv_clip,
        "values that are keys": attention.value_is_key,
        "gates on its heads": attention.output_gate,
        "sinks": attention.sinks,
    }
    found = [name for name, value in others.items() if value]
    if found:
        raise UnsupportedModelError(
            f"Layer {index} has {' and '.join(found)}, through which heads cannot be merged; "
            "windows can be given to such models."
        )


def converted_config(
    config: Mapping[str, object], spec: ModelSpec, recipe: ConversionRecipe
) -> tuple[dict[str, object], ModelDefinition]:
    """The config.json of the converted model, and what it is read as.

    Raises:
        SettingsError, UnsupportedModelError: as `converted_spec`; or no config can say it.
    """
    wanted = converted_spec(spec, recipe)
    attentions = [layer.attention for layer in wanted.layers]
    sources = [each.kv_layer for each in attentions if isinstance(each, AttentionSpec)]
    for changed in _candidates(config, wanted, recipe):
        if recipe.kv_heads:
            changed["num_key_value_heads"] = recipe.kv_heads
        if recipe.share > 1:
            changed |= {
                "base_model_type": changed["model_type"],
                "model_type": SHARED_KV,
                "architectures": ["RidgelineSharedKVForCausalLM"],
                "kv_layers": [-1 if source is None else source for source in sources],
            }
        try:
            definition = describe(changed)
        except ModelFileError:
            continue
        if replace(definition.spec, model_type=wanted.model_type) == wanted:
            return changed, definition
    raise UnsupportedModelError(
        f"No config of {spec.model_type}, nor of a family like it, can say what would be made."
    )


def _candidates(
    config: Mapping[str, object], wanted: ModelSpec, recipe: ConversionRecipe
) -> Iterator[dict[str, object]]:
    """Configs with the windows said in each way that there is, the shortest first."""
    if not recipe.window:
        yield dict(config)
        return
    kinds = [
        SLIDING if isinstance(each.attention, AttentionSpec) and each.attention.window else FULL
        for each in wanted.layers
    ]
    windows: dict[str, object] = {"sliding_window": recipe.window}
    ways = (
        windows,
        windows | {"layer_types": kinds},
        windows | {"layer_types": kinds, "use_sliding_window": True, "max_window_layers": 0},
    )
    own, first = str(config["model_type"]), wanted.layers[0].attention
    as_llama = sorted(_ARCHITECTURES, key=lambda each: each != own)  # a llama has no windows
    for model_type in as_llama if own in _AS_LLAMA else (own,):
        kept = dict(config)
        if model_type != own:
            assert isinstance(first, AttentionSpec)
            kept |= {
                "model_type": model_type,
                "architectures": [_ARCHITECTURES[model_type]],
                # What a llama may leave out, and of which the others have another default.
                "head_dim": first.head_dim,
                "num_key_value_heads": first.num_kv_heads,
                "max_position_embeddings": wanted.max_position,
            }
            for key in _WITHOUT_EFFECT:
                if not kept.get(key):
                    kept.pop(key, None)
        yield from (kept | way for way in ways)
