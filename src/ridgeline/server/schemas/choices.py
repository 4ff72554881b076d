"""Which fields there are and which values one may have, for whoever sent another."""

import re
from functools import cached_property, lru_cache
from typing import Any

from msgspec import inspect

_STEP = re.compile(r"\[[^\]]*\]|[^.\[]+")


@lru_cache(maxsize=256)
def choices(schema: Any, path: str) -> tuple[str, ...]:
    """The values of the ``Literal`` at a path such as ``tools[0].type``; none if there is none."""
    found = _kinds_at(schema, path)
    values = (v for each in found if isinstance(each, inspect.LiteralType) for v in each.values)
    return tuple(map(str, values))


@lru_cache(maxsize=256)
def only_number(schema: Any, path: str) -> float | None:
    """The one number that is possible at a path, as where a sampler may only be off."""
    found = [each for each in _kinds_at(schema, path) if not isinstance(each, inspect.NoneType)]
    if len(found) != 1:
        return None
    if isinstance(found[0], inspect.LiteralType) and len(found[0].values) == 1:
        (value,) = found[0].values
        return value if type(value) is int else None
    if isinstance(found[0], inspect.FloatType) and found[0].ge == found[0].le:
        return found[0].ge
    return None


@lru_cache(maxsize=256)
def rule(schema: Any, path: str) -> str | None:
    """What the text at a path has to be, in words, if its schema describes that."""
    for kind in _kinds_at(schema, path, whole=True):
        for each in kind.types if isinstance(kind, inspect.UnionType) else (kind,):
            if isinstance(each, inspect.Metadata) and each.extra_json_schema:
                return each.extra_json_schema.get("description")
    return None


@lru_cache(maxsize=256)
def field_names(schema: Any, path: str) -> tuple[str, ...]:
    """The fields of the object at a path; none if there is no such object."""
    found = _kinds_at(schema, path)
    objects = (each for each in found if isinstance(each, inspect.StructType))
    return tuple(field.encode_name for each in objects for field in each.fields)


def leave_out_unknown(schema: Any, value: Any) -> list[str]:
    """Remove from a decoded body, in place, the fields that a schema refuses.

    Returns their paths, each once: ``[...]`` in one stands for all elements of an array.
    """
    paths: dict[str, None] = {}
    _leave_out(_shape(schema), value, "", paths)
    return list(paths)


def _leave_out(shape: "_Shape", value: Any, path: str, paths: dict[str, None]) -> None:
    if isinstance(value, list):
        where = f"{path}[...]"
        for each in value:
            _leave_out(shape.items, each, where, paths)
    elif isinstance(value, dict) and shape.fields is not None:
        for name in list(value):
            field = shape.fields.get(name)
            if field is None and shape.is_closed:
                del value[name]
                paths[f"{path}.{name}" if path else name] = None
            elif field is not None and isinstance(value[name], list | dict):
                _leave_out(field, value[name], f"{path}.{name}" if path else name, paths)


class _Shape:
    """What of a kind of value is told apart: an object's fields, an array's elements."""

    def __init__(self, kinds: list[inspect.Type]) -> None:
        self._kinds = kinds
        self._struct = next((each for each in kinds if isinstance(each, inspect.StructType)), None)
        self.is_closed = self._struct is not None and self._struct.forbid_unknown_fields

    @cached_property
    def fields(self) -> "dict[str, _Shape] | None":
        if self._struct is None:
            return None
        return {each.encode_name: _Shape(_parts(each.type)) for each in self._struct.fields}

    @cached_property
    def items(self) -> "_Shape":
        lists = [each for each in self._kinds if isinstance(each, inspect.ListType)]
        return _Shape([part for each in lists for part in _parts(each.item_type)])


@lru_cache(maxsize=64)
def _shape(schema: Any) -> _Shape:
    return _Shape(_parts(inspect.type_info(schema)))


def _kinds_at(schema: Any, path: str, *, whole: bool = False) -> list[inspect.Type]:
    """The members of what may stand at a path; ``whole``: unions with what annotates them."""
    found = [inspect.type_info(schema)]
    for step in _STEP.findall(path):
        parts = [part for each in found for part in _parts(each)]
        found = [child for part in parts for child in _children(part, step)]
    return found if whole else [part for each in found for part in _parts(each)]


def _parts(kind: inspect.Type) -> list[inspect.Type]:
    """The members of a union, without what annotates them."""
    if isinstance(kind, inspect.Metadata):
        return _parts(kind.type)
    if isinstance(kind, inspect.UnionType):
        return [part for each in kind.types for part in _parts(each)]
    return [kind]


def _children(kind: inspect.Type, step: str) -> list[inspect.Type]:
    if isinstance(kind, inspect.StructType):
        return [field.type for field in kind.fields if field.encode_name == step]
    if isinstance(kind, inspect.ListType) and step.startswith("["):
        return [kind.item_type]
    return []
