"""A model's weights as the CPU kernels read them: packed matrices, and vectors in float32."""

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from ridgeline.core import ops
from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.formats import NumberFormat, head_format, table_format
from ridgeline.executors.cpu.codes import matrix_codes
from ridgeline.executors.model import ExecutorModel
from ridgeline.kernels.cpu import Format, MatrixFormat, PackedMatrix, Pool, pack, pack_codes
from ridgeline.weights import Weight, expanded

Vector = npt.NDArray[np.float32]

_log = logging.getLogger(__name__)
_CODES: dict[float, Format] = {4: Format.Q4, 6: Format.Q6, 8: Format.Q8}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeights:
    """By canonical name. A stack of experts, or of heads, is a tuple of matrices; ``kept`` are
    those of ops that have no kernel, float32."""

    matrices: dict[str, tuple[PackedMatrix, ...]] = field(default_factory=dict)
    vectors: dict[str, Vector] = field(default_factory=dict)
    kept: dict[str, torch.Tensor] = field(default_factory=dict)

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
            if Format(matrices[0].struct.format).is_quantized
        }

    def bits_per_weight(self, model_ops: Iterable[ops.Op]) -> float:
        """Of all matrices that multiply something: layers and head, scales and padding included."""
        names = {
            weight.name
            for op in model_ops
            if not isinstance(op, ops.Embed)
            for weight in ops.op_weights(op)
        }
        used = [
            matrix
            for name, matrices in self.matrices.items()
            if name.partition("/")[0] in names
            for matrix in matrices
        ]
        return 8 * sum(m.num_bytes for m in used) / sum(prod(m.shape) for m in used)


def pack_weights(
    pool: Pool, model: ExecutorModel, *, cuts: Collection[ops.Op] = ()
) -> PackedWeights:
    """Pack every weight of a model, one after the other; keep those of ``cuts`` as they are, too.

    Weights that are quantized already keep their codes and scales where the kernels have a layout
    for them; the others are expanded to the model's type, which the log says once. Of plain ones,
    matrices that tokens are multiplied with are quantized if that is asked for, the LM head as
    `head_format` and an embedding as `table_format` say. Routers, the expansion of latents and
    vectors keep their precision, since they are small and errors in them are not averaged out.

    Raises:
        InvalidRequestError: the model is float64, which these kernels do not have; or it is to be
            quantized and is already.
    """
    if model.dtype == torch.float64:
        raise InvalidRequestError("The cpu executor has no float64; use the reference executor.")
    packed, roles, without = PackedWeights(), _roles(model.ops), Counter[str]()
    kept = {weight.name for op in cuts for weight in ops.op_weights(op)}
    for name, weight in model.weights.items():
        model.check_not_quantized_twice(weight)
        if name in kept:
            packed.kept[name] = expanded(weight, model.dtype).float()
        role = roles.get(name)
        if role is None:
            packed.vectors[name] = _vector(expanded(weight, model.dtype))
        elif isinstance(role, ops.LatentAttend):
            packed.matrices.update(_latent_matrices(pool, role, expanded(weight, model.dtype)))
        else:
            matrices = _packed_codes(pool, weight)
            if matrices is None:
                if not isinstance(weight, torch.Tensor):
                    without[weight.format.name] += 1
                matrices = _packed_values(
                    pool, expanded(weight, model.dtype), role, model.quantization
                )
            packed.matrices[name] = matrices
        del weight  # before the next one is read
    if without:
        counted = ", ".join(f"{count} of {name}" for name, count in sorted(without.items()))
        _log.warning(
            "The cpu executor expands %d quantized weights to %s, having no kernel for their "
            "layout (%s).",
            without.total(),
            str(model.dtype).removeprefix("torch."),
            counted,
        )
    return packed


def _number_format(matrix: PackedMatrix) -> NumberFormat:
    """Named as `core.formats` names it, with the group where that is another."""
    struct = matrix.struct
    bits = int(struct.format)
    group = struct.group if struct.group < struct.columns else None
    usual = None if bits == 8 else 32
    return NumberFormat(
        name=f"int{bits}" if group == usual else f"int{bits}-g{group or 'row'}",
        bits=bits,
        is_float=False,
        group_size=group,
        scale_bits=16,
        zero_bits=16 if struct.has_min else 0,
    )


_PRODUCT, _HEAD, _TABLE, _PLAIN = "product", "head", "table", "plain"
_Role = str | ops.LatentAttend


def _roles(model_ops: Iterable[ops.Op]) -> Mapping[str, _Role]:
    """What is done with each matrix; what is missing is a vector."""
    roles: dict[str, _Role] = {}
    for op in model_ops:
        match op:
            case ops.LatentAttend():
                roles[op.expand.name] = op
            case ops.MoE():
                roles[op.router.name] = _PLAIN
                roles |= dict.fromkeys((op.gate.name, op.up.name, op.down.name), _PRODUCT)
            case ops.SharedExpert():
                roles |= dict.fromkeys((op.gate.name, op.up.name, op.down.name), _PRODUCT)
            case ops.Embed():
                roles[op.weight.name] = _TABLE
            case ops.Head():
                roles[op.weight.name] = _HEAD  # an embedding that is tied to it, too
            case ops.QKVProject() | ops.LatentProject() | ops.OutProject() | ops.MLP():
                for weight in ops.op_weights(op):
                    if len(weight.shape) == 2:
                        roles[weight.name] = _PRODUCT
    return roles


def _vector(values: torch.Tensor) -> Vector:
    return values.detach().float().contiguous().numpy()


def _packed_codes(pool: Pool, weight: Weight) -> tuple[PackedMatrix, ...] | None:
    """Matrices of a quantized weight's own codes; ``None`` if they have no layout for them."""
    if isinstance(weight, torch.Tensor):
        return None
    matrices = []
    for part in matrix_codes(weight):
        if part is None:
            return None
        matrices.append(pack_codes(pool, part.codes, part.scales, part.mins, part.form))
    return tuple(matrices)


def _packed_values(
    pool: Pool, weight: torch.Tensor, role: str, quantization: NumberFormat | None
) -> tuple[PackedMatrix, ...]:
    form = None
    if quantization is not None and role != _PLAIN:
        of_role = {_HEAD: head_format, _TABLE: table_format}
        number = of_role.get(role, lambda layers: layers)(quantization)
        form = MatrixFormat(format=_CODES[number.bits], group=number.group_size)
    return tuple(pack(pool, part, form) for part in (weight if weight.ndim == 3 else weight[None]))


def _latent_matrices(
    pool: Pool, op: ops.LatentAttend, expand: torch.Tensor
) -> dict[str, tuple[PackedMatrix, ...]]:
    """Each head's matrix from q to latents [R, n], and from latents to outputs [v, R]."""
    heads_HER = expand.view(op.num_heads, op.nope_dim + op.v_dim, op.latent_dim)
    key_HRn, value_HvR = heads_HER[:, : op.nope_dim].mT, heads_HER[:, op.nope_dim :]
    return {
        f"{op.expand.name}/key": tuple(pack(pool, part) for part in key_HRn),
        f"{op.expand.name}/value": tuple(pack(pool, part) for part in value_HvR),
    }
