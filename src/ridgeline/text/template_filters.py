"""The filters and tests that a template may use, each paid for before it runs.

``pprint``, ``striptags``, ``urlize``, ``wordwrap`` and ``xmlattr`` are left out: they make HTML or
wrap lines, which no chat template does, and their run time is not bounded by what they are given.
"""

import functools
import json
from collections.abc import Callable
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS
from jinja2.tests import TESTS

from ridgeline.text.template_budget import ELEMENT_COST, charge, weigh, weigh_flat
from ridgeline.text.template_filter_costs import BEFORE
from ridgeline.text.template_operators import concat, printf, take_slice

REMOVED = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
_MAX_INDENT = 64
# They look at one element, or at each one only when it is asked for.
_LAZY = frozenset(
    [
        "length",
        "count",
        "first",
        "last",
        "default",
        "d",
        "items",
        "map",
        "select",
        "reject",
        "selectattr",
        "rejectattr",
        "attr",
        "random",
        "safe",
    ]
)
# They make an object for each word or character.
_PER_WORD = frozenset({"title", "wordcount", "urlencode"})
_COPIES = frozenset({"list", "reverse", "batch", "slice"})
_COMPARES = frozenset(
    [
        "==",
        "eq",
        "equalto",
        "!=",
        "ne",
        ">",
        "gt",
        "greaterthan",
        ">=",
        "ge",
        "<",
        "lt",
        "lessthan",
        "<=",
        "le",
        "in",
    ]
)

Function = Callable[..., Any]


def guarded_filters() -> dict[str, Function]:
    """Return Jinja's filters, behind the meter."""
    filters = {
        name: _guard_filter(name, function)
        for name, function in FILTERS.items()
        if name not in REMOVED
    }
    return {**filters, "tojson": tojson, **_INTERNAL}


def guarded_tests() -> dict[str, Function]:
    """Return Jinja's tests, behind the meter."""
    return {name: _guard_test(name, test) for name, test in TESTS.items()}


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes; the arguments are those of transformers."""
    for text in (indent, *(separators or ())):
        if (len(text) if isinstance(text, str) else text or 0) > _MAX_INDENT:
            raise SecurityError("the indent or a separator of tojson is too large")
    units = weigh(value)
    if indent is not None:
        charge(units * _depth(value) * (len(indent) if isinstance(indent, str) else indent) // 4)
    return json.dumps(
        value,
        ensure_ascii=bool(ensure_ascii),
        indent=indent,
        separators=separators,
        sort_keys=bool(sort_keys),
    )


def _depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(_depth, value.values()), default=0)
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list | tuple) else 0


def _guard_filter(name: str, function: Function) -> Function:
    # Jinja passes its context, evaluation context or environment first, where a mark asks for it.
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0
    before = BEFORE.get(name)

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        charge(ELEMENT_COST)
        own = list(args[skipped:])
        if before is not None:
            before(own, kwargs)
        elif name in _COPIES and own:
            charge(ELEMENT_COST * len(own[0]) if isinstance(own[0], str) else weigh_flat(own[0]))
        elif name in _PER_WORD and own:
            charge(ELEMENT_COST * weigh(own[0]))
        elif name not in _LAZY:
            for value in (*own, *kwargs.values()):
                weigh(value)
        if name == "format" and own:
            return printf(own[0], kwargs or tuple(own[1:]))
        result = function(*args[:skipped], *own, **kwargs)
        if isinstance(result, str | list):
            weigh_flat(result)
        return result

    return guarded


def _guard_test(name: str, function: Any) -> Function:
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def guarded(*args: Any) -> Any:
        charge(ELEMENT_COST)
        if name in _COMPARES:
            for value in args[skipped:]:
                weigh(value)
        return function(*args)

    return guarded


def _weighed(value: Any) -> Any:
    weigh(value)
    return value


# Names that no template can spell; the sandbox writes them into the compiled template.
WEIGH, CONCAT, SLICE = "%weigh", "%concat", "%slice"
_INTERNAL: dict[str, Function] = {WEIGH: _weighed, CONCAT: concat, SLICE: take_slice}
