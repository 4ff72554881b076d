"""The families by ``model_type``, and `describe`, the way from a config to a model."""

import logging
from collections.abc import Mapping
from dataclasses import replace

from ridgeline.core.errors import SettingsError, UnsupportedModelError
from ridgeline.core.formats import FLOAT32, float_format
from ridgeline.core.parts import load_part, part_names
from ridgeline.core.spec import ModelSpec
from ridgeline.core.spelling import suggestion
from ridgeline.models import (
    apertus,
    arcee,
    bamba,
    bert,
    bitnet,
    cohere,
    cohere2,
    cwm,
    deepseek_v2,
    deepseek_v3,
    deepseek_v32,
    dots1,
    ernie4_5,
    ernie4_5_moe,
    exaone4,
    exaone_moe,
    falcon_h1,
    gemma,
    gemma2,
    gemma3_text,
    gemma4,
    glm,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    gpt2,
    gpt_oss,
    granite,
    granite_swa,
    granitemoe,
    granitemoehybrid,
    hunyuan,
    hy_v3,
    lfm2,
    lfm2_moe,
    llama,
    mamba2,
    mellum,
    mimo,
    minimax_m2,
    ministral,
    mistral,
    mistral4,
    mixtral,
    modernbert,
    nemotron,
    nemotron_h,
    olmo,
    olmo2,
    olmo3,
    olmoe,
    phi,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
    roberta,
    seed_oss,
    shared_kv,
    smollm3,
    stablelm,
    starcoder2,
    vision,
    youtu,
)
from ridgeline.models.classifiers import is_classifier
from ridgeline.models.config import ConfigReader, show
from ridgeline.models.family import Family, ModelDefinition
from ridgeline.models.known_keys import refuse_unsupported, unknown_keys
from ridgeline.models.unsupported import lacking_for

_MAX_LISTED = 12
_log = logging.getLogger(__name__)
_FAMILIES: dict[str, Family] = {}


def register(family: Family) -> None:
    """Make a family known by its ``model_type``.

    Raises:
        ValueError: there is one of that name already.
    """
    if family.model_type in _FAMILIES:
        raise ValueError(f"there is a family {family.model_type!r} already")
    _FAMILIES[family.model_type] = family


def model_types() -> tuple[str, ...]:
    """Every ``model_type`` that is supported, in alphabetical order.

    Those of other packages are `Family` values of the group ``ridgeline.model_families``.
    """
    return tuple(sorted({*_FAMILIES, *part_names("model_families")}))


def describe(
    config: Mapping[str, object], *, strict: bool = False, context: int | None = None
) -> ModelDefinition:
    """What the config of a checkpoint says, as a spec, for contexts of up to ``context`` tokens.

    Keys that nobody knows are listed in one warning.

    Raises:
        CorruptFileError: a value is missing, of the wrong type, or absurd.
        UnsupportedModelError: the model needs what Ridgeline lacks; or, if ``strict``, there are
            unknown keys.
    """
    reader = ConfigReader(config, context=context)
    model_type = reader.text("model_type")
    family: Family | None = _FAMILIES.get(model_type) or load_part("model_families", model_type)
    if family is None:
        lacking = lacking_for(model_type, reader)
        end = suggestion(model_type, model_types())
        if lacking is not None:
            end = f": it needs {lacking}, which Ridgeline lacks."
        raise UnsupportedModelError(
            f"model_type {show(model_type)} is not supported{end} `ridgeline collect-env` lists "
            "those that are."
        )
    refuse_unsupported(reader, computed=family.computes)
    quantization = _quantization(reader)
    num_mtp_layers = _num_mtp_layers(reader)
    spec = family.build(reader)
    if spec.has_head and _lacks_head(reader, spec):
        spec = replace(spec, has_head=False)
    unknown = unknown_keys(reader)
    if unknown:
        listed = ", ".join(unknown[:_MAX_LISTED])
        more = f" and {len(unknown) - _MAX_LISTED} more" if len(unknown) > _MAX_LISTED else ""
        message = f"config.json has keys that Ridgeline does not know: {listed}{more}."
        if strict:
            raise UnsupportedModelError(message)
        _log.warning(message)
    return ModelDefinition(
        spec=spec,
        family=family,
        dtype=_declared_dtype(reader),
        quantization=quantization,
        num_mtp_layers=num_mtp_layers,
    )


def _num_mtp_layers(config: ConfigReader) -> int:
    """Layers behind the last that predict further tokens, under either name."""
    names = ("num_nextn_predict_layers", "num_mtp_layers")
    return max(config.integer(name, minimum=0, maximum=64, default=0) for name in names)


