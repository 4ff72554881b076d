"""How compressed-tensors stores one weight: integers packed or not, and four-bit floats.

The layouts are in `compressed_tensors`. Signed codes with zero points are shifted by 2^(bits−1), so
that both are unsigned; without zero points they stay signed.
"""

import numpy as np

from ridgeline.core.arrays import FLOATS, Array
from ridgeline.core.errors import CorruptFileError, UnsupportedModelError
from ridgeline.core.formats import NumberFormat
from ridgeline.core.rounding import ceil_div
from ridgeline.quant.bits import unpack_nibbles, unpack_words, words_for
from ridgeline.quant.compressed_tensors_config import WeightArgs
from ridgeline.quant.float4 import e2m1_table, e8m0_scales
from ridgeline.quant.gptq import group_order
from ridgeline.quant.scheme import Module, Read, StoredWeight
from ridgeline.quant.tensor import QuantizedTensor

_MAX_EXTENT = 2**31


def packed_weight(module: Module, args: WeightArgs, read: Read) -> StoredWeight:
    """Plan a weight of ``pack-quantized``."""
    rows, words = module.part(".weight_packed", "int32", shape=(None, None))
    module.part(".weight_shape", "int64", "int32", shape=(2,))
    outputs, inputs = (int(n) for n in read(f"{module.prefix}.weight_shape"))
    if not 0 <= inputs < _MAX_EXTENT or outputs != rows or words_for(inputs, args.bits) != words:
        raise module.mismatch(
            f"has a weight_shape of [{outputs}, {inputs}], which its packed shape "
            f"[{rows}, {words}] of {args.bits} bits does not hold"
        )
    grid = _scale_grid(module, args, outputs, inputs)
    if not args.symmetric:
        packed = (words_for(outputs, args.bits), grid[1])
        module.part(".weight_zero_point", "int32", shape=packed)
    ordered = module.has(".weight_g_idx")
    if ordered:
        module.part(".weight_g_idx", "int32", shape=(inputs,))
    prefix, bits = module.prefix, args.bits

    def assemble(read: Read) -> QuantizedTensor:
        codes, zeros = unpack_words(read(f"{prefix}.weight_packed"), bits, inputs), None
        if args.symmetric:
            codes = (codes - np.uint8(1 << (bits - 1))).view("int8")  # wraps around
        else:
            zeros = unpack_words(read(f"{prefix}.weight_zero_point").T, bits, outputs)
            zeros = np.ascontiguousarray(zeros.T)
        order = None
        if ordered:
            g_idx = read(f"{prefix}.weight_g_idx")
            order = None if (g_idx == -1).all() else group_order(g_idx, args.group_size, grid[1])
        scales = read(f"{prefix}.weight_scale")
        return QuantizedTensor(
            format=_integers(args, scales),
            codes=codes,
            scales=scales.reshape(grid),
            zeros=zeros,
            group_of=order,
        )

    return module.stored(".weight", (outputs, inputs), assemble)


def integer_weight(module: Module, args: WeightArgs) -> StoredWeight:
    """Plan an int8 weight, one code a byte whatever its bits."""
    outputs, inputs = module.part(".weight", "int8", shape=(None, None))
    grid = _scale_grid(module, args, outputs, inputs)
    if not args.symmetric:
        found = module.part(".weight_zero_point", "int8")
        if not _is_grid(found, grid):
            raise module.mismatch(f"has zero points of the shape {list(found)[:8]}")
    prefix = module.prefix

    def assemble(read: Read) -> QuantizedTensor:
        codes, zeros = read(f"{prefix}.weight"), None
        if not args.symmetric:
            codes = _unsigned(codes)
            zeros = _unsigned(read(f"{prefix}.weight_zero_point")).reshape(grid)
        scales = read(f"{prefix}.weight_scale")
        return QuantizedTensor(
            format=_integers(args, scales), codes=codes, scales=scales.reshape(grid), zeros=zeros
        )

    return module.stored(".weight", (outputs, inputs), assemble)


def float4_weight(module: Module, args: WeightArgs) -> StoredWeight:
    """Plan a weight of ``nvfp4-pack-quantized`` or ``mxfp4-pack-quantized``."""
    size, is_mx = args.group_size, args.format == "mxfp4-pack-quantized"
    if args.bits != 4 or size is None or not args.symmetric:
        raise UnsupportedModelError("Packed floats are supported with 4 bits and groups only.")
    outputs, half = module.part(".weight_packed", "uint8", shape=(None, None))
    grid = (outputs, ceil_div(half * 2, size))
    module.part(".weight_scale", "uint8" if is_mx else "float8_e4m3fn", shape=grid)
    if not is_mx:
        module.part(".weight_global_scale", "float32", shape=(1,))
    prefix = module.prefix

    def assemble(read: Read) -> QuantizedTensor:
        scales = read(f"{prefix}.weight_scale")
        if is_mx:
            scales = e8m0_scales(scales)
        else:
            divisor = read(f"{prefix}.weight_global_scale")
            if not np.isfinite(divisor).all() or not divisor.all():
                raise CorruptFileError("A weight_global_scale is zero or not finite.")
            scales = scales.astype(np.float32) / divisor
        name = "mxfp4" if is_mx else "nvfp4"
        return QuantizedTensor(
            format=NumberFormat(name=name, bits=4, is_float=True, group_size=size, scale_bits=8),
            codes=unpack_nibbles(read(f"{prefix}.weight_packed")),
            scales=scales,
            table=e2m1_table(),
        )

    return module.stored(".weight", (outputs, half * 2), assemble)


def _scale_grid(module: Module, args: WeightArgs, outputs: int, inputs: int) -> tuple[int, int]:
    """Rows and columns of the scales, once they are known to have that many."""
    rows, columns = _block(args)
    grid = (ceil_div(outputs, rows or max(outputs, 1)), ceil_div(inputs, columns or max(inputs, 1)))
    found = module.part(".weight_scale", *FLOATS)
    if not _is_grid(found, grid):
        raise module.mismatch(f"has scales {list(found)[:8]}, and its strategy needs {list(grid)}")
    return grid


def _is_grid(shape: tuple[int, ...], grid: tuple[int, int]) -> bool:
    """Whether a tensor is of that shape; one column, or one number, may come with fewer axes."""
    return shape == grid or (shape, 1) == ((grid[0],), grid[1]) or (shape, grid) == ((), (1, 1))


def _block(args: WeightArgs) -> tuple[int | None, int | None]:
    """Rows and columns of a scale."""
    if args.strategy == "tensor":
        return None, None
    return args.block or (1, args.group_size)


def _integers(args: WeightArgs, scales: Array) -> NumberFormat:
    rows, columns = _block(args)
    stored_bits = args.bits if args.format == "pack-quantized" else 8
    return NumberFormat(
        name=f"{'' if args.symmetric else 'u'}int{args.bits}",
        bits=stored_bits,
        is_float=False,
        group_size=columns,
        group_rows=rows,
        scale_bits=scales.dtype.itemsize * 8,
        zero_bits=0 if args.symmetric else stored_bits,
    )


def _unsigned(values: Array) -> Array:
    """Signed bytes plus 128, as unsigned ones."""
    return values.view("uint8") ^ np.uint8(128)
