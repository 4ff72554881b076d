"""Which values a field may have, for whoever sent another."""

import re
from functools import lru_cache
from typing import Any

from msgspec import inspect

_STEP = re.compile(r"\[[^\]]*\]|[^.\[]+")


@lru_cache(maxsize=256)
def choices(schema: Any, path: str) -> tuple[str, ...]:
    """The values of the ``Literal`` at a path such as ``tools[0].type``; none if there is none."""
    found = _parts(inspect.type_info(schema))
    for step in _STEP.findall(path):
        found = [
            part for each in found for child in _children(each, step) for part in _parts(child)
        ]
    values = (v for each in found if isinstance(each, inspect.LiteralType) for v in each.values)
    return tuple(map(str, values))


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
