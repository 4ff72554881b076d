"""A model's weights as the CPU kernels read them: packed matrices, and vectors in float32."""

import logging
from collections import Counter
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ridgeline.core import ops
from ridgeline.core.arrays import Array, cast
from ridgeline.core.errors import OutOfMemoryError, SettingsError
from ridgeline.core.formats import NumberFormat
from ridgeline.core.host import available_memory_bytes
from ridgeline.core.op_facts import Role
from ridgeline.core.weight_uses import op_weights, weight_roles
from ridgeline.executors.cpu.codes import (
    MatrixCodes,
    matrix_codes,
    pack_matrix_codes,
    row_ranges,
)
from ridgeline.executors.cpu.roles import (
    FACTOR_COLUMNS,
    FACTORED,
    packed_bytes,
    packed_format,
    packed_roles,
    padded,
)
from ridgeline.executors.model import ExecutorModel
from ridgeline.kernels.cpu.matrix import (
    PackedMatrix,
    empty_matrix,
    matrix_struct,
    pack,
    plain_format,
    put_rows,
)
from ridgeline.kernels.cpu.memory import Allocate, FileSlabs, Slabs
from ridgeline.kernels.cpu.pool import Pool
from ridgeline.kernels.cpu.structs import RlFormat
from ridgeline.quant import GGUFBlocks, QuantizedTensor
from ridgeline.weights import CheckpointWeights, Weight, expanded, weight_parts, weight_shapes

Vector = npt.NDArray[np.float32]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeights:
    """By canonical name. A stack of experts, or of heads, is a tuple of matrices; ``kept`` are
    those of ops that have no kernel, float32."""

    matrices: dict[str, tuple[PackedMatrix, ...]] = field(default_factory=dict)
    vectors: dict[str, Vector] = field(default_factory=dict)
    kept: dict[str, Array] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(
            matrix.num_bytes for matrices in self.matrices.values() for matrix in matrices
        ) + sum(vector.nbytes for vector in self.vectors.values())

    def formats(self) -> dict[str, NumberFormat]:
        """Those of quantized matrices, as the kernels hold them."""
        return {
            name: _number_format(matrices[0])
            for name, matrices in self.matrices.items()
            if RlFormat(matrices[0].struct.format).is_quantized
        }

    def bits_per_weight(self, model_ops: Iterable[ops.Op]) -> float:
        """Of all matrices that multiply something: layers and head, scales and padding included."""
        names = {
            name
            for name, roles in weight_roles(model_ops).items()
            if any(not role.is_table for role in roles)
        }
        used = [
            matrix
            for name, matrices in self.matrices.items()
            if name.partition("/")[0] in names
            for matrix in matrices
        ]
        return 8 * sum(m.num_bytes for m in used) / sum(prod(m.shape) for m in used)


def with_borrowed(own: PackedWeights, target: PackedWeights, model: ExecutorModel) -> PackedWeights:
    """A drafter's weights, with those that it has of the target's.

    Raises:
        SettingsError: the target's have another form.
    """
    borrowed = {
        name: target.matrices.get(theirs) for name, theirs in (model.borrowed or {}).items()
    }
    found = {name: matrices for name, matrices in borrowed.items() if matrices is not None}
    if len(found) < len(borrowed):
        raise SettingsError(
            f"The drafter has no {' and no '.join(sorted({*borrowed} - {*found}))} of its own, and "
            "those of this model are not packed; take another `speculation`."
        )
    return replace(own, matrices=own.matrices | found)


def expected_bytes(pool: Pool, model: ExecutorModel) -> int:
    """About what the packed weights take, without reading any.

    Of quantized ones whose codes are kept, what they take in the file.
    """
    source = model.weights
    plain = packed_bytes(pool, model.ops, model.dtype, model.quantization)
    if model.quantization is not None or not isinstance(source, CheckpointWeights):
        return plain
    return min(plain, source.num_bytes()) if source.may_be_quantized else plain


def _check_memory(pool: Pool, model: ExecutorModel) -> None:
    needed, free = expected_bytes(pool, model), available_memory_bytes()
    if needed > free:
        raise OutOfMemoryError(
            f"The weights take {needed / 1e9:.1f} GB packed, and {free / 1e9:.1f} GB of memory are "
            "free. quantization int8 halves 16-bit weights, and int4 takes little over a quarter."
        )


