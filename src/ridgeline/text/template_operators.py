"""The operators of the template language, each paid for before it runs."""

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

from jinja2 import pass_eval_context
from jinja2.exceptions import SecurityError
from jinja2.nodes import EvalContext
from jinja2.runtime import markup_join, str_join

from ridgeline.text.template_budget import ELEMENT_COST, charge, weigh, weigh_flat

MAX_WIDTH = 9_999
_MAX_WIDTH_DIGITS = 4
_MAX_INT_BITS = 4_096
_NUMBER = re.compile(r"\d+")
_STAR_WIDTH = re.compile(r"%[#0 +\-]*\d*\.?\*")
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "**": operator.pow,
    "%": operator.mod,
}


def binary(symbol: str, left: Any, right: Any) -> Any:
    """Compute ``left symbol right``; SecurityError where a number would grow without need."""
    if symbol == "%" and isinstance(left, str):
        return printf(left, right)
    if isinstance(left, int) and isinstance(right, int):
        _check_int(symbol, left, right)
    elif symbol == "*":
        for sequence, count in ((left, right), (right, left)):
            if isinstance(sequence, str | list | tuple) and isinstance(count, int):
                unit = 1 if isinstance(sequence, str) else ELEMENT_COST
                charge(unit * len(sequence) * max(count, 0))
    elif isinstance(left, str | list | tuple):
        weigh_flat(left)
        weigh_flat(right)
    return _OPERATORS[symbol](left, right)


def printf(template: str, values: Any) -> Any:
    """Compute ``template % values``."""
    check_widths(template)
    if _STAR_WIDTH.search(template):
        raise SecurityError("a format width is not a constant")
    charge(len(template) + template.count("%") * weigh(values))
    return template % values


def check_widths(template: str) -> None:
    """Charge for the widths in a format; SecurityError for one of more than four digits.

    Every number in it counts as a width, so that no parser has to agree with Python's.
    """
    for number in _NUMBER.findall(template):
        if len(number) > _MAX_WIDTH_DIGITS:
            raise SecurityError("a format width is too large")
        charge(int(number))


def _check_int(symbol: str, left: int, right: int) -> None:
    bits = {
        "*": left.bit_length() + right.bit_length(),
        "**": left.bit_length() * max(right, 1),
    }.get(symbol, 0)
    if bits > _MAX_INT_BITS:
        raise SecurityError("a number is too large")


@pass_eval_context
def concat(eval_context: EvalContext, values: Sequence[Any]) -> str:
    """Compute ``a ~ b ~ c``."""
    for value in values:
        weigh(value)
    return markup_join(values) if eval_context.autoescape else str_join(values)


def take_slice(value: Any, start: Any, stop: Any, step: Any) -> Any:
    """Compute ``value[start:stop:step]``."""
    if isinstance(value, str | list | tuple):
        length = len(range(*slice(start, stop, step).indices(len(value))))
        charge(length if isinstance(value, str) else ELEMENT_COST * length)
    return value[start:stop:step]
