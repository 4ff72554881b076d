"""Parsers by name, and the choice among them by a model's chat template."""

from collections.abc import Callable, Collection, Mapping

from ridgeline.core.errors import InvalidRequestError
from ridgeline.text.output.events import Content, Event, OutputParser
from ridgeline.text.output.harmony import Harmony
from ridgeline.text.output.pythonic import Pythonic
from ridgeline.text.output.reasoning import (
    Granite,
    MistralThink,
    SeedThink,
    TaggedReasoning,
    Think,
)
from ridgeline.text.output.tool_parsers import Hermes, Llama3Json, Mistral, WholeJson

Names = Collection[str] | None

TOOL_PARSERS: Mapping[str, Callable[[Names], OutputParser]] = {
    "hermes": Hermes,
    "qwen": Hermes,
    "llama3_json": Llama3Json,
    "pythonic": Pythonic,
    "mistral": Mistral,
    "json": WholeJson,
    "harmony": Harmony,
}
REASONING_PARSERS: Mapping[str, type[TaggedReasoning] | type[Harmony]] = {
    "think": Think,
    "deepseek_r1": Think,
    "qwen3": Think,
    "mistral": MistralThink,
    "seed_oss": SeedThink,
    "granite": Granite,
    "harmony": Harmony,
}
# These read tokens that detokenizing would leave out.
_SPECIAL_TOKEN_PARSERS = frozenset({"mistral", "llama3_json", "harmony"})

_TOOL_MARKS = (
    ("<|channel|>", "harmony"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters":', "llama3_json"),
)
_REASONING_MARKS = (
    ("<|channel|>", "harmony"),
    ("[THINK]", "mistral"),
    ("<seed:think>", "seed_oss"),
    ("</think>", "think"),
    ("Here is my thought process:", "granite"),
)


def choose_tool_parser(template: str) -> str | None:
    """The parser of the calls that a chat template speaks of, ``None`` if it speaks of none."""
    if "tools" not in template:
        return None
    return next((name for mark, name in _TOOL_MARKS if mark in template), None)


def choose_reasoning_parser(template: str) -> str | None:
    """The parser of the reasoning that a chat template speaks of, if any."""
    return next((name for mark, name in _REASONING_MARKS if mark in template), None)


def reads_special_tokens(tool_parser: str | None, reasoning_parser: str | None) -> bool:
    """Whether these parsers need tokens that detokenizing leaves out by default."""
    return not _SPECIAL_TOKEN_PARSERS.isdisjoint((tool_parser, reasoning_parser))


def output_parser(
    *,
    tool_parser: str | None,
    reasoning_parser: str | None,
    names: Names,
    prompt: str,
    continued: str = "",
) -> OutputParser:
    """A parser for one output.

    ``tool_parser``: ``None`` leaves calls in the text. ``names``: tools that may be called,
    ``None`` for any. ``prompt``: the rendered prompt, whose end may have opened the reasoning.
    ``continued``: the text of its last message, where the output goes on with that.

    Raises:
        InvalidRequestError: there is no such parser.
    """
    for name, parsers in ((tool_parser, TOOL_PARSERS), (reasoning_parser, REASONING_PARSERS)):
        if name is not None and name not in parsers:
            known = ", ".join(parsers)
            raise InvalidRequestError(f"There is no output parser {name!r}; there are {known}.")
    if "harmony" in (tool_parser, reasoning_parser):
        return Harmony(names if tool_parser == "harmony" else ())
    tools = TOOL_PARSERS[tool_parser](names) if tool_parser else _Plain()
    if reasoning_parser is None:
        return tools
    kind = REASONING_PARSERS[reasoning_parser]
    assert issubclass(kind, TaggedReasoning)
    return _Chain(kind(inside=kind.is_open(prompt, continued)), tools)


class _Plain:
    """All of it is content."""

    def push(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []


class _Chain:
    """The content of one parser is the text of the next."""

    def __init__(self, first: OutputParser, second: OutputParser) -> None:
        self._first, self._second = first, second

    def push(self, text: str) -> list[Event]:
        return self._pass_on(self._first.push(text))

    def finish(self) -> list[Event]:
        return self._pass_on(self._first.finish()) + self._second.finish()

    def _pass_on(self, events: list[Event]) -> list[Event]:
        out: list[Event] = []
        for event in events:
            out += self._second.push(event.text) if isinstance(event, Content) else [event]
        return out
