"""bitsandbytes: NF4 and FP4 (Dettmers et al. 2023, arXiv 2305.14314), and 8 bits (LLM.int8).

Four bits. A weight of N elements, row by row, in blocks of B (``blocksize``, usually 64):

- ``weight`` [N/2, 1] of bytes (uint8, or another dtype of the same bytes): two codes a byte, the
  high nibble first.
- ``weight.quant_map`` float32 [16]: what each code stands for.
- ``weight.absmax`` float32 [N/B]: the scales; or, with double quantization, uint8 codes into
  ``weight.nested_quant_map`` float32 [256], with ``weight.nested_absmax`` float32 [N/B/B2] as their
  scales and ``nested_offset`` added to all.
- ``weight.quant_state.bitsandbytes__nf4`` uint8: JSON with shape, blocksize, dtype, quant_type, and
  nested_blocksize, nested_dtype and nested_offset.

Eight bits: ``weight`` int8 [O, I], ``SCB`` float32 [O], ``weight_format`` uint8 (0: by rows);
w = code · SCB / 127. Source: bitsandbytes ``functional.py`` ``QuantState.as_dict``,
``nn/modules.py``.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ridgeline.core.arrays import FLOATS, numpy_dtype
from ridgeline.core.errors import CorruptFileError, UnsupportedModelError
from ridgeline.core.formats import NumberFormat
from ridgeline.core.rounding import ceil_div
from ridgeline.models.config import ConfigReader
from ridgeline.quant.bits import unpack_nibbles
from ridgeline.quant.scheme import (
    Module,
    Read,
    StoragePlan,
    StoredWeight,
    TensorInfo,
    modules_with,
)
from ridgeline.quant.tensor import QuantizedTensor

_STATE = ".quant_state.bitsandbytes__"
_BYTES = ("uint8", "int8", *FLOATS)
_MAX_STATE_BYTES = 1 << 16
_INERT = """
_load_in_4bit _load_in_8bit bnb_4bit_compute_dtype bnb_4bit_quant_storage bnb_4bit_quant_type
bnb_4bit_use_double_quant llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight
llm_int8_skip_modules llm_int8_threshold load_in_4bit load_in_8bit modules_to_not_convert
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BitsAndBytes:
    """The tensors say it all; the config only says how they came to be."""

    @classmethod
    def read(cls, config: ConfigReader) -> "BitsAndBytes":
        for name in _INERT.split():
            config.ignore(name)
        return cls()

    def plan(self, tensors: Mapping[str, TensorInfo], read: Read) -> StoragePlan:
        plan = StoragePlan()
        for kind in ("nf4", "fp4"):
            for module in modules_with(tensors, f".weight{_STATE}{kind}"):
                plan.weights.append(_four_bit(module, kind, read))
        for module in modules_with(tensors, ".SCB"):
            plan.weights.append(_eight_bit(module, read))
        if modules_with(tensors, ".SCB"):
            plan.notes.append("Its activations are not quantized here: only weights are 8 bit.")
        return plan


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """The JSON of a weight: its shape, and how many elements share a scale."""

    shape: tuple[int, int]
    blocksize: int
    nested_blocksize: int | None
    nested_offset: float


