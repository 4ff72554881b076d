"""AWQ (Lin et al. 2023, arXiv 2306.00978) in AutoAWQ's ``gemm`` layout: 4 bits, zero points.

Of a linear layer with I inputs and O outputs, in G groups of inputs:

- ``qweight`` int32 [I, O/8] and ``qzeros`` int32 [G, O/8]: eight columns a word; nibble n, from
  the least significant, is column ``(0, 2, 4, 6, 1, 3, 5, 7)[n]`` of the eight.
- ``scales`` float16 [G, O].

w[o, i] = (code − zero) · scale. Source: AutoAWQ ``modules/linear/gemm.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ridgeline.core.arrays import FLOATS, Array
from ridgeline.core.errors import CorruptFileError, UnsupportedModelError
from ridgeline.core.formats import NumberFormat
from ridgeline.core.rounding import ceil_div
from ridgeline.models.config import ConfigReader, show
from ridgeline.quant.bits import unpack_words
from ridgeline.quant.scheme import (
    Module,
    Read,
    StoragePlan,
    StoredWeight,
    TensorInfo,
    modules_with,
)
from ridgeline.quant.tensor import QuantizedTensor

_NIBBLE_OF_COLUMN = (0, 4, 1, 5, 2, 6, 3, 7)
_INERT = """
backend do_fuse exllama_config fuse_max_seq_len modules_to_fuse modules_to_not_convert
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AWQ:
    """Settings of an AWQ checkpoint; ``group_size`` is ``None`` for one group."""

    group_size: int | None

    @classmethod
    def read(cls, config: ConfigReader) -> "AWQ":
        bits = config.integer("bits" if "bits" in config else "w_bit", maximum=64, default=4)
        if bits != 4:
            raise UnsupportedModelError(f"AWQ with {bits} bits is not supported; 4 bits are.")
        version = config.text("version", default=config.text("format", default="gemm"))
        if version.lower() != "gemm":
            raise UnsupportedModelError(
                f"AWQ weights in the layout {show(version)} are not supported; use a checkpoint of "
                "version gemm, or the unquantized one."
            )
        if not config.boolean("zero_point", default=True):
            raise UnsupportedModelError("AWQ without zero points is not supported.")
        name = "group_size" if "group_size" in config else "q_group_size"
        size = config.integer(name, minimum=-1, default=128)
        if size == 0:
            raise CorruptFileError("config.json gives quantization_config.group_size as 0.")
        for name in _INERT.split():
            config.ignore(name)
        return cls(group_size=None if size < 0 else size)

    @property
    def format(self) -> NumberFormat:
        """Of every weight."""
        return NumberFormat(
            name="uint4",
            bits=4,
            is_float=False,
            group_size=self.group_size,
            scale_bits=16,
            zero_bits=4,
        )

    def plan(self, tensors: Mapping[str, TensorInfo], read: Read) -> StoragePlan:
        modules = modules_with(tensors, ".qweight")
        return StoragePlan(weights=[self._weight(module) for module in modules])

    def _weight(self, module: Module) -> StoredWeight:
        inputs, words = module.part(".qweight", "int32", shape=(None, None))
        groups = ceil_div(inputs, self.group_size or max(inputs, 1))
        module.part(".qzeros", "int32", shape=(groups, words))
        module.part(".scales", *FLOATS, shape=(groups, words * 8))
        prefix = module.prefix

        def assemble(read: Read) -> QuantizedTensor:
            return QuantizedTensor(
                format=self.format,
                codes=np.ascontiguousarray(_columns(read(f"{prefix}.qweight")).T),
                scales=np.ascontiguousarray(read(f"{prefix}.scales").T),
                zeros=np.ascontiguousarray(_columns(read(f"{prefix}.qzeros")).T),
            )

        return module.stored(".weight", (words * 8, inputs), assemble)


def _columns(words: Array) -> Array:
    """Codes [N, O] of words [N, O/8], in the order of the columns."""
    nibbles = unpack_words(words, 4, words.shape[-1] * 8).reshape(*words.shape, 8)
    return nibbles[..., list(_NIBBLE_OF_COLUMN)].reshape(len(words), words.shape[-1] * 8)
