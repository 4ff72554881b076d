"""BitNet b1.58 (Ma et al. 2024, arXiv 2402.17764): matrices of −1, 0 and 1, each with a scale.

- ``weight`` uint8 [O/4, I]: byte i of a column holds the codes of rows i, i + O/4, i + O/2 and
  i + 3·O/4 in pairs of bits, the lowest first; a weight is its code less one.
- ``weight_scale`` [1] of any float: weights are multiplied by it (``linear_class``
  "autobitlinear") or divided by it ("bitlinear").

Source: transformers ``integrations/bitnet.py``. Activations are bytes with a scale for each token
there, and on the cpu executor with one for each 64 columns.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ridgeline.core.arrays import FLOATS, Array, cast
from ridgeline.core.errors import CorruptFileError, UnsupportedModelError
from ridgeline.core.formats import NumberFormat
from ridgeline.models.config import ConfigReader, show
from ridgeline.quant.scheme import (
    Module,
    Read,
    StoragePlan,
    StoredWeight,
    TensorInfo,
    modules_with,
)
from ridgeline.quant.tensor import QuantizedTensor

TERNARY = NumberFormat(name="ternary", bits=2, is_float=False, group_rows=None, scale_bits=16)
BITNET_CONFIG = {
    "quant_method": "bitnet",
    "linear_class": "autobitlinear",
    "quantization_mode": "offline",
    "modules_to_not_convert": ["lm_head"],
}
"""What ``config.json`` says of `ternary_parts`."""
_IN_A_BYTE = 4
_DIVIDES = {"bitlinear": True, "autobitlinear": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class BitNet:
    """``divides``: by the scales, and not times them."""

    divides: bool

    @classmethod
    def read(cls, config: ConfigReader) -> "BitNet":
        for name in ("modules_to_not_convert", "rms_norm_eps"):
            config.ignore(name)
        linear = config.text("linear_class", default="bitlinear")
        mode = config.text("quantization_mode", default="offline")
        if linear not in _DIVIDES or mode != "offline":
            raise UnsupportedModelError(
                f"BitNet weights of linear_class {show(linear)} and quantization_mode "
                f"{show(mode)} are not supported, but bitlinear and autobitlinear, offline: save "
                "the model with its weights packed."
            )
        if config.boolean("use_rms_norm", default=False):
            raise UnsupportedModelError(
                "BitNet weights with a norm in front of each (use_rms_norm) are not supported."
            )
        return cls(divides=_DIVIDES[linear])

    def plan(self, tensors: Mapping[str, TensorInfo], read: Read) -> StoragePlan:
        modules = modules_with(tensors, ".weight_scale")
        return StoragePlan(
            weights=[self._weight(module) for module in modules],
            notes=["Its activations have a scale for each token there, and not here."],
        )

    def _weight(self, module: Module) -> StoredWeight:
        quarter, inputs = module.part(".weight", "uint8", shape=(None, None))
        module.part(".weight_scale", *FLOATS, shape=(1,))
        prefix, outputs = module.prefix, quarter * _IN_A_BYTE

        def assemble(read: Read) -> QuantizedTensor:
            packed = read(f"{prefix}.weight")
            codes = np.empty((_IN_A_BYTE, quarter, inputs), dtype=np.uint8)
            for place, rows in enumerate(codes):
                np.bitwise_and(packed >> np.uint8(2 * place), np.uint8(3), out=rows)
            if codes.max(initial=0) > 2:
                raise CorruptFileError(
                    f"The weight {module} has other codes than those of −1, 0, 1."
                )
            scale = cast(read(f"{prefix}.weight_scale"), "float32").reshape(1, 1)
            with np.errstate(divide="ignore"):
                scale = 1 / scale if self.divides else scale
            return QuantizedTensor(
                format=TERNARY,
                codes=codes.reshape(outputs, inputs).view(np.int8) - np.int8(1),
                scales=scale,
            )

        return module.stored(".weight", (outputs, inputs), assemble)


def ternary_parts(codes_OI: Array, scale: Array) -> dict[str, Array]:
    """The tensors, by suffix, of codes −1, 0 and 1 that a scale multiplies; O in whole fours."""
    outputs, inputs = codes_OI.shape
    quarters = (codes_OI + 1).astype(np.uint8).reshape(_IN_A_BYTE, outputs // _IN_A_BYTE, inputs)
    places = (2 * np.arange(_IN_A_BYTE, dtype=np.uint8))[:, None, None]
    return {
        ".weight": np.bitwise_or.reduce(quarters << places, axis=0),
        ".weight_scale": cast(scale.reshape(1), "bfloat16"),
    }