def pack_weights(
    pool: Pool,
    model: ExecutorModel,
    *,
    fallbacks: Collection[ops.Op] = (),
    folder: Path | None = None,
) -> PackedWeights:
    """Pack every weight of a model, one matrix after the other.

    At most one of them is there beside what is packed: of a stack, one expert's. Those of
    ``fallbacks`` are kept as they are, too; a table that only these read is not packed. With a
    folder the packed ones lie in a file there, without a name, and may be larger than memory.

    Weights that are quantized already keep their codes and scales where the kernels have a layout
    for them; the others are expanded to the model's type, which the log says once. Of plain ones,
    matrices that tokens are multiplied with are quantized if that is asked for, the LM head as
    `head_format` and an embedding as `table_format` say. Routers, the expansion of latents and
    vectors keep their precision, since they are small and errors in them are not averaged out.

    Raises:
        SettingsError: the model is float64, which these kernels do not have; or it is to be
            quantized and is already, to another number of bits.
        OutOfMemoryError: the packed weights would not fit the memory that is free.
    """
    if model.dtype == "float64":
        raise SettingsError("The cpu executor has no float64; use the reference executor.")
    if folder is None:
        _check_memory(pool, model)
    allocate = Slabs().allocate if folder is None else FileSlabs(folder).allocate
    packing = _Packing(pool, model, fallbacks, allocate)
    for name, index, weight in weight_parts(model.weights):
        packing.add(name, index, weight)
        del weight  # before the next one is read
    if again := packing.unfinished():
        for name, index, weight in weight_parts(model.weights, only=again):
            packing.add(name, index, weight)
            del weight
    packing.log_expanded()
    return packing.packed


class _Packing:
    """The weights that are packed so far, and those of stacks that are not all there yet."""

    def __init__(
        self, pool: Pool, model: ExecutorModel, fallbacks: Collection[ops.Op], allocate: Allocate
    ) -> None:
        self.packed = PackedWeights()
        self._kept = {weight.name for op in fallbacks for weight in op_weights(op)}
        native = (op for op in model.ops if op not in fallbacks)
        self._native = {weight.name for op in native for weight in op_weights(op)}
        self._pool, self._model, self._roles = pool, model, packed_roles(model.ops)
        self._shapes = weight_shapes(model.ops)
        self._allocate = allocate
        self._expanded: dict[str, str] = {}  # name -> format
        self._stacks: dict[str, list[PackedMatrix | None]] = {}
        self._kinds: dict[str, Hashable] = {}  # of the codes of stacks; `None` for values

    def add(self, name: str, index: int | None, weight: Weight) -> None:
        """Pack a weight, or matrix ``index`` of a stack, unless that is there already."""
        self._model.check_not_quantized_twice(weight, may_have_its_bits=True)
        role, dtype = self._roles.get(name), self._model.dtype
        if name in self._kept:
            self._keep(name, index, expanded(weight, dtype))
            if role is Role.TABLE and name not in self._native:
                return
        if role is None:
            vector = _vector(expanded(weight, dtype))
            if index is None:
                self.packed.vectors[name] = vector
            else:
                empty = np.empty(self._shapes[name], dtype=np.float32)
                self.packed.vectors.setdefault(name, empty)[index] = vector
        elif isinstance(role, ops.LatentAttend):
            values = expanded(weight, dtype)
            matrices = _latent_matrices(self._pool, role, values, self._allocate)
            self.packed.matrices.update(matrices)
        elif index is None:
            self.packed.matrices[name] = (self._packed(name, weight, role, _codes(weight)),)
        else:
            self._add_to_stack(name, index, weight, role)

    def unfinished(self) -> frozenset[str]:
        """The stacks of which some matrices must be added again."""
        return frozenset(self._stacks)

    def log_expanded(self) -> None:
        """Warn of the weights whose codes were not kept, if there are any."""
        formats = Counter(self._expanded.values())
        if formats:
            _log.warning(
                "The cpu executor expands %d quantized weights to %s, having no kernel for their "
                "layout (%s).",
                formats.total(),
                self._model.dtype,
                ", ".join(f"{count} of {name}" for name, count in sorted(formats.items())),
            )

    def _keep(self, name: str, index: int | None, values: Array) -> None:
        if self._roles.get(name) is Role.TABLE:  # of which a token reads one row
            self.packed.kept[name] = values
        elif index is None:
            self.packed.kept[name] = cast(values, "float32")
        else:
            empty = np.empty(self._shapes[name], dtype=np.float32)
            self.packed.kept.setdefault(name, empty)[index] = values

    def _add_to_stack(self, name: str, index: int, weight: Weight, role: Role) -> None:
        """A stack keeps its codes if all its matrices have codes of one kind.

        If one has not, those before it, whose codes are packed, are forgotten, to be expanded.
        """
        stack = self._stacks.get(name)
        if stack is None:
            stack = self._stacks[name] = [None] * self._shapes[name][0]
        elif stack[index] is not None:
            return
        codes = _codes(weight) if self._kinds.get(name, ()) is not None else None
        kind: Hashable = None
        if codes is not None and not isinstance(weight, np.ndarray):
            kind = weight.kind, codes.form
        if self._kinds.setdefault(name, kind) != kind:
            self._kinds[name] = codes = None
            stack[:] = [None] * len(stack)
        stack[index] = self._packed(name, weight, role, codes)
        whole = tuple(matrix for matrix in stack if matrix is not None)
        if len(whole) == len(stack):
            self.packed.matrices[name] = whole
            del self._stacks[name]

    def _packed(
        self, name: str, weight: Weight, role: Role, codes: MatrixCodes | None
    ) -> PackedMatrix:
        if codes is not None:
            return pack_matrix_codes(self._pool, codes, self._allocate)
        if isinstance(weight, np.ndarray):
            form = packed_format(role, self._model.quantization, weight.shape[-1])
            return pack(self._pool, weight, form, self._allocate)
        self._expanded[name] = weight.format.name
        return _pack_expanded(self._pool, weight, self._model.dtype, self._allocate)


