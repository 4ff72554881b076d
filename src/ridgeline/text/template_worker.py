"""A process that renders chat templates, so that a template can be stopped whatever it does.

Jinja's sandbox keeps a template from Python's internals, but not from looping for ever or filling
the memory. Here the kernel sets those limits: a timer on CPU time that ends the process even inside
a long C call, and a cap on its address space.

Reads and writes frames: a 32-bit little-endian length, then JSON. The file is run by its path and
imports nothing of Ridgeline, which keeps the start short.
"""

import functools
import json
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any, BinaryIO, NoReturn

from jinja2 import Environment, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError, UndefinedError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_MESSAGE_CHARS = 200


class TemplateRaised(TemplateError):  # noqa: N818 - the template raised it, by `raise_exception`
    """The template itself refused the conversation."""


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


def environment() -> Environment:
    """The environment that transformers gives to chat templates."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: Any) -> NoReturn:
    raise TemplateRaised(str(message))


def _strftime_now(format: str) -> str:  # noqa: A002 - the name that templates know
    return datetime.now().strftime(format)


class Renderer:
    """Compiles and renders templates; the last few stay compiled."""

    def __init__(self) -> None:
        self._environment = environment()
        self._compile = functools.lru_cache(maxsize=16)(self._environment.from_string)

    def answer(self, request: dict[str, Any]) -> str:
        """The rendered text; or, without variables, whether a template iterates over content."""
        if "variables" in request:
            return self._compile(request["source"]).render(**request["variables"])
        self._compile(request["source"])
        return "parts" if takes_parts(self._environment.parse(request["source"])) else "strings"


def takes_parts(tree: nodes.Template) -> bool:
    """Whether a template iterates over content, as one that knows content parts does."""
    return any(
        (isinstance(node, nodes.Getattr) and node.attr == "content")
        or (isinstance(node, nodes.Getitem) and getattr(node.arg, "value", None) == "content")
        or (isinstance(node, nodes.Name) and node.name == "content")
        for loop in tree.find_all(nodes.For)
        for node in [loop.iter, *loop.iter.find_all((nodes.Getattr, nodes.Getitem, nodes.Name))]
    )


def reply_to(renderer: Renderer, request: dict[str, Any]) -> dict[str, str]:
    """The reply to one request: ``text``, or a ``problem`` of a kind and its message."""
    try:
        text = renderer.answer(request)
    except (MemoryError, RecursionError, OverflowError):
        return {"kind": "exceeded", "problem": ""}
    except TemplateRaised as error:
        return {"kind": "raised", "problem": (error.message or "")[:MAX_MESSAGE_CHARS]}
    except TemplateSyntaxError as error:
        message = f"(line {error.lineno}) {error.message}"
        return {"kind": "uncompiled", "problem": message[:MAX_MESSAGE_CHARS]}
    except (SecurityError, UndefinedError) as error:
        return {"kind": "failed", "problem": (error.message or "")[:MAX_MESSAGE_CHARS]}
    except Exception as error:  # its message may quote the conversation
        return {"kind": "failed", "problem": type(error).__name__}
    if len(text) > request["max_output_chars"]:
        return {"kind": "exceeded", "problem": ""}
    return {"text": text}


def limit_memory(num_bytes: int) -> None:
    """Cap the address space where the system can, and write no core files."""
    try:
        import resource
    except ImportError:  # Windows: the caller's deadline remains
        return
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def set_timer(cpu_seconds: float) -> None:
    """End the process, by SIGPROF's default action, after this much CPU time; 0 stops the timer."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)


def serve(requests: BinaryIO, replies: BinaryIO, *, cpu_seconds: float) -> None:
    """Answer requests until there are no more."""
    renderer = Renderer()
    while len(header := requests.read(4)) == 4:
        request = json.loads(requests.read(int.from_bytes(header, "little")))
        set_timer(cpu_seconds)
        reply = json.dumps(reply_to(renderer, request)).encode()
        set_timer(0)
        replies.write(len(reply).to_bytes(4, "little") + reply)
        replies.flush()


if __name__ == "__main__":
    limit_memory(int(sys.argv[1]))
    serve(sys.stdin.buffer, sys.stdout.buffer, cpu_seconds=float(sys.argv[2]))
