"""The functions and tags that transformers gives to chat templates."""

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.utils import Namespace

_MAX_DATE_FORMAT_CHARS = 256


class TemplateRaised(TemplateError):  # noqa: N818 - the template made it
    """The template itself refused the conversation, by ``raise_exception``."""


def raise_exception(message: Any) -> NoReturn:
    """Refuse the conversation, with the template's own words."""
    raise TemplateRaised(str(message)[:1000])


def strftime_now(format: str) -> str:  # noqa: A002 - the name that templates know
    """Return the local time by a format of ``strftime``."""
    if len(format) > _MAX_DATE_FORMAT_CHARS or any(char.isdigit() for char in format):
        raise SecurityError("the format of a date is too large")
    return datetime.now().strftime(format)


class TemplateDict:
    """``dict`` in a template: makes dictionaries, and has no other attributes to climb by."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class TemplateNamespace(Namespace):
    """``namespace`` in a template; keeps no names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # Jinja's own signature, so that namespace(self=...) works.
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError("a namespace cannot hold names that begin with an underscore")


class GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}``: marks the assistant's words; renders its body."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Make a call block, which has a scope of its own, as in transformers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("render"), [], [], body).set_lineno(line)

    def render(self, caller: Callable[[], str]) -> str:
        """Return the rendered body."""
        return caller()
