"""A model's weights as the CPU kernels read them: packed matrices, and vectors in float32."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from ridgeline.core import ops
from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.formats import NumberFormat
from ridgeline.executors.model import ExecutorModel
from ridgeline.kernels.cpu import Format, MatrixFormat, PackedMatrix, Pool, pack
from ridgeline.weights.packed import expanded

Vector = npt.NDArray[np.float32]

_CODES: dict[float, Format] = {4: Format.Q4, 8: Format.Q8}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeights:
    """By canonical name. A stack of experts, or of heads, is a tuple of matrices."""

    matrices: dict[str, tuple[PackedMatrix, ...]] = field(default_factory=dict)
    vectors: dict[str, Vector] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(
            matrix.num_bytes for matrices in self.matrices.values() for matrix in matrices
        ) + sum(vector.nbytes for vector in self.vectors.values())


def pack_weights(
    pool: Pool, model: ExecutorModel, quantization: NumberFormat | None
) -> PackedWeights:
    """Pack every weight of a model.

    Matrices that tokens are multiplied with are quantized, the LM head included, if that is asked
    for. Routers, the expansion of latents and vectors keep their precision, since they are small
    and errors in them are not averaged out.

    Raises:
        InvalidRequestError: the model is float64, which these kernels do not have.
    """
    if model.dtype == torch.float64:
        raise InvalidRequestError("The cpu executor has no float64; use the reference executor.")
    packed, roles = PackedWeights(), _roles(model.ops)
    for name, stored in model.weights.items():
        role, weight = roles.get(name), expanded(stored, model.dtype)
        if role is None:
            packed.vectors[name] = weight.detach().float().contiguous().numpy()
        elif isinstance(role, ops.LatentAttend):
            packed.matrices.update(_latent_matrices(pool, role, weight))
        else:
            form = _form(quantization) if role == _QUANTIZED else None
            parts = weight if weight.ndim == 3 else weight[None]
            packed.matrices[name] = tuple(pack(pool, part, form) for part in parts)
    return packed


_QUANTIZED, _PLAIN = "quantized", "plain"
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
                roles |= dict.fromkeys((op.gate.name, op.up.name, op.down.name), _QUANTIZED)
            case ops.SharedExpert():
                roles |= dict.fromkeys((op.gate.name, op.up.name, op.down.name), _QUANTIZED)
            case ops.Embed():
                roles[op.weight.name] = _QUANTIZED
            case ops.QKVProject() | ops.LatentProject() | ops.OutProject() | ops.MLP() | ops.Head():
                for weight in ops.op_weights(op):
                    if len(weight.shape) == 2:
                        roles[weight.name] = _QUANTIZED
    return roles


def _form(quantization: NumberFormat | None) -> MatrixFormat | None:
    if quantization is None:
        return None
    return MatrixFormat(format=_CODES[quantization.bits], group=quantization.group_size)


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
