"""Python and JSON literals: parsed, never run."""

import ast
from typing import Any

_NAMES = {"true": True, "false": False, "null": None, "none": None}


def literal(text: str) -> Any:
    """The value of a Python or JSON literal.

    Raises:
        ValueError, SyntaxError, MemoryError, RecursionError: the text is anything else.
    """
    return _value(ast.parse(text, mode="eval").body)


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {_key(key): _value(value) for key, value in pairs}
    raise ValueError("not a literal")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("not a string")
