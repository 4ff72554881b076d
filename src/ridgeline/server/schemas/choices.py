"""Which fields there are and which values one may have, for whoever sent another."""

import re
from functools import lru_cache
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
def field_names(schema: Any, path: str) -> tuple[str, ...]:
    """The fields of the object at a path; none if there is no such object."""
    found = _kinds_at(schema, path)
    objects = (each for each in found if isinstance(each, inspect.StructType))
    return tuple(field.encode_name for each in objects for field in each.fields)


def _kinds_at(schema: Any, path: str) -> list[inspect.Type]:
    found = _parts(inspect.type_info(schema))
    for step in _STEP.findall(path):
        found = [
            part for each in found for child in _children(each, step) for part in _parts(child)
        ]
    return found


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
