"""A model as the cpu executor holds it, for the roofline."""

from dataclasses import replace

from ridgeline.core.formats import (
    FLOAT32,
    NumberFormat,
    head_format,
    table_format,
    with_scales,
)
from ridgeline.core.ops import (
    MLP,
    Embed,
    Head,
    LatentProject,
    MoE,
    Op,
    OutProject,
    QKVProject,
    SharedExpert,
    Weight,
    op_weights,
)
from ridgeline.executors.cpu.roles import held_format, padded
from ridgeline.kernels.cpu.library import chosen_level, native_kernels_run
from ridgeline.roofline import PricedModel
from ridgeline.roofline.kernels import NativeKernels

_PRODUCTS = (QKVProject, LatentProject, OutProject, MLP, MoE, SharedExpert)


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
        for weight in op_weights(op):
            layers = held_format(quantized, weight.shape[-1])
            form = _format(op, weight, own, quantized, layers)
            formats.setdefault(weight.name, padded(form))
    return formats


def _format(
    op: Op, weight: Weight, own: NumberFormat, quantized: NumberFormat, layers: NumberFormat
) -> NumberFormat:
    if not _is_matrix(weight):
        return FLOAT32
    match op:
        case Head():
            return head_format(quantized)
        case Embed():
            return table_format(quantized) if weight == op.weight else FLOAT32
        case MoE() if weight == op.router:
            return own
    return layers if isinstance(op, _PRODUCTS) else own


def _is_matrix(weight: Weight) -> bool:
    return len(weight.shape) > 1 and not weight.name.endswith(("_bias", "_norm"))
