"""Models with a vision tower: their text model, which another family describes, is read alone.

Text has one position in all three of Qwen-VL's axes, so its multi-axis rope is the plain one.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ridgeline.core.errors import CorruptFileError, UnsupportedModelError
from ridgeline.core.spec import ModelSpec
from ridgeline.models import llama4, ministral, mistral, mistral4, qwen2, qwen3, qwen3_moe
from ridgeline.models.config import ConfigReader, show
from ridgeline.models.family import Family, TensorSource
from ridgeline.models.known_keys import refuse_unsupported
from ridgeline.models.moe_config import STACKED_FUSED, STACKED_TENSORS

_KEYS = (
    "boi_token_index", "eoi_token_index", "image_token_id", "image_token_index",
    "mm_tokens_per_image", "multimodal_projector_bias", "projector_hidden_act",
    "spatial_merge_size", "video_token_id", "vision_config", "vision_end_token_id",
    "vision_feature_layer", "vision_start_token_id", "vision_token_id",
)  # fmt: skip
VISION_TENSORS = r"(model\.)?(vision_tower|vision_model|multi_modal_projector|visual)\..*"
_log = logging.getLogger(__name__)


def leave_out_vision(config: ConfigReader) -> None:
    """Accept the keys of a vision tower, and say that it is not used."""
    _log.warning(
        "This %s model has a vision tower, which is left out: it reads text, not images.",
        config.text("model_type"),
    )
    for name in _KEYS:
        config.ignore(name)


def beside_vision(tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    """Where a text model's tensors lie beside those of a vision tower.

    The first name is that of Llava's layout, the second what transformers calls its modules, and
    PEFT what it adapts; early Qwen models have neither prefix.
    """

    def beside(source: TensorSource) -> TensorSource:
        first, *others = (
            place
            for name in (source.name, *source.other_names)
            for place in (
                f"language_model.{name}", name.replace("model.", "model.language_model.", 1), name
            )
        )  # fmt: skip
        return replace(source, name=first, other_names=tuple(others))

    return {name: beside(source) for name, source in tensors.items()}


def _together(families: Iterable[Family]) -> dict[str, TensorSource]:
    """The tensors of several families, where names that differ stand for each other."""
    sources: dict[str, TensorSource] = {}
    for family in families:
        for name, source in family.tensors.items():
            known = sources.setdefault(name, source)
            more = [
                each
                for each in (source.name, *source.other_names)
                if each not in (known.name, *known.other_names)
            ]
            sources[name] = replace(known, other_names=(*known.other_names, *more))
    return sources


def _text_model(
    model_type: str,
    texts: Mapping[str, Family],
    *,
    defaults: Mapping[str, object],
    tensors: Mapping[str, TensorSource] | None = None,
    fused: Mapping[str, tuple[str, ...]] | None = None,
) -> Family:
    """A family whose config has the text model's under ``text_config``, or is that itself.

    ``texts`` are the families that the text model may be of, by its own ``model_type``;
    ``defaults`` are what its class has where files leave keys out.
    """

    def build(config: ConfigReader) -> ModelSpec:
        leave_out_vision(config)
        if "text_config" not in config:
            family, *others = {id(each): each for each in texts.values()}.values()
            if others:
                raise CorruptFileError(f"config.json of {model_type} has no text_config.")
            return replace(family.build(config), model_type=model_type)
        text = config.section("text_config")
        text.complete(defaults)
        kind = text.text("model_type", default=next(iter(texts)))
        if kind not in texts:
            raise UnsupportedModelError(
                f"config.json gives the text model of {model_type} the model_type {show(kind)}; "
                f"supported are {', '.join(texts)}."
            )
        refuse_unsupported(text, computed=texts[kind].computes)
        spec = texts[kind].build(text)
        tied = config.boolean("tie_word_embeddings", default=spec.tie_embeddings)
        return replace(spec, tie_embeddings=tied)

    first = next(iter(texts.values()))
    fused = fused or {
        tensor: parts for each in texts.values() for tensor, parts in each.fused.items()
    }
    names = beside_vision({**_together(texts.values()), **(tensors or {})})
    return Family(
        model_type=model_type,
        build=build,
        tensors=names,
        fused=fused,
        ignored=(*first.ignored, VISION_TENSORS),
    )


_QWEN_2 = {"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5, "vocab_size": 152_064}
_QWEN_3 = {"rope_theta": 500_000.0, "max_position_embeddings": 128_000, "vocab_size": 151_936}
_MISTRAL = {
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 32_768,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "vocab_size": 131_072,
}
_STACKED = {
    name: replace(source, transpose=True, either_way=True)
    for name, source in STACKED_TENSORS.items()
}
MISTRAL_3 = _text_model(
    "mistral3",
    {
        "mistral": mistral.FAMILY,
        "ministral": ministral.FAMILY,
        "ministral3": ministral.FAMILY_3,
        "mistral4": mistral4.FAMILY,
    },
    defaults=_MISTRAL,
)
LLAMA_4 = _text_model("llama4", {"llama4_text": llama4.FAMILY}, defaults={})
QWEN_2_VL = _text_model("qwen2_vl", {"qwen2_vl_text": qwen2.FAMILY}, defaults=_QWEN_2)
QWEN_2_5_VL = _text_model("qwen2_5_vl", {"qwen2_5_vl_text": qwen2.FAMILY}, defaults=_QWEN_2)
QWEN_3_VL = _text_model("qwen3_vl", {"qwen3_vl_text": qwen3.FAMILY}, defaults=_QWEN_3)
QWEN_3_VL_MOE = _text_model(
    "qwen3_vl_moe",
    {"qwen3_vl_moe_text": qwen3_moe.FAMILY},
    defaults=_QWEN_3 | {"norm_topk_prob": True},
    tensors=_STACKED,
    fused=STACKED_FUSED,
)