def _four_bit(module: Module, kind: str, read: Read) -> StoredWeight:
    state = _read_state(module, f".weight{_STATE}{kind}", read)
    outputs, inputs = state.shape
    count = outputs * inputs
    shape = module.part(".weight", *_BYTES)
    dtype = module.tensors[f"{module.prefix}.weight"].dtype
    assert dtype is not None
    if math.prod(shape) * numpy_dtype(dtype).itemsize * 2 != count:
        raise module.mismatch(f"is {list(state.shape)}, and its codes are {list(shape)[:8]}")
    rows, columns = _block(module, state)
    blocks = count // state.blocksize
    nested = state.nested_blocksize
    module.part(".weight.quant_map", "float32", shape=(16,))
    module.part(".weight.absmax", "uint8" if nested else "float32", shape=(blocks,))
    if nested:
        module.part(".weight.nested_quant_map", "float32", shape=(256,))
        module.part(".weight.nested_absmax", "float32", shape=(ceil_div(blocks, nested),))
    prefix = f"{module.prefix}.weight"

    def assemble(read: Read) -> QuantizedTensor:
        scales = read(f"{prefix}.absmax")
        if nested:
            outer = np.repeat(read(f"{prefix}.nested_absmax"), nested)[:blocks]
            table = read(f"{prefix}.nested_quant_map")
            scales = table[scales] * outer + np.float32(state.nested_offset)
        data = read(prefix).reshape(-1).view("uint8")
        return QuantizedTensor(
            format=NumberFormat(
                name=kind,
                bits=4,
                is_float=True,
                group_size=columns,
                group_rows=rows,
                scale_bits=8 + 32 / nested if nested else 32,
            ),
            codes=unpack_nibbles(data, high_first=True).reshape(outputs, inputs),
            scales=scales.reshape(outputs // rows, inputs // columns),
            table=read(f"{prefix}.quant_map"),
        )

    return module.stored(".weight", (outputs, inputs), assemble)


def _block(module: Module, state: _State) -> tuple[int, int]:
    """Rows and columns of a block, which must fill rows evenly or be filled by them."""
    (outputs, inputs), size = state.shape, state.blocksize
    if inputs and inputs % size == 0:
        return 1, size
    if inputs and size % inputs == 0 and outputs % (size // inputs) == 0:
        return size // inputs, inputs
    raise UnsupportedModelError(
        f"The weight {module} has rows of {inputs} elements, which its blocks of {size} do not "
        "fill; load the unquantized checkpoint instead."
    )


def _read_state(module: Module, suffix: str, read: Read) -> _State:
    (size,) = module.part(suffix, "uint8", shape=(None,))
    if size > _MAX_STATE_BYTES:
        raise CorruptFileError(f"The quantization state of {module} has {size} bytes.")
    try:
        fields = json.loads(bytes(read(module.prefix + suffix).tolist()))
    except (ValueError, RecursionError):
        raise CorruptFileError(f"The quantization state of {module} is not JSON.") from None
    if not isinstance(fields, dict):
        raise CorruptFileError(f"The quantization state of {module} is not an object.")
    state = ConfigReader(fields, prefix="quant_state.")
    shape = state.integers("shape")
    if shape is None or len(shape) != 2:
        raise CorruptFileError(f"The quantization state of {module} has no shape of two numbers.")
    nested = state.optional_integer("nested_blocksize", maximum=2**16, default=None)
    return _State(
        shape=(shape[0], shape[1]),
        blocksize=state.integer("blocksize", maximum=2**16),
        nested_blocksize=nested,
        nested_offset=state.number("nested_offset", minimum=-1e30, default=0.0),
    )


def _eight_bit(module: Module, read: Read) -> StoredWeight:
    outputs, inputs = module.part(".weight", "int8", shape=(None, None))
    module.part(".SCB", "float32", shape=(outputs,))
    if module.has(".weight_format"):
        module.part(".weight_format", "uint8", "int8", "int64", shape=())
        if int(read(f"{module.prefix}.weight_format")):
            raise UnsupportedModelError(
                f"The weight {module} is in a layout made for one GPU; save it again with a newer "
                "bitsandbytes, or load the unquantized checkpoint."
            )
    prefix = module.prefix

    def assemble(read: Read) -> QuantizedTensor:
        return QuantizedTensor(
            format=NumberFormat(name="int8", bits=8, is_float=False, scale_bits=32),
            codes=read(f"{prefix}.weight"),
            scales=read(f"{prefix}.SCB").reshape(outputs, 1) / 127,
        )

    return module.stored(".weight", (outputs, inputs), assemble)
