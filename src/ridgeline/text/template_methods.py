"""The methods of plain values that a template may call, each paid for before it runs."""

from string import Formatter
from typing import Any

from jinja2.environment import Environment
from jinja2.exceptions import SecurityError
from jinja2.sandbox import SandboxedFormatter

from ridgeline.text.template_budget import ELEMENT_COST, charge, weigh, weigh_flat
from ridgeline.text.template_operators import check_widths

_STR = frozenset(
    [
        "capitalize",
        "casefold",
        "center",
        "count",
        "endswith",
        "expandtabs",
        "find",
        "index",
        "isalnum",
        "isalpha",
        "isascii",
        "isdecimal",
        "isdigit",
        "isidentifier",
        "islower",
        "isnumeric",
        "isprintable",
        "isspace",
        "istitle",
        "isupper",
        "join",
        "ljust",
        "lower",
        "lstrip",
        "partition",
        "removeprefix",
        "removesuffix",
        "replace",
        "rfind",
        "rindex",
        "rjust",
        "rpartition",
        "rsplit",
        "rstrip",
        "split",
        "splitlines",
        "startswith",
        "strip",
        "swapcase",
        "title",
        "upper",
        "zfill",
    ]
)
_READS_LITTLE = frozenset({"startswith", "endswith", "join"})
_QUADRATIC = frozenset(
    {"rfind", "rindex", "rsplit", "rpartition", "strip", "lstrip", "rstrip", "count", "find"}
)
_SPLITS = frozenset({"split", "rsplit", "splitlines"})
_PADS = frozenset({"center", "ljust", "rjust", "zfill"})
_DICT = frozenset({"get", "items", "keys", "values", "copy"})
_LIST = frozenset({"index", "count", "copy"})
_NUMBER = frozenset({"is_integer", "bit_length"})


def pay_method(
    owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Pay for a built-in method of a string, a number or a container; return its arguments.

    SecurityError for any method that is not listed here.
    """
    if isinstance(owner, str) and name in _STR:
        return pay_str(owner, name, args, kwargs)
    if isinstance(owner, dict) and name in _DICT:
        for arg in args:
            weigh(arg)
        if name == "copy":
            weigh_flat(owner)
    elif isinstance(owner, list | tuple) and name in _LIST:
        weigh(owner) if name != "copy" else weigh_flat(owner)
        # Every element is compared with the argument.
        charge(len(owner) * sum(weigh(arg) for arg in args) // ELEMENT_COST)
    elif not (isinstance(owner, int | float) and name in _NUMBER):
        raise SecurityError(f"calling {name!r} of a {type(owner).__name__} is not allowed")
    return args


def pay_str(text: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Pay for a method of a string; return its arguments (a generator to join as a list)."""
    if name == "join" and args and not isinstance(args[0], str | list | tuple | dict):
        args = (list(args[0]), *args[1:])
    weight = sum(weigh(arg) for arg in (*args, *kwargs.values()))
    units = weight if name in _READS_LITTLE else len(text) + weight
    if name == "join" and args:
        units += len(text) * len(args[0])
    elif name == "replace" and len(args) >= 2:
        units = replaced_units(text, args[0], args[1])
    elif name in _PADS and args and isinstance(args[0], int):
        units += max(args[0], 0)
    elif name == "expandtabs":
        size = args[0] if args else kwargs.get("tabsize", 8)
        units += text.count("\t") * (size if isinstance(size, int) else 8)
    elif name in _QUADRATIC and args and isinstance(args[0], str):
        units *= 1 + len(args[0]) // 16
    if name in _SPLITS:
        separator = args[0] if args else kwargs.get("sep")
        pieces = text.count(separator) if isinstance(separator, str) and separator else None
        units += ELEMENT_COST * (pieces if pieces is not None else len(text) // 4)
    charge(units)
    return args


def replaced_units(text: str, old: Any, new: Any) -> int:
    """Return the units of ``text.replace(old, new)``: what it reads, and the most it can make."""
    if not isinstance(old, str) or not isinstance(new, str):
        return len(text)
    return len(text) + text.count(old) * len(new)


class FormatCall:
    """``str.format`` or ``str.format_map`` of one string, sandboxed and paid for."""

    def __init__(self, environment: Environment, text: str, is_map: bool) -> None:
        self._formatter = GuardedFormatter(environment)
        self._text, self._is_map = text, is_map

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        charge(len(self._text))
        if self._is_map:
            if kwargs or len(args) != 1:
                raise TypeError("format_map() takes exactly one argument")
            return self._formatter.vformat(self._text, (), args[0])
        return self._formatter.vformat(self._text, args, kwargs)


class GuardedFormatter(SandboxedFormatter):
    """Refuses wide fields, and charges for each field that it formats."""

    def convert_field(self, value: Any, conversion: Any) -> Any:
        weigh(value)
        return Formatter.convert_field(self, value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        weigh(value)
        check_widths(format_spec)
        return str(Formatter.format_field(self, value, format_spec))
