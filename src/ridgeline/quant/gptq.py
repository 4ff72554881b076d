"""GPTQ (Frantar et al. 2022, arXiv 2210.17323), as AutoGPTQ and GPTQModel store it.

Of a linear layer with I inputs and O outputs, in G groups of inputs and words of 32 bits:

- ``qweight`` int32 [I·bits/32, O]: codes, packed along the inputs (see `bits`).
- ``qzeros`` int32 [G, O·bits/32]: zero points, packed along the outputs. The format ``gptq`` (v1)
  stores each less one (with 2, 4 and 8 bits subtracted from whole words, so that a zero point of 0
  borrows from its neighbour); ``gptq_v2`` stores it as it is.
- ``scales`` float16 [G, O]; ``g_idx`` int32 [I]: the group of each input (act-order).

w[o, i] = (code[i, o] − zero[g(i), o]) · scale[g(i), o]. Source: GPTQModel
``nn_modules/qlinear``; the two formats, ``utils/model.py`` ``convert_gptq_v1_to_v2_format``.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ridgeline.core.arrays import FLOATS, Array
from ridgeline.core.errors import CorruptFileError, UnsupportedModelError
from ridgeline.core.formats import NumberFormat
from ridgeline.core.rounding import ceil_div
from ridgeline.models.config import ConfigReader, show
from ridgeline.quant.bits import unpack_words, words_for
from ridgeline.quant.scheme import (
    Module,
    Read,
    StoragePlan,
    StoredWeight,
    TensorInfo,
    modules_with,
)
from ridgeline.quant.tensor import QuantizedTensor

# How the quantizer worked, or which kernel is to run; the stored numbers say the rest.
_INERT = """
act_group_aware backend batch_size block_name_to_quantize cache_block_outputs damp_auto_increment
damp_percent dataset desc_act disable_exllama exllama_config hyb_act is_marlin_format lm_head
max_input_length meta model_file_base_name model_name_or_path model_seqlen
module_name_preceding_first_block modules_in_block_to_quantize mse pad_token_id static_groups sym
tokenizer true_sequential use_cuda_fp16 use_exllama
"""


_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}  # a one in every place of a word


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTQ:
    """Settings of a GPTQ checkpoint; ``group_size`` is ``None`` for one group."""

    bits: int
    group_size: int | None
    zeros_less_one: bool

    @classmethod
    def read(cls, config: ConfigReader) -> "GPTQ":
        bits = config.integer("bits", maximum=64)
        if bits not in (2, 3, 4, 8):
            raise UnsupportedModelError(f"GPTQ with {bits} bits is not supported; 2, 3, 4, 8 are.")
        size = config.integer("group_size", minimum=-1, default=128)
        if size == 0:
            raise CorruptFileError("config.json gives quantization_config.group_size as 0.")
        kind = config.text("checkpoint_format", default=config.text("format", default="gptq"))
        if kind not in ("gptq", "gptq_v2"):
            raise UnsupportedModelError(
                f"GPTQ weights in the format {show(kind)} are not supported; save the model in the "
                "format gptq, or load the unquantized checkpoint."
            )
        _check_dynamic(config)
        config.refuse("adapter")
        config.refuse("rotation")
        config.refuse("planar", unless=(False,))
        config.refuse("pack_dtype", unless=("int32",))
        for name in _INERT.split():
            config.ignore(name)
        return cls(bits=bits, group_size=None if size < 0 else size, zeros_less_one=kind == "gptq")

    @property
    def format(self) -> NumberFormat:
        """Of every weight."""
        return NumberFormat(
            name=f"uint{self.bits}",
            bits=self.bits,
            is_float=False,
            group_size=self.group_size,
            scale_bits=16,
            zero_bits=self.bits,
        )

    def plan(self, tensors: Mapping[str, TensorInfo], read: Read) -> StoragePlan:
        plan = StoragePlan()
        for module in modules_with(tensors, ".qweight"):
            plan.weights.append(self._weight(module))
            bias = f"{module.prefix}.bias"
            # AutoGPTQ gives every layer a bias, and fills those that the model lacks with zeros.
            if bias in tensors and tensors[bias].dtype in FLOATS and not read(bias).any():
                plan.spare.add(bias)
        return plan

    def _weight(self, module: Module) -> StoredWeight:
        words, outputs = module.part(".qweight", "int32", shape=(None, None))
        inputs = words * 32 // self.bits
        ordered = module.has(".g_idx")
        if ordered:
            (inputs,) = module.part(".g_idx", "int32", shape=(None,))
        if words_for(inputs, self.bits) != words:
            raise module.mismatch(f"has {words} rows of words, which do not hold {inputs} inputs")
        groups = ceil_div(inputs, self.group_size or max(inputs, 1))
        module.part(".scales", *FLOATS, shape=(groups, outputs))
        module.part(".qzeros", "int32", shape=(groups, words_for(outputs, self.bits)))
        prefix = module.prefix

        def assemble(read: Read) -> QuantizedTensor:
            words = read(f"{prefix}.qzeros")
            if self.zeros_less_one and self.bits != 3:
                words = words + np.int32(_ONES[self.bits])  # wraps, as it did when it was written
            zeros = np.ascontiguousarray(unpack_words(words, self.bits, outputs).T)
            if self.zeros_less_one and self.bits == 3:
                zeros = (zeros + 1) & 7
            order = None
            if ordered:
                order = group_order(read(f"{prefix}.g_idx"), self.group_size, groups)
            return QuantizedTensor(
                format=self.format,
                codes=unpack_words(read(f"{prefix}.qweight").T, self.bits, inputs),
                scales=np.ascontiguousarray(read(f"{prefix}.scales").T),
                zeros=zeros,
                group_of=order,
            )

        return module.stored(".weight", (outputs, inputs), assemble)


def _check_dynamic(config: ConfigReader) -> None:
    """Rules by module: which ones are left as they are the tensors say, too; other bits are not
    read."""
    rules = config.raw("dynamic")
    if isinstance(rules, Mapping) and all(name.startswith("-:") for name in rules):
        return
    config.refuse("dynamic", unless=([],))


def group_order(g_idx: Array, size: int | None, groups: int) -> Array | None:
    """The group of each input as int64, or ``None`` where they are in plain order.

    Raises:
        CorruptFileError: a group that there is not.
    """
    if not g_idx.size:
        return None
    if int(g_idx.min()) < 0 or int(g_idx.max()) >= groups:
        raise CorruptFileError(f"A g_idx names a group outside the {groups} that there are.")
    plain = np.arange(g_idx.size) // (size or g_idx.size)
    return None if np.array_equal(g_idx, plain) else g_idx.astype(np.int64)
