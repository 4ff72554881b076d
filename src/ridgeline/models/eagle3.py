"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): drafters that read the target's hidden states.

Two forms of config: that of the authors' checkpoints, which is a Llama's with ``draft_vocab_size``,
and that of the package ``speculators`` (``speculators_model_type``), whose layer is a section.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from ridgeline.core.errors import SettingsError, UnsupportedModelError
from ridgeline.core.spec import EagleSpec, ModelSpec
from ridgeline.models import llama, qwen3
from ridgeline.models.config import ConfigReader, show
from ridgeline.models.draft_head import DraftHeadDefinition
from ridgeline.models.family import TensorSource
from ridgeline.models.known_keys import refuse_unsupported, unknown_keys
from ridgeline.models.tensor_names import LLAMA_TENSORS
from ridgeline.models.unsupported import refuse_block_drafter

_BUILDERS = {"llama": llama.build, "qwen3": qwen3.build}
_NAMES = {
    "embed": ("embed_tokens.weight",),
    "token_norm": ("midlayer.input_layernorm.weight", "layers.0.input_layernorm.weight"),
    "features_norm": ("input_norm.weight",),
    "fc": ("fc.weight",),
    "hidden_norm": ("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"),
    "final_norm": ("norm.weight",),
    "head": ("lm_head.weight",),
}
TOKEN_MAP = "d2t"  # of a row of the head: how much greater its token's id is than its number
_MAP_OF_TARGET = "t2d"  # the same, told the other way round
_IGNORED = (TOKEN_MAP, _MAP_OF_TARGET, r"verifier_(norm|lm_head)\.weight", r".*rotary_emb.*")
# Of how drafts are proposed and trained; read by nobody who only runs them.
_INERT = frozenset(
    ("speculators_version", "speculators_config", "embed_requires_grad", "has_no_defaults_at_init")
)


def is_draft_head(config: Mapping[str, object]) -> bool:
    """Whether a config is that of such a drafter, in either form."""
    return "speculators_model_type" in config or "draft_vocab_size" in config


def describe_head(
    config: Mapping[str, object], target: ModelSpec, tensors: Collection[str]
) -> DraftHeadDefinition:
    """What the config of a drafter says, whose file has these ``tensors``.

    Raises:
        CorruptFileError: a value is missing, of the wrong type, or absurd.
        SettingsError: it was made for another model.
        UnsupportedModelError: it is no EAGLE-3, or needs what Ridgeline lacks.
    """
    reader = layer = ConfigReader(config)
    refuse_block_drafter(reader)
    if "speculators_model_type" in reader:
        kind = reader.text("speculators_model_type")
        if kind != "eagle3":
            raise UnsupportedModelError(
                f"The drafter is of speculators_model_type {show(kind)}, and eagle3 is supported."
            )
        layer = reader.section("transformer_layer_config")
    elif "fc.weight" not in tensors:
        raise UnsupportedModelError(
            "The folder of draft_model has no fc.weight: it is no EAGLE-3 drafter. "
            "speculation draft takes a model of its own."
        )
    family = layer.text("model_type", default="llama")
    if family not in _BUILDERS:
        raise UnsupportedModelError(
            f"The drafter's layer is of model_type {show(family)}; supported are llama and qwen3."
        )
    refuse_unsupported(layer)
    reader.refuse("fc_norm", unless=(False,))
    model = _BUILDERS[family](layer)
    if model.vocab_size != target.vocab_size:
        raise SettingsError(
            f"The drafter was made for {model.vocab_size:,} tokens, and the model has "
            f"{target.vocab_size:,}; name a drafter of this model."
        )
    wanted = reader.integer("target_hidden_size", default=model.hidden_size)
    if wanted != target.hidden_size:
        raise SettingsError(
            f"The drafter reads hidden states of {wanted} elements, and the model's have "
            f"{target.hidden_size}; name a drafter of this model."
        )
    assert model.final_norm is not None, "Llama and Qwen 3 have one"
    first, *others = model.layers
    spec = EagleSpec(
        hidden_size=model.hidden_size,
        vocab_size=reader.integer("draft_vocab_size", default=target.vocab_size),
        layers=(replace(first, attention_norm=None), *others),
        feature_layers=_feature_layers(reader, len(target.layers)),
        norm=model.final_norm,
        norm_features=reader.boolean("norm_before_fc", default=False),
        norm_residual=reader.boolean("norm_before_residual", default=False),
        norm_output=reader.boolean("norm_output", default=False),
    )
    unknown = {*unknown_keys(reader), *unknown_keys(layer)} - _INERT
    return DraftHeadDefinition(
        spec=spec,
        sources=_sources(len(target.layers), len(spec.layers)),
        borrowed=_borrowed(spec, target, tensors),
        ignored=_IGNORED,
        unknown=tuple(sorted(name for name in unknown if name.partition(".")[0] not in _INERT)),
    )


def _feature_layers(reader: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """After how many of the target's layers its hidden states are read."""
    name = "eagle_aux_hidden_state_layer_ids"
    place = reader
    if name not in reader and "eagle_config" in reader:
        place = reader.section("eagle_config")
        place.refuse("use_aux_hidden_state", unless=(True,))
    found = place.integers(name, minimum=0) or (2, num_layers // 2, num_layers - 3)
    if not all(0 <= each <= num_layers for each in found):
        raise SettingsError(
            f"The drafter reads the model after layers {', '.join(map(str, found))}, and the model "
            f"has {num_layers}; name a drafter of this model."
        )
    return found


def _borrowed(spec: EagleSpec, target: ModelSpec, tensors: Collection[str]) -> dict[str, str]:
    lacks = [name for name in ("embed", "head") if not set(tensors) & {*_NAMES[name]}]
    if lacks and spec.hidden_size != target.hidden_size:
        raise UnsupportedModelError(
            f"The drafter has no {' and no '.join(lacks)} of its own, and is of another "
            "width than the model."
        )
    if "head" in lacks and spec.vocab_size != target.vocab_size:
        raise UnsupportedModelError("The drafter has a vocabulary of its own, and no lm_head.")
    return {name: "embed" if target.tie_embeddings else name for name in lacks}


def _sources(num_layers: int, num_own: int) -> dict[str, TensorSource]:
    """Where its weights lie; its layers are numbered behind the target's."""
    sources = {name: _source(*names) for name, names in _NAMES.items()}
    for template, source in LLAMA_TENSORS.items():
        if "{i}" not in template:
            continue
        module = source.name.removeprefix("model.layers.{i}.")
        for place in range(num_own):
            names = [f"layers.{place}.{module}"]
            if not place:
                names.insert(0, f"midlayer.{module}")
            sources[template.replace("{i}", str(num_layers + place))] = _source(*names)
    return sources


def _source(name: str, *others: str) -> TensorSource:
    return TensorSource(name=name, other_names=others)
