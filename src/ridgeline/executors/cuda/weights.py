"""A model's weights on the device: read one after the other, stacked, quantized and packed.

Reading, copying and quantizing overlap; see `ridgeline.executors.cuda.upload`.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ridgeline.core.arrays import Array
from ridgeline.core.errors import OutOfMemoryError, SettingsError
from ridgeline.core.formats import NumberFormat, number_format
from ridgeline.core.op_facts import Role
from ridgeline.core.weight_uses import weight_roles
from ridgeline.executors.cuda.device import Device
from ridgeline.executors.cuda.formats import (
    PACKED,
    device_head_format,
    stacks,
    weights_bytes,
)
from ridgeline.executors.cuda.upload import Uploads
from ridgeline.executors.model import ExecutorModel
from ridgeline.kernels.tensors import as_tensor, torch_dtype
from ridgeline.kernels.triton import DeviceMatrix, fp8_matrix, pack_matrix, quantize_matrix
from ridgeline.quant import GGUFBlocks, QuantizedTensor
from ridgeline.weights import CheckpointWeights, Weight

_log = logging.getLogger(__name__)

_Part = torch.Tensor | QuantizedTensor | GGUFBlocks  # values are on the device


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWeights:
    """By canonical name; a stack goes by the name of its first part.

    ``tensors`` are what no product packs: tables, norms, biases, routers. ``formats`` are those of
    quantized matrices, by the name of each part.
    """

    matrices: dict[str, DeviceMatrix] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    formats: dict[str, NumberFormat] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes on the device; a tied table that is not quantized counts once."""
        parts = [*self.tensors.values()]
        for matrix in self.matrices.values():
            parts += [t for t in (matrix.codes, matrix.scales, matrix.zeros) if t is not None]
        return sum({part.data_ptr(): part.nbytes for part in parts}.values())


def load_weights(device: Device, model: ExecutorModel, *, memory_share: float) -> DeviceWeights:
    """Stream every weight to the device; there is never more than a stack beside what is kept,
    and the buffers of `Uploads`.

    Weights that are quantized already keep their codes and scales where the kernels have a layout
    for them; the others are expanded to the model's type, which the log says once.

    Raises:
        SettingsError: the model is to be quantized and is already, or cannot be.
        OutOfMemoryError: they do not fit; says what helps.
    """
    _check_room(device, model, memory_share)
    loader = _Loader(device, model)
    try:
        for name, weight in model.weights.items():
            loader.add(name, weight)
            del weight  # before the next one is read
    except torch.OutOfMemoryError:
        raise _too_large(device, model, memory_share) from None
    assert not loader.parts, f"no more came of {sorted(loader.parts)}"
    if loader.expanded:
        counted = ", ".join(f"{n} of {name}" for name, n in sorted(loader.expanded.items()))
        _log.warning(
            "The cuda executor expands %d quantized weights to %s, having no kernel for their "
            "layout (%s).",
            loader.expanded.total(),
            model.dtype,
            counted,
        )
    return loader.weights


class _Loader:
    """Keeps weights as they come; parts of a stack wait for the others."""

    def __init__(self, device: Device, model: ExecutorModel) -> None:
        self.weights = DeviceWeights()
        self.parts: dict[str, dict[str, _Part]] = {}
        self.expanded = Counter[str]()
        self._model = model
        self._uploads = Uploads(device)
        self._roles, self._stacks = weight_roles(model.ops), stacks(model.ops)

    def add(self, name: str, weight: Weight) -> None:
        self._model.check_not_quantized_twice(weight)
        part: _Part
        if isinstance(weight, QuantizedTensor | GGUFBlocks):
            part = weight
        else:
            part = self._uploads.send(as_tensor(weight), torch_dtype(self._model.dtype))
        names = self._stacks.get(name, (name,))
        parts = self.parts.setdefault(names[0], {})
        parts[name] = part
        if len(parts) == len(names):
            del self.parts[names[0]]
            self._keep(names, self._roles[name], [parts[each] for each in names])

    def _keep(self, names: Sequence[str], roles: frozenset[Role], parts: list[_Part]) -> None:
        name, multiplies = names[0], bool(roles & PACKED)
        if not multiplies or Role.TABLE in roles:
            self.weights.tensors[name] = self._values(parts, roles)
        if not multiplies:
            return
        matrix = self._packed_codes(parts)
        form = _format_of(parts)
        if matrix is None:
            values = self.weights.tensors.get(name)
            if values is None:
                values = self._values(parts, roles)
            form = self._format(roles)
            matrix = packed(values, form)
        self.weights.matrices[name] = matrix
        if form is not None:
            self.weights.formats.update(dict.fromkeys(names, form))

    def _values(self, parts: list[_Part], roles: frozenset[Role]) -> torch.Tensor:
        """The parts in the model's type, one above the other."""
        values = [self._value(part) for part in parts]
        axis = -2 if Role.PRODUCT in roles else -1
        return values[0] if len(values) == 1 else torch.cat(values, dim=axis)

    def _value(self, part: _Part) -> torch.Tensor:
        if isinstance(part, torch.Tensor):  # sent as it came
            return part
        self.expanded[part.format.name] += 1
        return self._uploads.send(as_tensor(part.dequantize(self._model.dtype)))

    def _packed_codes(self, parts: list[_Part]) -> DeviceMatrix | None:
        """A matrix of the parts' own codes; ``None`` if they are values, or lack a layout."""
        quantized = [part for part in parts if isinstance(part, QuantizedTensor)]
        joined = _joined(quantized) if len(quantized) == len(parts) else None
        matrix = None if joined is None else pack_matrix(joined)
        return None if matrix is None else self._sent(matrix)

    def _sent(self, matrix: DeviceMatrix) -> DeviceMatrix:
        def sent(part: torch.Tensor | None) -> torch.Tensor | None:
            return None if part is None else self._uploads.send(part)

        return replace(
            matrix,
            codes=self._uploads.send(matrix.codes),
            scales=sent(matrix.scales),
            zeros=sent(matrix.zeros),
        )

    def _format(self, roles: frozenset[Role]) -> NumberFormat | None:
        form = self._model.quantization
        return device_head_format(form) if form is not None and Role.HEAD in roles else form


