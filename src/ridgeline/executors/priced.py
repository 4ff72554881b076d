"""A model as the roofline prices it, with its weights as an executor stores them."""

from collections.abc import Mapping
from dataclasses import replace

from ridgeline.core.formats import (
    FLOAT32,
    NumberFormat,
    float_format,
    head_format,
    number_format,
    table_format,
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
from ridgeline.core.plan import ModelRole
from ridgeline.core.protocols import Executor
from ridgeline.executors.base import PoolExecutor
from ridgeline.executors.model import ExecutorModel
from ridgeline.kernels.cpu.library import chosen_level, native_kernels_run
from ridgeline.roofline import PricedModel
from ridgeline.roofline.kernels import NativeKernels
from ridgeline.weights import Adapter

_PRODUCTS = (QKVProject, LatentProject, OutProject, MLP, MoE, SharedExpert)


def priced_model(
    model: ExecutorModel,
    executor: str,
    *,
    kv_cache_dtype: str = "auto",
    held: Mapping[str, NumberFormat] | None = None,
) -> PricedModel:
    """What `price` takes; ``held`` are the `held_formats` of the executor, where there is one.

    The reference executor holds everything in the model's type, and computes masked scores. The cpu
    executor computes in float32, keeps vectors in it, and quantizes the matrices that tokens are
    multiplied with. The cuda executor computes in the model's type, and quantizes those matrices
    and the head.
    """
    plain = PricedModel(
        spec=model.spec,
        ops=model.ops,
        activations=float_format(str(model.dtype)),
        weights=model.quantization,
        weight_formats=held or {},
        kv=None if kv_cache_dtype == "auto" else number_format(kv_cache_dtype),
        dense_attention=executor == "reference",
        adapter_elements=tuple(map(_elements, model.adapters)),
    )
    if executor == "cuda":
        return priced_as_cuda(plain)
    return priced_as_cpu(plain) if executor == "cpu" else plain


def priced_as_cpu(model: PricedModel) -> PricedModel:
    """A model in the formats that the cpu executor makes of its own."""
    own = model.activations
    return replace(
        model,
        activations=FLOAT32,
        weights=None,
        weight_formats=_cpu_formats(model, own, model.weights or own),
        kv=_with_scales(model.kv or own),
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


def priced_as_cuda(model: PricedModel) -> PricedModel:
    """A model in the formats that the cuda executor makes of its own."""
    from ridgeline.executors.cuda.formats import device_formats

    own = device_formats(model.ops, model.activations.name, model.weights)
    return replace(
        model,
        weights=None,
        weight_formats={**own, **model.weight_formats},
        kv=None if model.kv is None else _with_scales(model.kv),
    )


def _elements(adapter: Adapter) -> int:
    return sum(each.down.numel() + each.up.numel() for each in adapter.values())


def held_formats(executor: Executor, role: ModelRole) -> Mapping[str, NumberFormat]:
    """What an executor keeps quantized matrices in, by weight, those of the checkpoint included."""
    return executor.weight_formats(role) if isinstance(executor, PoolExecutor) else {}


def _with_scales(form: NumberFormat) -> NumberFormat:
    """Quantized KV has a float32 scale for each head of each token."""
    return replace(form, scale_bits=32) if form.is_quantized else form


def _cpu_formats(
    model: PricedModel, own: NumberFormat, quantized: NumberFormat
) -> dict[str, NumberFormat]:
    from ridgeline.executors.cpu.roles import held_format, padded

    formats = dict(model.weight_formats)  # those of the checkpoint stay as they are
    for op in reversed(model.ops):  # the head first: an embedding that is tied to it is as it is
        for weight in op_weights(op):
            layers = held_format(quantized, weight.shape[-1])
            form = _cpu_format(op, weight, own, quantized, layers)
            formats.setdefault(weight.name, padded(form))
    return formats


def _cpu_format(
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
