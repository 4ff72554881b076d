"""A checkpoint with quantized weights, seen as the unquantized one that it stands for.

A weight that is stored in parts (codes, scales, …) appears as one float tensor under the name that
it would have unquantized; the parts do not appear. All else passes through.
"""

import logging
from collections.abc import Callable

from ridgeline.core.arrays import Array, empty
from ridgeline.core.errors import CorruptFileError, UnsupportedModelError
from ridgeline.quant import QuantizedTensor, Scheme, StoredWeight, TensorInfo
from ridgeline.weights.names import short_name
from ridgeline.weights.store import TensorStore

_MAX_SMALL_BYTES = 1 << 24  # of a tensor that is read while planning: a bias, a shape
_log = logging.getLogger(__name__)


class QuantizedCheckpoint:
    """The tensors of ``checkpoint``, which it neither owns nor closes, after ``scheme``.

    Raises:
        WeightsMismatchError: parts of a weight are missing or do not fit together.
        UnsupportedModelError, CorruptFileError: as `Scheme.plan`.
    """

    def __init__(self, checkpoint: TensorStore, scheme: Scheme) -> None:
        self.folder = checkpoint.folder
        self._files = checkpoint
        tensors = {name: self._info(name) for name in checkpoint.names()}
        plan = scheme.plan(tensors, self._read_small)
        self.spare = frozenset(plan.spare)
        self._stored = {weight.name: weight for weight in plan.weights}
        self._names = _names(checkpoint.names(), plan.weights)
        self._last: tuple[str, int | None, QuantizedTensor] | None = None
        for note in plan.notes:
            _log.warning("%s: %s", self.folder, note)

    def names(self) -> tuple[str, ...]:
        """The names of the tensors; a weight in parts is where its first part is."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of tensor ``name``, without reading it."""
        stored = self._stored.get(name)
        return self._files.shape(name) if stored is None else stored.shape

    def num_bytes(self, name: str) -> int:
        """The bytes that tensor ``name`` takes on disk, in all its parts."""
        stored = self._stored.get(name)
        parts = (name,) if stored is None else stored.parts
        return sum(self._files.num_bytes(part) for part in parts)

    def dtype(self, name: str) -> str:
        """The dtype of tensor ``name``; float32 for what is computed from parts."""
        return self._files.dtype(name) if name not in self._stored else "float32"

    def stored(self, name: str) -> StoredWeight | None:
        """How tensor ``name`` is stored, or ``None`` if it is a plain tensor."""
        return self._stored.get(name)

    def quantized(
        self,
        name: str,
        on_bytes: Callable[[int], None] | None = None,
        *,
        entry: int | None = None,
    ) -> QuantizedTensor:
        """The weight ``name``, which is stored in parts, as codes and scales.

        Axes are ``[…, out, in]``, whatever the order in the tensor that it stands for. ``entry`` is
        the matrix of a stack that is wanted; the others are not read where they lie apart.

        Raises:
            CorruptFileError: a part has values that cannot be, or the file has become shorter.
            DiskError: the file cannot be read.
        """
        stored = self._stored[name]
        read_entry = entry if stored.by_expert else None
        if self._last is None or self._last[:2] != (name, read_entry):
            self._last = None  # frees the one before first

            def read(part: str) -> Array:
                shape, first = self._files.shape(part), 0
                if read_entry is not None:
                    shape, first = (1, *shape[1:]), read_entry
                out = empty(shape, self._files.dtype(part))
                self._files.read_into(part, out, on_bytes, first_row=first)
                return out

            self._last = name, read_entry, stored.assemble(read)
        found = self._last[2]
        if entry is None:
            return found
        return found.entry(entry if read_entry is None else 0)

    def read_into(
        self,
        name: str,
        out: Array,
        on_bytes: Callable[[int], None] | None = None,
        *,
        first_row: int = 0,
    ) -> None:
        """Read rows of tensor ``name`` into ``out``, expanded; see `SafetensorsFile.read_into`."""
        stored = self._stored.get(name)
        if stored is None:
            self._files.read_into(name, out, on_bytes, first_row=first_row)
            return
        assert out.flags.c_contiguous
        if not stored.transposed:
            weight = self.quantized(name, on_bytes)
            weight.rows(first_row, first_row + len(out)).dequantize_into(out)
            return
        for index in range(len(out)):  # one expert at a time
            part = self.quantized(name, on_bytes, entry=first_row + index)
            out[index] = part.dequantize(out.dtype.name).swapaxes(-1, -2)

    def _info(self, name: str) -> TensorInfo:
        try:
            return TensorInfo(self._files.shape(name), self._files.dtype(name))
        except UnsupportedModelError:
            return TensorInfo(self._files.shape(name), None)

    def _read_small(self, name: str) -> Array:
        if self._files.num_bytes(name) > _MAX_SMALL_BYTES:
            raise CorruptFileError(f"Tensor {short_name(name)} is too large for what it is.")
        out = empty(self._files.shape(name), self._files.dtype(name))
        self._files.read_into(name, out)
        return out


def _names(names: tuple[str, ...], weights: list[StoredWeight]) -> tuple[str, ...]:
    """The names with each weight's parts replaced by the weight, in file order.

    Raises:
        CorruptFileError: a weight is there both in parts and as a tensor.
    """
    whole: dict[str, str] = {}
    for weight in weights:
        for part in weight.parts:
            whole[part] = weight.name
    stored = set(whole.values())
    seen: dict[str, None] = {}
    for name in names:
        if name not in whole and name in stored:
            raise CorruptFileError(f"Tensor {short_name(name)} is there twice, once quantized.")
        seen[whole.get(name, name)] = None
    return tuple(seen)
