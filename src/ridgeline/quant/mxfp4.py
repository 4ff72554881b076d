"""MXFP4 as gpt-oss stores its experts: E2M1 codes, one E8M0 scale for 32 of them.

Of E experts with I inputs and O outputs:

- ``…_blocks`` uint8 [E, O, I/32, 16]: two codes a byte, the low nibble first.
- ``…_scales`` uint8 [E, O, I/32]: exponents, with a bias of 127.

Together they stand for the tensor ``…`` [E, I, O] of the unquantized checkpoint, which has inputs
before outputs. Source: gpt-oss ``torch/weights.py``; transformers ``integrations/mxfp4.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ridgeline.core.formats import NumberFormat
from ridgeline.models.config import ConfigReader
from ridgeline.quant.bits import unpack_nibbles
from ridgeline.quant.float4 import e2m1_table, e8m0_scales
from ridgeline.quant.scheme import Module, Read, StoragePlan, StoredWeight, TensorInfo, modules_with
from ridgeline.quant.tensor import QuantizedTensor

MXFP4_FORMAT = NumberFormat(name="mxfp4", bits=4, is_float=True, group_size=32, scale_bits=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class MXFP4:
    """The scheme has no settings."""

    @classmethod
    def read(cls, config: ConfigReader) -> "MXFP4":
        for name in ("dequantize", "modules_to_not_convert"):
            config.ignore(name)
        return cls()

    def plan(self, tensors: Mapping[str, TensorInfo], read: Read) -> StoragePlan:
        modules = modules_with(tensors, "_blocks")
        return StoragePlan(weights=[_weight(module) for module in modules])


def _weight(module: Module) -> StoredWeight:
    blocks = module.part("_blocks", "uint8", shape=(None, None, None, 16))
    experts, outputs, groups, _ = blocks
    module.part("_scales", "uint8", shape=(experts, outputs, groups))
    prefix = module.prefix

    def assemble(read: Read) -> QuantizedTensor:
        return QuantizedTensor(
            format=MXFP4_FORMAT,
            codes=unpack_nibbles(read(f"{prefix}_blocks")).reshape(-1, outputs, groups * 32),
            scales=e8m0_scales(read(f"{prefix}_scales")),
            table=e2m1_table(),
        )

    shape = (experts, groups * 32, outputs)
    return module.stored("", shape, assemble, transposed=True, by_expert=True)
