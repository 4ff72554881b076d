"""How weights are held on the device, and what they take there."""

from collections.abc import Iterable, Mapping

from ridgeline.core import ops
from ridgeline.core.formats import NumberFormat, float_format, number_format
from ridgeline.core.op_facts import Role
from ridgeline.core.weight_uses import op_weights, weight_roles

# What products pack; the rest is in the model's type.
PACKED = frozenset({Role.PRODUCT, Role.HEAD})


def stacks(model_ops: Iterable[ops.Op]) -> dict[str, tuple[str, ...]]:
    """The names of each stack, by the name of each part: matrices with the same input, whose rows
    one product serves in this order, and their biases."""
    found: dict[str, tuple[str, ...]] = {}
    groups: list[tuple[ops.Weight | None, ...]]
    for op in model_ops:
        match op:
            case ops.QKVProject():
                groups = [
                    (op.query, op.key, op.value),
                    (op.query_bias, op.key_bias, op.value_bias),
                ]
            case ops.MLP() | ops.GateUp() | ops.MoE() if op.gate is not None:
                groups = [(op.gate, op.up), (op.gate_bias, op.up_bias)]
            case ops.SharedExpert():
                groups = [(op.gate, op.up)]
            case _:
                continue
        for group in groups:
            names = tuple(weight.name for weight in group if weight is not None)
            found |= dict.fromkeys(names, names)
    return found


def device_formats(
    model_ops: Iterable[ops.Op], dtype: str, quantization: NumberFormat | None
) -> Mapping[str, NumberFormat]:
    """The format of each weight; a tied head that is quantized is held as a table, too.

    Embeddings, routers, norms and biases keep the model's type: a token reads one row of the first,
    and the others are small. A head takes eight bits where the layers take fewer.
    """
    own = float_format(dtype)
    formats: dict[str, NumberFormat] = {}
    for name, roles in weight_roles(model_ops).items():
        if quantization is None or not roles & PACKED:
            formats[name] = own
        elif Role.HEAD in roles:
            formats[name] = device_head_format(quantization)
        else:
            formats[name] = quantization
    return formats


def device_head_format(quantization: NumberFormat) -> NumberFormat:
    """That of the LM head where layers are quantized: four bits are too few for logits."""
    return number_format("int8") if quantization.bits < 8 else quantization


def weights_bytes(
    model_ops: Iterable[ops.Op], dtype: str, quantization: NumberFormat | None
) -> int:
    """What all weights take on the device, scales included."""
    model_ops = tuple(model_ops)
    formats, roles = device_formats(model_ops, dtype, quantization), weight_roles(model_ops)
    shapes = {weight.name: weight.shape for op in model_ops for weight in op_weights(op)}
    total = sum(formats[name].num_bytes(shape) for name, shape in shapes.items())
    for name, of_weight in roles.items():
        if of_weight >= {Role.HEAD, Role.TABLE} and formats[name].is_quantized:
            total += float_format(dtype).num_bytes(shapes[name])
    return int(total)
