"""Every field of a spec, changed one at a time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import StrEnum
from typing import Any, get_args

from ridgeline.core.rope_spec import LinearScaling
from ridgeline.core.spec import ModelSpec
from ridgeline.core.weight_uses import op_weights
from ridgeline.models import lower

# These are not numbers that the forward pass uses.
NOT_NUMERIC = {
    "model_type": "a name",
    "max_position": "a limit on requests",
    "tie_embeddings": "says which tensor the head is; see test_tied_head",
    "kv_layer": "which layer's K and V are read; see test_shared_kv",
    "has_head": "without one there are no logits",
}
_WHERE_THERE_IS_NONE = {
    "window": 20,
    "softcap": 4.0,
    "logit_softcap": 4.0,
    "qkv_clip": 1.0,
    "scaling": LinearScaling(factor=1.1),
}


@dataclass(frozen=True, kw_only=True)
class Change:
    """``spec`` is the original with one field changed; ``text`` says which and how."""

    text: str
    spec: ModelSpec


def changes(spec: ModelSpec) -> Iterator[Change]:
    """All changes to a model; of layers that are alike, only the last is changed."""
    yield from _changes_below(spec, "", lambda new: new)
    for index, layer in enumerate(spec.layers):
        if layer in spec.layers[index + 1 :]:
            continue

        def rebuild(new: Any, index: int = index) -> ModelSpec:
            layers = (*spec.layers[:index], new, *spec.layers[index + 1 :])
            return replace(spec, layers=layers)

        yield from _changes_below(layer, f"layers[{index}].", rebuild)


def same_weights(spec: ModelSpec, other: ModelSpec) -> bool:
    """Whether ``other`` reads no weights but those of ``spec``, in the same shapes."""
    return _weight_shapes(other) <= _weight_shapes(spec)


def weight_names(spec: ModelSpec) -> set[str]:
    return {name for name, _ in _weight_shapes(spec)}


def can_be_lowered(spec: ModelSpec) -> bool:
    """Whether the spec's parts go together: `lower` asserts it."""
    try:
        lower(spec)
    except AssertionError:
        return False
    return True


def _weight_shapes(spec: ModelSpec) -> set[tuple[str, tuple[int, ...]]]:
    return {(weight.name, weight.shape) for op in lower(spec) for weight in op_weights(op)}


def _changes_below(node: Any, prefix: str, rebuild: Callable[[Any], ModelSpec]) -> Iterator[Change]:
    for each in fields(node):
        value = getattr(node, each.name)
        path = f"{prefix}{each.name}"

        def put(new: Any, name: str = each.name) -> ModelSpec:
            return rebuild(replace(node, **{name: new}))

        if each.name not in NOT_NUMERIC:
            optional = type(None) in get_args(each.type)
            for new in _other_values(each.name, value, optional=optional):
                yield Change(text=f"{path}: {value!r} → {new!r}", spec=put(new))
        if is_dataclass(value):
            yield from _changes_below(value, f"{path}.", put)


def _other_values(name: str, value: Any, *, optional: bool) -> list[Any]:
    """By type: a number 10 % or a step away, every other member of an enumeration, none at all."""
    match value:
        case bool():
            return [not value]
        case StrEnum():
            return [member for member in type(value) if member != value]
        case float():
            return [value * 1.1] + [None] * (name in _WHERE_THERE_IS_NONE)
        case int() if name == "window":
            return [value - 1, value + 1, None]
        case int() if name in ("first_position", "offset"):
            return [value + 1]
        case int() if name == "rotary_dim":
            return [value - 2]
        case int():
            return [value // 2]
        case None if name in _WHERE_THERE_IS_NONE:
            return [_WHERE_THERE_IS_NONE[name]]
        case tuple() if name in ("factors", "input_scales"):
            return [tuple(factor * 1.1 for factor in value)]
        case None | tuple():  # layers are changed one by one
            return []
    assert is_dataclass(value), f"{name} is of a type that the test does not know"
    return [None] if optional else []