def _number_format(matrix: PackedMatrix) -> NumberFormat:
    """Named as `core.formats` names it, with the group where that is another."""
    struct = matrix.struct
    bits = RlFormat(struct.format).bits
    group = struct.group if struct.group < struct.columns or struct.has_factors else None
    is_usual = struct.has_factors if bits in FACTORED else group == (None if bits == 8 else 32)
    return padded(
        NumberFormat(
            name=f"int{bits}" if is_usual else f"int{bits}-g{group or 'row'}",
            bits=bits,
            is_float=False,
            group_size=group,
            scale_bits=16,
            zero_bits=16 if struct.has_min else 0,
            factor_columns=FACTOR_COLUMNS if struct.has_factors else None,
        )
    )


def _codes(weight: Weight) -> MatrixCodes | None:
    return None if isinstance(weight, np.ndarray) else matrix_codes(weight)


def _vector(values: Array) -> Vector:
    return np.ascontiguousarray(values, dtype=np.float32)


def _pack_expanded(
    pool: Pool, weight: QuantizedTensor | GGUFBlocks, dtype: str, allocate: Allocate
) -> PackedMatrix:
    """A matrix as values, expanded some rows at a time."""
    rows, columns = weight.shape
    packed = empty_matrix(pool, matrix_struct(rows, columns, plain_format(dtype)), allocate)
    for part in row_ranges((rows, columns)):
        put_rows(pool, packed, part.start, weight.rows(part.start, part.stop).dequantize(dtype))
    return packed


def _latent_matrices(
    pool: Pool, op: ops.LatentAttend, expand: Array, allocate: Allocate
) -> dict[str, tuple[PackedMatrix, ...]]:
    """Each head's matrix from q to latents [R, n], and from latents to outputs [v, R]."""
    heads_HER = expand.reshape(op.num_heads, op.nope_dim + op.v_dim, op.latent_dim)
    key_HRn, value_HvR = heads_HER[:, : op.nope_dim].swapaxes(1, 2), heads_HER[:, op.nope_dim :]
    return {
        f"{op.expand.name}/key": tuple(pack(pool, part, None, allocate) for part in key_HRn),
        f"{op.expand.name}/value": tuple(pack(pool, part, None, allocate) for part in value_HvR),
    }