def _lacks_head(config: ConfigReader, spec: ModelSpec) -> bool:
    """Whether the checkpoint is of a class of transformers' that ends in hidden states."""
    if is_classifier(config):
        return True
    names = config.texts("architectures") or ()
    bare = [name.endswith("Model") and not name.endswith("LMHeadModel") for name in names]
    return bool(bare) and all(bare) and not spec.tie_embeddings


def _quantization(config: ConfigReader) -> Mapping[str, object] | None:
    """The ``quantization_config``, or ``compression_config`` as it was called, if there is one."""
    places = (config, config.section("text_config")) if "text_config" in config else (config,)
    for place in places:
        for name in ("quantization_config", "compression_config"):
            if name in place:
                return place.mapping(name)
    return None


def _declared_dtype(config: ConfigReader) -> str:
    """``dtype`` or its old name ``torch_dtype``, from the config or else its text model's part."""
    places = (config, config.section("text_config")) if "text_config" in config else (config,)
    for place in places:
        for name in ("dtype", "torch_dtype"):
            if name in place:
                text = place.text(name)
                try:
                    return float_format(text).name
                except SettingsError as error:
                    raise UnsupportedModelError(
                        f"config.json declares {name} {show(text)}, which is not supported."
                    ) from error
    return FLOAT32.name


for _family in (
    apertus.FAMILY,
    arcee.FAMILY,
    bitnet.FAMILY,
    bamba.FAMILY,
    bert.FAMILY,
    cohere.FAMILY,
    cohere2.FAMILY,
    cwm.FAMILY,
    deepseek_v2.FAMILY,
    deepseek_v3.FAMILY,
    deepseek_v3.KIMI_K2,
    deepseek_v32.FAMILY,
    deepseek_v32.GLM_MOE_DSA,
    dots1.FAMILY,
    ernie4_5.FAMILY,
    ernie4_5_moe.FAMILY,
    exaone4.FAMILY,
    exaone_moe.FAMILY,
    falcon_h1.FAMILY,
    gemma.FAMILY,
    gemma2.FAMILY,
    gemma2.VAULT_GEMMA,
    gemma3_text.FAMILY,
    gemma3_text.FAMILY_WITH_VISION,
    gemma4.FAMILY,
    gemma4.FAMILY_WITH_VISION,
    glm.FAMILY,
    glm4.FAMILY,
    glm4_moe.FAMILY,
    glm4_moe.SOLAR_OPEN,
    glm4_moe_lite.FAMILY,
    gpt2.FAMILY,
    gpt_oss.FAMILY,
    granite.FAMILY,
    granite.HYPERCLOVAX,
    granite_swa.FAMILY,
    granite_swa.FAMILY_MOE,
    granitemoe.FAMILY,
    granitemoe.WITH_SHARED_EXPERT,
    granitemoehybrid.FAMILY,
    hunyuan.FAMILY,
    hunyuan.FAMILY_MOE,
    hy_v3.FAMILY,
    lfm2.FAMILY,
    lfm2_moe.FAMILY,
    llama.FAMILY,
    llama.HELIUM,
    llama.INTERNLM_3,
    llama.IQUEST_CODER,
    minimax_m2.FAMILY,
    ministral.FAMILY,
    ministral.FAMILY_3,
    mistral.FAMILY,
    mistral4.FAMILY,
    mixtral.FAMILY,
    modernbert.FAMILY,
    mamba2.FAMILY,
    mellum.FAMILY,
    mimo.FAMILY,
    nemotron.FAMILY,
    nemotron.JAIS_2,
    nemotron_h.FAMILY,
    olmo.FAMILY,
    olmo2.FAMILY,
    olmo3.FAMILY,
    olmoe.FAMILY,
    olmoe.FLEX_OLMO,
    phi.FAMILY,
    phi3.FAMILY,
    qwen2.FAMILY,
    qwen2_moe.FAMILY,
    qwen3.FAMILY,
    qwen3_5.FAMILY,
    qwen3_5.FAMILY_WITH_VISION,
    qwen3_5.MOE_FAMILY,
    qwen3_5.MOE_FAMILY_WITH_VISION,
    qwen3_moe.FAMILY,
    qwen3_next.FAMILY,
    roberta.ROBERTA,
    roberta.XLM_ROBERTA,
    seed_oss.FAMILY,
    shared_kv.FAMILY,
    smollm3.FAMILY,
    stablelm.FAMILY,
    starcoder2.FAMILY,
    vision.MISTRAL_3,
    vision.QWEN_2_5_VL,
    vision.QWEN_2_VL,
    vision.QWEN_3_VL,
    vision.QWEN_3_VL_MOE,
    youtu.FAMILY,
):
    register(_family)
