"""What single filters cost beyond reading their arguments: they pad, repeat, compare or sort."""

from collections.abc import Callable
from typing import Any

from jinja2.exceptions import SecurityError

from ridgeline.text.template_budget import ELEMENT_COST, charge, weigh, weigh_flat
from ridgeline.text.template_methods import pay_str, replaced_units
from ridgeline.text.template_operators import MAX_WIDTH


def _bounded(value: Any, limit: int = MAX_WIDTH) -> int:
    size = len(value) if isinstance(value, str) else value
    if isinstance(size, int | float) and abs(size) > limit:
        raise SecurityError("a width is too large")
    return int(size) if isinstance(size, int | float) else 0


def _argument(args: list[Any], kwargs: dict[str, Any], index: int, name: str) -> Any:
    return args[index] if len(args) > index else kwargs.get(name, 0)


def _before_center(args: list[Any], kwargs: dict[str, Any]) -> None:
    charge(weigh(args[0]) + _bounded(_argument(args, kwargs, 1, "width")))


def _before_indent(args: list[Any], kwargs: dict[str, Any]) -> None:
    text = args[0]
    width = _bounded(_argument(args, kwargs, 1, "width"))
    lines = len(text.splitlines()) + 1 if isinstance(text, str) else 1
    charge(2 * weigh(text) + lines * (width + 8))


def _before_join(args: list[Any], kwargs: dict[str, Any]) -> None:
    if not isinstance(args[0], str | list | tuple | dict):
        args[0] = list(args[0])
    weigh(args[0])
    weight = weigh(_argument(args, kwargs, 1, "d"))
    charge(len(args[0]) * weight)


def _before_replace(args: list[Any], kwargs: dict[str, Any]) -> None:
    weights = [weigh(value) for value in (*args, *kwargs.values())]
    old = str(_argument(args, kwargs, 1, "old"))
    new = str(_argument(args, kwargs, 2, "new"))
    charge(weights[0] + replaced_units(str(args[0]), old, new))


def _before_round(args: list[Any], kwargs: dict[str, Any]) -> None:
    _bounded(_argument(args, kwargs, 1, "precision"), 300)


def _before_groups(args: list[Any], kwargs: dict[str, Any]) -> None:
    name = "linecount" if "linecount" in kwargs else "slices"
    if isinstance(args[0], str):
        charge(ELEMENT_COST * len(args[0]))
    weigh_flat(args[0])
    charge(ELEMENT_COST * _bounded(_argument(args, kwargs, 1, name)))


def _before_sum(args: list[Any], kwargs: dict[str, Any]) -> None:
    """Adding up lists copies the sum so far each time."""
    args[0] = list(args[0])
    units = weigh(args[0])
    start = _argument(args, kwargs, 2, "start")
    if not isinstance(start, int | float):
        charge(len(args[0]) * (units + weigh(start)) // ELEMENT_COST)


def _before_trim(args: list[Any], kwargs: dict[str, Any]) -> None:
    characters = _argument(args, kwargs, 1, "chars")
    if isinstance(args[0], str) and isinstance(characters, str):
        pay_str(args[0], "strip", (characters,), {})
    else:
        weigh(args[0])


def _before_sort(args: list[Any], kwargs: dict[str, Any]) -> None:
    """Sorting compares each element with about log2(n) others, perhaps to their ends."""
    args[0] = list(args[0])
    charge(weigh(args[0]) * (len(args[0]).bit_length() + 1))
    for value in (*args[1:], *kwargs.values()):
        weigh(value)


def _before_dictsort(args: list[Any], _kwargs: dict[str, Any]) -> None:
    charge(weigh(args[0]) * 8)


BEFORE: dict[str, Callable[[list[Any], dict[str, Any]], None]] = {
    "center": _before_center,
    "indent": _before_indent,
    "join": _before_join,
    "replace": _before_replace,
    "round": _before_round,
    "batch": _before_groups,
    "slice": _before_groups,
    "sum": _before_sum,
    "trim": _before_trim,
    "sort": _before_sort,
    "unique": _before_sort,
    "groupby": _before_sort,
    "dictsort": _before_dictsort,
}
