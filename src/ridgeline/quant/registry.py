"""The schemes by ``quant_method``, and the way from a ``quantization_config`` to one of them."""

import logging
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import cast

from ridgeline.core.errors import UnsupportedModelError
from ridgeline.core.parts import load_part, part_names
from ridgeline.models.config import ConfigReader, show
from ridgeline.quant.scheme import Scheme

_MAX_LISTED = 12
_log = logging.getLogger(__name__)
Read = Callable[[ConfigReader], Scheme]
_SCHEMES = {  # by file, which is imported when such a checkpoint comes
    "awq": "awq:AWQ",
    "bitnet": "bitnet:BitNet",
    "bitsandbytes": "bitsandbytes:BitsAndBytes",
    "compressed-tensors": "compressed_tensors:CompressedTensors",
    "fp8": "fp8:FP8Weights",
    "gptq": "gptq:GPTQ",
    "mxfp4": "mxfp4:MXFP4",
}


def quant_methods() -> tuple[str, ...]:
    """Every ``quant_method`` that is supported, in alphabetical order.

    Those of other packages are functions as `GPTQ.read`, of the group
    ``ridgeline.quantization_schemes``.
    """
    return tuple(sorted({*_SCHEMES, *part_names("quantization_schemes")}))


def read_scheme(quantization_config: Mapping[str, object], *, strict: bool = False) -> Scheme:
    """The scheme that a checkpoint's ``quantization_config`` describes.

    Keys that nobody knows are listed in one warning.

    Raises:
        UnsupportedModelError: the scheme or a setting is not supported; or, if ``strict``, there
            are unknown keys.
        CorruptFileError: a value is missing, of the wrong type, or absurd.
    """
    config = ConfigReader(quantization_config, prefix="quantization_config.")
    method = config.text("quant_method", default=_guess(config))
    read = _reader(method)
    if read is None:
        raise UnsupportedModelError(
            f"The checkpoint is quantized by {show(method)}, which is not supported; supported are "
            f"{', '.join(quant_methods())}; load the unquantized checkpoint of this model instead."
        )
    scheme = read(config)
    unknown = config.leftovers()
    if unknown:
        more = f" and {len(unknown) - _MAX_LISTED} more" if len(unknown) > _MAX_LISTED else ""
        listed = f"{', '.join(unknown[:_MAX_LISTED])}{more}"
        message = f"config.json has keys that Ridgeline does not know: {listed}."
        if strict:
            raise UnsupportedModelError(message)
        _log.warning(message)
    return scheme


def _reader(method: str) -> Read | None:
    if method not in _SCHEMES:
        return cast(Read | None, load_part("quantization_schemes", method))
    module, _, name = _SCHEMES[method].partition(":")
    return cast(Read, getattr(import_module(f"ridgeline.quant.{module}"), name).read)


def _guess(config: ConfigReader) -> str | None:
    """The method of early checkpoints, which do not name it."""
    if "load_in_4bit" in config or "load_in_8bit" in config:
        return "bitsandbytes"
    return "compressed-tensors" if "config_groups" in config else None
