"""Layers that predict one token more (MTP; DeepSeek-V3, arXiv 2412.19437, section 2.2) as drafters.

They lie in the target's own files, behind its last layer or under a name of their own
(`MTPTensors`), and are layers of its kind. Features are the target's final hidden states, normed,
and then what its own head reads of its own; so transformers and SGLang have it.
"""

from collections.abc import Collection
from dataclasses import replace

from ridgeline.core.cache_groups import state_group
from ridgeline.core.errors import SettingsError, UnsupportedModelError
from ridgeline.core.spec import AttentionSpec, MLASpec, ModelSpec, MTPSpec
from ridgeline.models.draft_head import DraftHeadDefinition
from ridgeline.models.family import ModelDefinition, TensorSource

_MODULES = ("token_norm", "hidden_norm", "fc", "final_norm")


def describe_mtp(
    definition: ModelDefinition, tensors: Collection[str] | None
) -> DraftHeadDefinition:
    """The first such layer of a model whose files have these ``tensors``, ``None`` if random ones.

    Raises:
        SettingsError: it has none, or keeps states.
        UnsupportedModelError: what is before its layers or behind them is not supported here.
    """
    spec, names = definition.spec, definition.family.mtp
    if state_group(spec) is not None:
        raise SettingsError(
            f"speculation mtp does not work with models of the family {spec.model_type}, which "
            "keep states of their sequences beside KV; take another `speculation`."
        )
    count = str(len(spec.layers))
    own = {name: getattr(names, name).replace("{n}", count) for name in (*_MODULES, "layer")}
    has_one = definition.num_mtp_layers > 0 if tensors is None else own["fc"] in tensors
    if not has_one:
        raise SettingsError(
            "speculation='mtp' needs a model with a layer that predicts one token more, and this "
            f"{spec.model_type} has no {own['fc']}; take another `speculation`."
        )
    layer = spec.layers[-1]
    if not _is_supported(spec):
        raise UnsupportedModelError(
            f"speculation='mtp' does not know how {spec.model_type} would have a layer more; take "
            "another speculation."
        )
    assert spec.final_norm is not None
    longer = replace(definition, spec=replace(spec, layers=(*spec.layers, layer)))
    return DraftHeadDefinition(
        spec=MTPSpec(
            hidden_size=spec.hidden_size,
            layer=layer,
            norm=spec.final_norm,
            features_first=names.features_first,
        ),
        sources={name: TensorSource(name=own[name]) for name in _MODULES}
        | {
            name: source.renamed(f"model.layers.{count}.", own["layer"])
            for name, source in longer.sources.items()
            if name.startswith(f"layers.{count}.")
        },
        borrowed={"embed": "embed", "head": "embed" if spec.tie_embeddings else "head"},
        ignored=(r".*",),  # the target's
    )


def _is_supported(spec: ModelSpec) -> bool:
    """Whether a layer more needs nothing but embedding, norm and head."""
    attention = spec.layers[-1].attention
    return (
        isinstance(attention, AttentionSpec | MLASpec)
        and not (isinstance(attention, AttentionSpec) and attention.kv_layer is not None)
        and spec.final_norm is not None
        and spec.has_head
        and not spec.head_bias
        and spec.learned_positions is None
        and spec.embedding_norm is None
        and spec.layer_inputs is None
    )
