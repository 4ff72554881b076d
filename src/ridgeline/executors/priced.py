"""A model as the roofline prices it, with its weights as an executor stores them."""

from dataclasses import replace

from ridgeline.core.formats import (
    FLOAT32,
    NumberFormat,
    float_format,
    number_format,
    on_load_format,
)
from ridgeline.core.ops import (
    MLP,
    Embed,
    Head,
    LatentProject,
    MoE,
    OutProject,
    QKVProject,
    SharedExpert,
    Weight,
    op_weights,
)
from ridgeline.executors.model import ExecutorModel
from ridgeline.roofline import PricedModel

_PRODUCTS = (Embed, QKVProject, LatentProject, OutProject, MLP, MoE, SharedExpert, Head)


def priced_model(
    model: ExecutorModel,
    executor: str,
    *,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
) -> PricedModel:
    """What `price` takes.

    The reference executor holds everything in the model's type, and computes masked scores. The cpu
    executor computes in float32, keeps vectors in it, and quantizes the matrices that tokens are
    multiplied with.
    """
    plain = PricedModel(
        spec=model.spec,
        ops=model.ops,
        activations=float_format(str(model.dtype)),
        weights=None if quantization is None else on_load_format(quantization),
        kv=None if kv_cache_dtype == "auto" else number_format(kv_cache_dtype),
        dense_attention=executor == "reference",
    )
    return priced_as_cpu(plain) if executor == "cpu" else plain


def priced_as_cpu(model: PricedModel) -> PricedModel:
    """A model in the formats that the cpu executor makes of its own."""
    own = model.activations
    return replace(
        model,
        activations=FLOAT32,
        weights=None,
        weight_formats=_cpu_formats(model, own, model.weights or own),
        kv=_cpu_kv(model.kv or own),
        products_by_weight=True,
    )


def _cpu_kv(form: NumberFormat) -> NumberFormat:
    """The cpu executor's int8 KV has a float32 scale for each head of each token."""
    return replace(form, scale_bits=32) if form.is_quantized else form


def _cpu_formats(
    model: PricedModel, own: NumberFormat, quantized: NumberFormat
) -> dict[str, NumberFormat]:
    formats: dict[str, NumberFormat] = {}
    for op in model.ops:
        for weight in op_weights(op):
            form = FLOAT32
            if _is_matrix(weight):
                plain = isinstance(op, MoE) and weight == op.router
                form = quantized if isinstance(op, _PRODUCTS) and not plain else own
            formats.setdefault(weight.name, form)
    return formats


def _is_matrix(weight: Weight) -> bool:
    return len(weight.shape) > 1 and not weight.name.endswith(("_bias", "_norm"))
