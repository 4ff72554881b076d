"""FP8 weights with scales that multiply: DeepSeek-V3's 128×128 blocks, and one scale a tensor.

Of a linear layer with I inputs and O outputs, ``weight`` float8 [O, I] and one of

- ``weight_scale_inv`` float32 [⌈O/128⌉, ⌈I/128⌉]: a scale for each block of ``weight_block_size``
  (despite its name it multiplies), or a single one;
- ``weight_scale`` float32, one number, or [O] or [O, 1].

w = code · scale. Source: DeepSeek-V3 ``inference/fp8_cast_bf16.py``; transformers
``integrations/finegrained_fp8.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ridgeline.core.arrays import FLOAT8S, FLOATS
from ridgeline.core.errors import CorruptFileError, UnsupportedModelError
from ridgeline.core.formats import NumberFormat
from ridgeline.core.rounding import ceil_div
from ridgeline.models.config import ConfigReader
from ridgeline.quant.float4 import e8m0_scales
from ridgeline.quant.scheme import (
    Module,
    Read,
    StoragePlan,
    StoredWeight,
    TensorInfo,
)
from ridgeline.quant.tensor import QuantizedTensor

_SCALE_DTYPES = (*FLOATS, "float8_e8m0fnu")
_SCALES = (".weight_scale_inv", ".weight_scale")
_ACTIVATION_SCALES = (".input_scale", ".activation_scale")
_CACHE_SCALES = (
    ".q_scale",
    ".k_scale",
    ".v_scale",
    ".kv_scale",
    ".k_proj.output_scale",
    ".v_proj.output_scale",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FP8Weights:
    """``block`` is rows by columns of a scale, ``None`` where a tensor has one or one a row."""

    block: tuple[int, int] | None

    @classmethod
    def read(cls, config: ConfigReader) -> "FP8Weights":
        if config.text("fmt", default="e4m3") not in ("e4m3", "float8_e4m3fn", "e5m2"):
            raise UnsupportedModelError("Only the FP8 formats e4m3 and e5m2 are supported.")
        for name in [
            "activation_scheme",
            "dequantize",
            "ignored_layers",
            "kv_cache_scheme",
            "modules_to_not_convert",
            "scale_fmt",
        ]:
            config.ignore(name)
        return cls(block=read_block(config, "weight_block_size"))

    def plan(self, tensors: Mapping[str, TensorInfo], read: Read) -> StoragePlan:
        plan = StoragePlan(notes=["Its activations are not quantized here: only weights are FP8."])
        for name, info in tensors.items():
            module = Module(tensors, name.removesuffix(".weight"))
            is_scaled = info.dtype in FLOAT8S or any(map(module.has, _SCALES))
            if name.endswith(".weight") and is_scaled:
                plan.weights.append(self._weight(module))
        note_unused_scales(plan, tensors)
        return plan

    def _weight(self, module: Module) -> StoredWeight:
        shape = module.part(".weight", *FLOAT8S, shape=(None, None))
        suffix = next((name for name in _SCALES if module.has(name)), _SCALES[0])
        return float8_weight(module, suffix, shape, self.block)


def read_block(config: ConfigReader, name: str) -> tuple[int, int] | None:
    """A block of rows by columns from a list of two numbers, or ``None``."""
    block = config.integers(name)
    if block is None:
        return None
    if len(block) != 2 or min(block) < 1:
        raise CorruptFileError(f"config.json must give quantization_config.{name} as two numbers.")
    return block[0], block[1]


def float8_weight(
    module: Module,
    suffix: str,
    shape: tuple[int, ...],
    block: tuple[int, int] | None,
    *,
    is_exponent: bool = False,
) -> StoredWeight:
    """Plan a float8 ``.weight`` with its scales under ``suffix``: blocks, rows or one number.

    ``is_exponent``: the scales are uint8 exponents.
    """
    outputs, inputs = shape
    found = module.part(suffix, *(("uint8",) if is_exponent else _SCALE_DTYPES))
    if found in ((), (1,), (1, 1)):
        rows, columns, grid = None, None, (1, 1)
    elif found in ((outputs,), (outputs, 1)):
        rows, columns, grid = 1, None, (outputs, 1)
    elif block is not None:
        rows, columns = block
        grid = (ceil_div(outputs, rows), ceil_div(inputs, columns))
    else:
        grid = (outputs, 1)
    if found not in ((), (1,), (outputs,)) and found != grid:
        raise module.mismatch(f"is {list(shape)}, and its scales are {list(found)[:8]}")
    prefix = module.prefix

    def assemble(read: Read) -> QuantizedTensor:
        codes, scales = read(f"{prefix}.weight"), read(prefix + suffix)
        scale_bits = scales.dtype.itemsize * 8
        if scale_bits == 8:
            scales = e8m0_scales(scales.view("uint8"))
        return QuantizedTensor(
            format=NumberFormat(
                name=codes.dtype.name,
                bits=8,
                is_float=True,
                group_size=columns,
                group_rows=rows,
                scale_bits=scale_bits,
            ),
            codes=codes,
            scales=scales.reshape(grid),
        )

    return module.stored(".weight", (outputs, inputs), assemble)


def note_unused_scales(plan: StoragePlan, tensors: Mapping[str, TensorInfo]) -> None:
    """Let scales of activations and of the KV cache be left over, and say so."""
    for suffixes, what in (
        (_ACTIVATION_SCALES, "Its scales of activations are not used"),
        (_CACHE_SCALES, "Its scales of attention are not used: the KV cache is not quantized"),
    ):
        names = [name for name in tensors if name.endswith(suffixes)]
        if names:
            plan.spare.update(names)
            plan.notes.append(f"{what} ({len(names)} tensors, such as {names[0][:80]!a}).")
