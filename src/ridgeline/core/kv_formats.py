"""What K and V are stored in, and which models each format is for."""

from dataclasses import replace

from ridgeline.core.cache_groups import kv_groups
from ridgeline.core.errors import SettingsError
from ridgeline.core.formats import NumberFormat, full_name, number_format
from ridgeline.core.spec import ModelSpec

KV_CACHE_DTYPES = ("auto", "float32", "float16", "bfloat16", "int8", "fp8", "int4")
ROTATED_WIDTHS = (32, 64, 128, 256, 512)
_OTHER_NAMES = {"fp8_e4m3": "fp8"}


def kv_dtype_name(value: str) -> str:
    """The name in `KV_CACHE_DTYPES` of a format that may be called by another, as bf16.

    Raises:
        SettingsError: there is no such format.
    """
    name = full_name(value)
    name = _OTHER_NAMES.get(name, name)
    if name not in KV_CACHE_DTYPES:
        raise SettingsError(f"kv_cache_dtype must be one of {', '.join(KV_CACHE_DTYPES)}.")
    return name


def kv_number_format(name: str) -> NumberFormat | None:
    """How K and V are stored that are called so; ``None``, of auto, is the model's own type."""
    return None if name == "auto" else with_scales(number_format(name))


def with_scales(kv: NumberFormat) -> NumberFormat:
    """Quantized KV has a float32 scale for each head of each token."""
    return replace(kv, scale_bits=32, group_size=None) if kv.is_quantized else kv


def check_kv_format(spec: ModelSpec, kv: NumberFormat | None) -> None:
    """Refuse int4 for heads that are not rotated: four bits need it (docs/cpu.md).

    Raises:
        SettingsError: the model's K and V are not stored in this format.
    """
    if kv is None or kv.name != "int4":
        return
    for group in kv_groups(spec):
        if not group.v_width:
            raise SettingsError(
                f"kv_cache_dtype int4 is not for the latents of {spec.model_type}, which hold K "
                "and V in one: use int8 or fp8."
            )
        for width in (group.k_width, group.v_width):
            if width not in ROTATED_WIDTHS:
                raise SettingsError(
                    f"kv_cache_dtype int4 rotates heads of {', '.join(map(str, ROTATED_WIDTHS))} "
                    f"elements, and those of this model ({spec.model_type}) have {width}: use int8 "
                    "or fp8."
                )
