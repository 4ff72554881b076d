"""Every field of a spec, changed one at a time."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import StrEnum
from typing import Any

from ridgeline.core.spec import LinearScaling, ModelSpec

# A change to these shows in the shapes of weights, so that the checkpoint no longer fits.
SHAPES = {
    "vocab_size": "rows of embed and head",
    "hidden_size": "a side of most weights",
    "num_heads": "rows of q",
    "num_kv_heads": "rows of k and v",
    "head_dim": "rows of q, k and v",
    "width": "rows of gate and up",
}
# These are not numbers that the forward pass uses.
NOT_NUMERIC = {
    "model_type": "a name",
    "max_position": "a limit on requests",
    "tie_embeddings": "says which tensor the head is; see test_tied_head",
}


@dataclass(frozen=True, kw_only=True)
class Change:
    """``spec`` is the original with the field at ``path`` changed; ``text`` says how."""

    path: str
    field: str
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


def _changes_below(node: Any, prefix: str, rebuild: Any) -> Iterator[Change]:
    for each in fields(node):
        value = getattr(node, each.name)
        path = f"{prefix}{each.name}"

        def put(new: Any, name: str = each.name) -> Any:
            return rebuild(replace(node, **{name: new}))

        for new in _other_values(each.name, value):
            text = f"{path}: {value!r} → {new!r}"
            yield Change(path=path, field=each.name, text=text, spec=put(new))
        if is_dataclass(value):
            yield from _changes_below(value, f"{path}.", put)


def _other_values(name: str, value: Any) -> list[Any]:
    """By type: a number 10 % or a step away, every other member of an enumeration, none at all."""
    match value:
        case bool():
            # A bias that is not there has no weights to try it with.
            return [] if name.endswith("bias") and not value else [not value]
        case StrEnum():
            return [member for member in type(value) if member != value]
        case float() if name in ("softcap", "logit_softcap"):
            return [value * 1.1, None]
        case float():
            return [value * 1.1]
        case int() if name == "window":
            return [value - 1, value + 1, None]
        case int() if name == "rotary_dim":
            return [value - 2]
        case int():
            return [value // 2]
        case str():
            return [value + "-other"]
        case None if name == "window":
            return [20]
        case None if name in ("softcap", "logit_softcap"):
            return [4.0]
        case None if name == "scaling":
            return [LinearScaling(factor=1.1)]
        case None | tuple():
            return []
    assert is_dataclass(value), f"{name} of a type that the test does not know"
    optional = ("scaling", "rope", "qk_norm", "attention_post_norm", "mlp_post_norm")
    return [None] if name in optional else []
