"""The families by ``model_type``, and `describe`, the way from a config to a model."""

import logging
from collections.abc import Mapping

from ridgeline.core.errors import InvalidRequestError, UnsupportedModelError
from ridgeline.core.formats import FLOAT32, float_format
from ridgeline.models import gemma2, gemma3_text, llama, mistral, qwen2, qwen3
from ridgeline.models.config import ConfigReader, show
from ridgeline.models.family import Family, ModelDefinition
from ridgeline.models.known_keys import refuse_unsupported, unknown_keys

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
    """Every ``model_type`` that is supported, in alphabetical order."""
    return tuple(sorted(_FAMILIES))


def describe(config: Mapping[str, object], *, strict: bool = False) -> ModelDefinition:
    """What the config of a checkpoint says, as a spec.

    Keys that nobody knows are listed in one warning.

    Raises:
        CorruptFileError: a value is missing, of the wrong type, or absurd.
        UnsupportedModelError: the model needs what Ridgeline lacks; or, if ``strict``, there are
            unknown keys.
    """
    reader = ConfigReader(config)
    model_type = reader.text("model_type")
    family = _FAMILIES.get(model_type)
    if family is None:
        raise UnsupportedModelError(
            f"model_type {show(model_type)} is not supported; supported are "
            f"{', '.join(model_types())}."
        )
    refuse_unsupported(reader)
    spec = family.build(reader)
    unknown = unknown_keys(reader)
    if unknown:
        listed = ", ".join(unknown[:_MAX_LISTED])
        more = f" and {len(unknown) - _MAX_LISTED} more" if len(unknown) > _MAX_LISTED else ""
        message = f"config.json has keys that Ridgeline does not know: {listed}{more}."
        if strict:
            raise UnsupportedModelError(message)
        _log.warning(message)
    return ModelDefinition(spec=spec, family=family, dtype=_declared_dtype(reader))


def _declared_dtype(config: ConfigReader) -> str:
    """``dtype`` or its old name ``torch_dtype``, from the config or else its text model's part."""
    places = (config, config.section("text_config")) if "text_config" in config else (config,)
    for place in places:
        for name in ("dtype", "torch_dtype"):
            if name in place:
                text = place.text(name)
                try:
                    return float_format(text).name
                except InvalidRequestError as error:
                    raise UnsupportedModelError(
                        f"config.json declares {name} {show(text)}, which is not supported."
                    ) from error
    return FLOAT32.name


for _family in (
    llama.FAMILY,
    mistral.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    gemma2.FAMILY,
    gemma3_text.FAMILY,
    gemma3_text.FAMILY_WITH_VISION,
):
    register(_family)
