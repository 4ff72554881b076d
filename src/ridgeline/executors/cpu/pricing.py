"""A model as the cpu executor holds it, for the roofline."""

from dataclasses import replace

from ridgeline.core.formats import (
    FLOAT32,
    NumberFormat,
    head_format,
    table_format,
)
from ridgeline.core.kv_formats import with_scales
from ridgeline.core.op_facts import Role
from ridgeline.core.weight_uses import weight_uses
from ridgeline.executors.cpu.roles import held_format, padded
from ridgeline.kernels.cpu.library import chosen_level, native_kernels_run
from ridgeline.roofline import PricedModel
from ridgeline.roofline.kernels import NativeKernels


def priced(model: PricedModel) -> PricedModel:
    """A model in the formats that this executor makes of its own."""
    own = model.activations
    return replace(
        model,
        activations=FLOAT32,
        weights=None,
        weight_formats=_formats(model, own, model.weights or own),
        kv=with_scales(model.kv or own),
        products_by_weight=True,
        kernels=native_kernels(),
    )


def native_kernels() -> NativeKernels:
    """Those of the instruction-set level that runs here, or of AVX2 where none is built."""
    level = chosen_level() if native_kernels_run() else "avx2"
    has_wide_vectors = level.startswith("avx512")
    return NativeKernels(
        panel_tokens=4 if level in ("avx2", "avxvnni") else 8,
        attention_rows=12 if has_wide_vectors else 2 if level == "generic" else 6,
        in_16_bits=level == "avx2",
        in_pairs=level == "avx512bf16",
        has_amx=level == "avx512amx",
        line=4.0 if has_wide_vectors else 1.0,
    )


def _formats(
    model: PricedModel, own: NumberFormat, quantized: NumberFormat
) -> dict[str, NumberFormat]:
    formats = dict(model.weight_formats)  # those of the checkpoint stay as they are
    for op in reversed(model.ops):  # the head first: an embedding that is tied to it is as it is
        for weight, role, *_ in weight_uses(op):
            *_, columns = (1, *weight.shape)  # a number has no shape
            layers = held_format(quantized, columns)
            formats.setdefault(weight.name, padded(_format(role, own, quantized, layers)))
    return formats


def _format(
    role: Role, own: NumberFormat, quantized: NumberFormat, layers: NumberFormat
) -> NumberFormat:
    match role:
        case Role.HEAD:
            return head_format(quantized)
        case Role.TABLE:
            return table_format(quantized)
        case Role.PRODUCT | Role.OUTPUT_GATE:
            return layers
        case Role.ROUTER | Role.EXPANSION:
            return own
        case (
            Role.GAIN
            | Role.BIAS
            | Role.SINKS
            | Role.POSITIONS
            | Role.CONVOLUTION
            | Role.DECAY
            | Role.SKIP
        ):
            return FLOAT32
