"""What becomes of each weight as it is packed, and the bytes that it then takes."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod

from ridgeline.core import ops
from ridgeline.core.formats import NumberFormat, head_format, number_format, table_format
from ridgeline.core.op_facts import Role
from ridgeline.core.weight_uses import weight_uses
from ridgeline.kernels.cpu.matrix import MatrixFormat, matrix_bytes, matrix_struct, plain_format
from ridgeline.kernels.cpu.pool import Pool
from ridgeline.kernels.cpu.structs import RlFormat
from ridgeline.weights import weight_shapes

_FACTORED_GROUP = 128
FACTOR_COLUMNS = 32  # that share a factor
# What is held with factors, by the bits of a code.
FACTORED = {
    bits: MatrixFormat(format=RlFormat.of_bits(bits), group=_FACTORED_GROUP, has_factors=True)
    for bits in (2, 3, 4)
}
_OF_32_COLUMNS = {bits: number_format(f"int{bits}") for bits in FACTORED}
_VECTOR_BYTES = 4  # of an element: float32


def packed_roles(model_ops: Iterable[ops.Op]) -> Mapping[str, Role | ops.LatentAttend]:
    """What is done with each matrix; what is missing is a vector."""
    roles: dict[str, Role | ops.LatentAttend] = {}
    for op in model_ops:
        is_tied = isinstance(op, ops.Embed) and op.is_tied
        for use in weight_uses(op):
            match use.role:
                case Role.TABLE if is_tied:  # it is held as the head is
                    roles[use.weight.name] = Role.HEAD
                case Role.PRODUCT | Role.HEAD | Role.TABLE | Role.ROUTER:
                    roles[use.weight.name] = use.role
                case Role.EXPANSION:
                    assert isinstance(op, ops.LatentAttend)
                    roles[use.weight.name] = op
                case Role.GAIN | Role.BIAS | Role.SINKS | Role.POSITIONS:
                    pass
                case Role.OUTPUT_GATE | Role.CONVOLUTION | Role.DECAY | Role.SKIP:
                    pass
    return roles


def packed_format(
    role: Role, quantization: NumberFormat | None, columns: int
) -> MatrixFormat | None:
    """What a matrix that is not quantized yet is packed to; ``None`` for its own type."""
    if quantization is None or role is Role.ROUTER:
        return None
    of_role = {Role.HEAD: head_format, Role.TABLE: table_format}
    number = of_role.get(role, lambda layers: layers)(quantization)
    if number in _OF_32_COLUMNS.values() and takes_factors(int(number.bits), columns):
        return FACTORED[int(number.bits)]
    return MatrixFormat(format=RlFormat.of_bits(number.bits), group=number.group_size)


def held_format(quantization: NumberFormat, columns: int) -> NumberFormat:
    """What matrices of the layers are held in: int4, int3 and int2 have a factor of a byte where
    they have a scale elsewhere, and a scale for several of them, unless that makes narrow ones
    larger."""
    if quantization not in _OF_32_COLUMNS.values():
        return quantization
    if takes_factors(int(quantization.bits), columns):
        return _with_factors(quantization)
    return replace(quantization, name=f"{quantization.name}-g32")


def padded(form: NumberFormat) -> NumberFormat:
    """A format with rows as the kernels pad them: those of codes to whole groups of activations."""
    if not form.is_quantized:
        return form
    return replace(form, row_multiple=max(form.group_size or 64, 32))


def takes_factors(bits: int, columns: int) -> bool:
    """Whether a matrix with a scale for 32 columns is no larger with factors, which pad columns to
    whole groups."""
    form = _OF_32_COLUMNS[bits]
    plain, factored = (
        padded(each).bits_per_element(columns) for each in (form, _with_factors(form))
    )
    return factored <= plain


def _with_factors(form: NumberFormat) -> NumberFormat:
    return replace(form, group_size=_FACTORED_GROUP, factor_columns=FACTOR_COLUMNS)


def packed_bytes(
    pool: Pool, model_ops: Iterable[ops.Op], dtype: str, quantization: NumberFormat | None
) -> int:
    """What the weights of a model take once they are packed, if none is quantized yet."""
    model_ops, size = tuple(model_ops), 0
    roles = packed_roles(model_ops)
    for name, shape in weight_shapes(model_ops).items():
        role = roles.get(name)
        if role is None:
            size += prod(shape) * _VECTOR_BYTES
        elif isinstance(role, ops.LatentAttend):
            for matrix in ((role.latent_dim, role.nope_dim), (role.v_dim, role.latent_dim)):
                struct = matrix_struct(*matrix, plain_format(dtype))
                size += role.num_heads * matrix_bytes(pool, struct)
        else:
            form = packed_format(role, quantization, shape[-1]) or plain_format(dtype)
            struct = matrix_struct(shape[-2], shape[-1], form)
            size += prod(shape[:-2]) * matrix_bytes(pool, struct)
    return size
