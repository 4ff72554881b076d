"""The families by ``model_type``, and `describe`, the way from a config to a model."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import cast

from ridgeline.core.errors import SettingsError, UnsupportedModelError
from ridgeline.core.formats import FLOAT32, float_format
from ridgeline.core.parts import load_part, part_names
from ridgeline.core.spec import ModelSpec
from ridgeline.core.spelling import suggestion
from ridgeline.models.classifiers import is_classifier
from ridgeline.models.config import ConfigReader, show
from ridgeline.models.family import Family, ModelDefinition
from ridgeline.models.known_keys import refuse_unsupported, unknown_keys
from ridgeline.models.unsupported import lacking_for, refuse_block_drafter

_MAX_LISTED = 12
_log = logging.getLogger(__name__)
_CALLED_AS_THEIR_FILE = """
afmoe apertus arcee bamba bert bitnet cohere cohere2 cwm deepseek_v2 deepseek_v3 deepseek_v32 dots1
ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon_h1 gemma gemma2 gemma3_text glm glm4 glm4_moe
glm4_moe_lite gpt2 gpt_neox gpt_oss granite granite_swa granitemoe granitemoehybrid hy_v3 lfm2
lfm2_moe llama mamba2 mellum mimo minimax_m2 ministral mistral mistral4 mixtral modernbert nemotron
nemotron_h olmo olmo2 olmo3 olmoe phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next seed_oss
smollm3 stablelm starcoder2 youtu
"""
# The `Family` of each ``model_type``; its file is imported when such a model comes.
_FAMILIES = dict.fromkeys(_CALLED_AS_THEIR_FILE.split(), "FAMILY") | {
    "flex_olmo": "olmoe:FLEX_OLMO",
    "gemma3": "gemma3_text:FAMILY_WITH_VISION",
    "gemma3n": "gemma3n:FAMILY_WITH_VISION",
    "gemma3n_text": "gemma3n:FAMILY",
    "gemma4": "gemma4:FAMILY_WITH_VISION",
    "gemma4_text": "gemma4:FAMILY",
    "glm_moe_dsa": "deepseek_v32:GLM_MOE_DSA",
    "granitemoe_swa": "granite_swa:FAMILY_MOE",
    "granitemoeshared": "granitemoe:WITH_SHARED_EXPERT",
    "helium": "llama:HELIUM",
    "hunyuan_v1_dense": "hunyuan:FAMILY",
    "hunyuan_v1_moe": "hunyuan:FAMILY_MOE",
    "hyperclovax": "granite:HYPERCLOVAX",
    "internlm3": "llama:INTERNLM_3",
    "iquestcoder": "llama:IQUEST_CODER",
    "jais2": "nemotron:JAIS_2",
    "kimi_k2": "deepseek_v3:KIMI_K2",
    "ministral3": "ministral:FAMILY_3",
    "llama4": "vision:LLAMA_4",
    "llama4_text": "llama4:FAMILY",
    "mistral3": "vision:MISTRAL_3",
    "qwen2_5_vl": "vision:QWEN_2_5_VL",
    "qwen2_vl": "vision:QWEN_2_VL",
    "qwen3_5": "qwen3_5:FAMILY_WITH_VISION",
    "qwen3_5_moe": "qwen3_5:MOE_FAMILY_WITH_VISION",
    "qwen3_5_moe_text": "qwen3_5:MOE_FAMILY",
    "qwen3_5_text": "qwen3_5:FAMILY",
    "qwen3_vl": "vision:QWEN_3_VL",
    "qwen3_vl_moe": "vision:QWEN_3_VL_MOE",
    "ridgeline_shared_kv": "shared_kv:FAMILY",
    "roberta": "roberta:ROBERTA",
    "solar_open": "glm4_moe:SOLAR_OPEN",
    "vaultgemma": "gemma2:VAULT_GEMMA",
    "xlm-roberta": "roberta:XLM_ROBERTA",
}


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
    refuse_block_drafter(reader)
    model_type = reader.text("model_type")
    family = _family(model_type)
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


def _family(model_type: str) -> Family | None:
    if model_type not in _FAMILIES:
        return cast(Family | None, load_part("model_families", model_type))
    module, _, name = _FAMILIES[model_type].rpartition(":")
    return cast(Family, getattr(import_module(f"ridgeline.models.{module or model_type}"), name))


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
