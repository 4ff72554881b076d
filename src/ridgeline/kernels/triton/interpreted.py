"""Triton's interpreter, with what is wrong in it corrected (seen in Triton 3.6).

* Conversions to float8 lose the carry where a mantissa rounds up to the next power of two, those to
  bfloat16 cut: PyTorch's are used instead.
* bfloat16 numbers are held as integers of their bits, which `tl.dot`, arithmetic and conversions
  from integers take for the numbers. `tl.fma` rounds its product.
* Loop bounds that are tensors go through a conversion that NumPy has refused since 2.4.
* The language is patched again at each call of a function within a kernel, which takes longer than
  what the function does.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl
from triton.runtime import interpreter

from ridgeline.kernels.triton.launch import is_interpreted

_TORCH = {
    tl.float64: torch.float64,
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
_BITS = {8: torch.uint8, 16: torch.uint16, 32: torch.int32, 64: torch.int64}


def correct_interpreter() -> None:
    """Replace the functions that are wrong; does nothing where kernels are compiled."""
    if not is_interpreted():
        return
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch
    interpreter._patch_lang = _PatchOnce(interpreter._patch_lang)
    interpreter._convert_float = _convert
    builder = interpreter.InterpreterBuilder
    builder.create_dot = _dot
    cast, binary = builder.cast_impl, builder.binary_op

    def cast_through_float32(self: Any, source: Any, to: Any) -> Any:
        if to.scalar != tl.bfloat16 or source.dtype.scalar in _TORCH:
            return cast(self, source, to)
        values = source.data.astype(np.float32)
        return interpreter.TensorHandle(_convert(values, tl.float32, tl.bfloat16), tl.bfloat16)

    def binary_in_float32(self: Any, left: Any, right: Any, op: Any) -> Any:
        if left.dtype.scalar != tl.bfloat16:
            return binary(self, left, right, op)
        found = op(*(_wide(operand) for operand in (left, right)))
        if found.dtype != np.float32:  # a comparison
            return interpreter.TensorHandle(found, tl.int1)
        return interpreter.TensorHandle(_convert(found, tl.float32, tl.bfloat16), tl.bfloat16)

    def bfloat16_constant(_self: Any, value: float) -> Any:
        bits = _convert(np.array([value], dtype=np.float32), tl.float32, tl.bfloat16)
        return interpreter.TensorHandle(bits, tl.bfloat16)

    builder.cast_impl, builder.binary_op = cast_through_float32, binary_in_float32
    builder.create_fma = _fma
    builder.get_bf16 = bfloat16_constant


class _PatchOnce:
    """`_patch_lang`, but once for each module of the language while a kernel runs."""

    def __init__(self, patch_lang: Any) -> None:
        self._patch_lang = patch_lang
        self._patched: set[tuple[bool, ...]] = set()

    def __call__(self, function: Any) -> "_Outermost | None":
        known = list(function.__globals__.values())
        modules = tuple(any(value is module for value in known) for module in (tl, tl.core))
        if modules in self._patched:
            return None
        is_outermost = not self._patched
        self._patched.add(modules)
        scope = self._patch_lang(function)
        return _Outermost(scope, self._patched) if is_outermost else None


class _Outermost:
    """The scope of a kernel, at whose end the language is as it was."""

    def __init__(self, scope: Any, patched: set[tuple[bool, ...]]) -> None:
        self._scope, self._patched = scope, patched

    def restore(self) -> None:
        self._patched.clear()
        self._scope.restore()


def _convert(
    values: npt.NDArray[Any], kind: Any, to: Any, _rounding: Any = None
) -> npt.NDArray[Any]:
    """The bits of ``values``, of Triton's type ``kind``, in its type ``to``."""
    source = torch.from_numpy(np.ascontiguousarray(values).view(f"u{values.itemsize}"))
    found = source.view(_TORCH[kind]).to(_TORCH[to])
    bits = found.view(_BITS[to.primitive_bitwidth]).numpy()
    return bits.view(f"u{bits.itemsize}").reshape(values.shape)


def _wide(operand: Any) -> npt.NDArray[Any]:
    """An operand's values; those of floats in float32."""
    if operand.dtype.scalar not in _TORCH:
        return operand.data  # type: ignore[no-any-return]
    return _convert(operand.data, operand.dtype.scalar, tl.float32).view(np.float32)


def _fma(_self: Any, x: Any, y: Any, z: Any) -> Any:
    """x · y + z, rounded once but for what float32 rounds before bfloat16."""
    kind = z.dtype.scalar
    if kind != tl.bfloat16:
        found = x.data.astype(np.float64) * y.data + z.data
        return interpreter.TensorHandle(found.astype(z.data.dtype), kind)
    wide = (_wide(operand).astype(np.float64) for operand in (x, y, z))
    first, second, third = wide
    found = (first * second + third).astype(np.float32)
    return interpreter.TensorHandle(_convert(found, tl.float32, kind), kind)


def _dot(_self: Any, a: Any, b: Any, d: Any, *_precision: Any) -> Any:
    """a · b + d in d's type."""
    product = np.matmul(_wide(a), _wide(b), dtype=d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)
