"""Number formats of weights: packing and unpacking, and the schemes in which they lie on disk."""

from ridgeline.quant.gguf_tensor import GGUFBlocks
from ridgeline.quant.registry import quant_methods, read_scheme
from ridgeline.quant.scheme import Scheme, StoragePlan, StoredWeight, TensorInfo
from ridgeline.quant.tensor import QuantizedTensor, stack

__all__ = [
    "GGUFBlocks",
    "QuantizedTensor",
    "Scheme",
    "StoragePlan",
    "StoredWeight",
    "TensorInfo",
    "quant_methods",
    "read_scheme",
    "stack",
]
