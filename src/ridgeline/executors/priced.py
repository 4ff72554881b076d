"""A model as the roofline prices it, with its weights as an executor stores them."""

from collections.abc import Mapping

from ridgeline.core.formats import NumberFormat, float_format
from ridgeline.core.kv_formats import kv_number_format
from ridgeline.executors.model import ExecutorModel
from ridgeline.executors.registry import executor_traits
from ridgeline.roofline import PricedModel
from ridgeline.weights import Adapter


def priced_model(
    model: ExecutorModel,
    executor: str,
    *,
    kv_cache_dtype: str = "auto",
    held: Mapping[str, NumberFormat] | None = None,
) -> PricedModel:
    """What `price` takes; ``held`` are the `weight_formats` of the executor, where there is one.

    The reference executor holds everything in the model's type, and computes masked scores. The cpu
    executor computes in float32, keeps vectors in it, and quantizes the matrices that tokens are
    multiplied with. The cuda executor computes in the model's type, and quantizes those matrices
    and the head.
    """
    traits = executor_traits(executor)
    return traits.priced(
        PricedModel(
            spec=model.spec,
            ops=model.ops,
            activations=float_format(model.dtype),
            weights=model.quantization,
            weight_formats=held or {},
            kv=kv_number_format(kv_cache_dtype),
            dense_attention=traits.dense_attention,
            adapter_elements=tuple(map(_elements, model.adapters)),
        )
    )


def _elements(adapter: Adapter) -> int:
    return sum(each.down.size + each.up.size for each in adapter.values())