def packed(values: torch.Tensor, form: NumberFormat | None) -> DeviceMatrix:
    """A matrix, or a stack of experts', as it is or quantized to a format of `core.formats`.

    Raises:
        SettingsError: its columns are not whole groups of the format.
    """
    if form is None:
        matrix = pack_matrix(values)
        assert matrix is not None, "values have a layout"
        return matrix
    if form.name == "fp8":
        return fp8_matrix(values)
    columns = values.shape[-1]
    if columns % (form.group_size or 1):
        raise SettingsError(
            f"A matrix with {columns} columns has no whole groups of {form.group_size}, and so no "
            f"{form.name} on a GPU; use int8 or fp8."
        )
    return quantize_matrix(values, bits=int(form.bits), group=form.group_size)


def _format_of(parts: Sequence[_Part]) -> NumberFormat | None:
    """That of weights which are quantized on disk."""
    first = parts[0]
    return first.format if isinstance(first, QuantizedTensor) else None


def _joined(parts: Sequence[QuantizedTensor]) -> QuantizedTensor | None:
    """Quantized matrices one above the other; ``None`` where they are not quantized alike."""
    first = parts[0]
    if len(parts) == 1:
        return first
    by_row = [_scales_by_row(part) for part in parts]
    alike = all(
        part.format == by_row[0].format
        and part.codes.dtype == first.codes.dtype
        and part.scales.shape[-1] == by_row[0].scales.shape[-1]
        and part.table is None
        and part.group_of is None
        and (part.zeros is None) == (first.zeros is None)
        for part in by_row
    )
    if not alike:
        return None
    zeros = [part.zeros for part in by_row if part.zeros is not None]
    return replace(
        by_row[0],
        codes=np.concatenate([part.codes for part in by_row], axis=-2),
        scales=np.concatenate([part.scales for part in by_row], axis=-2),
        zeros=np.concatenate(zeros, axis=-2) if zeros else None,
    )


def _scales_by_row(weight: QuantizedTensor) -> QuantizedTensor:
    """The same with scales and zero points for each row, where blocks have several."""
    block_rows, rows = weight.block[0], weight.shape[-2]
    if block_rows == 1:
        return weight

    def spread(blocks: Array) -> Array:
        return np.repeat(blocks, block_rows, axis=-2)[..., :rows, :]

    return replace(
        weight,
        format=replace(weight.format, group_rows=1),
        scales=spread(weight.scales),
        zeros=None if weight.zeros is None else spread(weight.zeros),
    )


def _check_room(device: Device, model: ExecutorModel, share: float) -> None:
    memory = device.memory()
    room = memory.total * share - (memory.total - memory.free)
    source = model.weights
    is_packed = isinstance(source, CheckpointWeights) and source.quantization is not None
    # A packed one is not known before it is read; it is seen in time.
    if not is_packed and _needed(model, model.quantization) > room:
        raise _too_large(device, model, share)


def _needed(model: ExecutorModel, quantization: NumberFormat | None) -> int:
    return weights_bytes(model.ops, model.dtype, quantization)


def _too_large(device: Device, model: ExecutorModel, share: float) -> OutOfMemoryError:
    memory = device.memory()
    form = model.quantization.name if model.quantization else model.dtype
    smaller = ", ".join(
        f"{_needed(model, other) / 1e9:.1f} GB with --quantization {other.name}"
        for other in _smaller(model.quantization)
    )
    return OutOfMemoryError(
        f"The weights take {_needed(model, model.quantization) / 1e9:.1f} GB in {form}, and "
        f"{device.name} has {memory.free / 1e9:.1f} of {memory.total / 1e9:.1f} GB free, of which "
        f"gpu_memory_utilization {share:g} leaves "
        f"{max(0.0, memory.total * share - memory.total + memory.free) / 1e9:.1f} GB"
        + (f"; they take {smaller}." if smaller else ".")
    )


def _smaller(quantization: NumberFormat | None) -> list[NumberFormat]:
    """Formats that would take less."""
    bits = 16.0 if quantization is None else quantization.bits
    return [form for form in map(number_format, ("int8", "int4")) if form.bits < bits]
