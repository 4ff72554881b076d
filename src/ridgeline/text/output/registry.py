"""Parsers by name, and the choice among them by a model's chat template."""

import re
from collections.abc import Callable, Mapping
from functools import lru_cache

from ridgeline.core.errors import InvalidRequestError
from ridgeline.text.output.events import Content, Event, OutputParser
from ridgeline.text.output.harmony import Harmony
from ridgeline.text.output.pythonic import Pythonic
from ridgeline.text.output.qwen3_coder import Qwen3Coder, Tools
from ridgeline.text.output.reasoning import (
    Granite,
    MistralThink,
    SeedThink,
    TaggedReasoning,
    Think,
)
from ridgeline.text.output.tool_parsers import Hermes, Llama3Json, Mistral, WholeJson

TOOL_PARSERS: Mapping[str, Callable[[Tools | None], OutputParser]] = {
    "hermes": Hermes,
    "qwen": Hermes,
    "qwen3_coder": Qwen3Coder,
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

# The first whose pattern is in a template is its parser; None: a form that none of them reads.
_TOOL_MARKS: tuple[tuple[str, str | None], ...] = (
    (r"<\|channel\|>", "harmony"),
    (r"\[TOOL_CALLS\]", "mistral"),
    (r"<tool_call>(?s:.*)<parameter=", "qwen3_coder"),
    (r"<tool_call>(?s:.*)<(arg_key>|function=|invoke\b)", None),  # GLM 4.5 and others
    (r"<tool_call>", "hermes"),
    (r"\[func_name1\(", "pythonic"),
    (r"tool▁call|START_ACTION|tool_calls?\w*\|?>", None),
    (r"<\|python_tag\|>", "llama3_json"),
    (r'"parameters":', "llama3_json"),
)
_REASONING_MARKS = (
    ("<|channel|>", "harmony"),
    ("[THINK]", "mistral"),
    ("<seed:think>", "seed_oss"),
    ("</think>", "think"),
    ("Here is my thought process:", "granite"),
)


@lru_cache(maxsize=16)
def choose_tool_parser(template: str) -> str | None:
    """The parser of the calls that a chat template speaks of.

    ``None`` if it speaks of none, or of calls in a form that is not known.
    """
    if "tools" not in template:
        return None
    return next((name for mark, name in _TOOL_MARKS if re.search(mark, template)), None)


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
    tools: Tools | None,
    prompt: str,
    continued: str = "",
) -> OutputParser:
    """A parser for one output.

    ``tool_parser``: ``None`` leaves calls in the text. ``tools``: the JSON Schemas of the
    arguments of those that may be called, by name; ``None`` for any. ``prompt``: the rendered
    prompt, whose end may have opened the reasoning. ``continued``: the text of its last
    message, where the output goes on with that.

    Raises:
        InvalidRequestError: there is no such parser.
    """
    for name, parsers in ((tool_parser, TOOL_PARSERS), (reasoning_parser, REASONING_PARSERS)):
        if name is not None and name not in parsers:
            known = ", ".join(parsers)
            raise InvalidRequestError(f"There is no output parser {name!r}; there are {known}.")
    if "harmony" in (tool_parser, reasoning_parser):
        return Harmony(tools if tool_parser == "harmony" else ())
    calls = TOOL_PARSERS[tool_parser](tools) if tool_parser else _Plain()
    if reasoning_parser is None:
        return calls
    kind = REASONING_PARSERS[reasoning_parser]
    assert issubclass(kind, TaggedReasoning)
    return _Chain(kind(inside=kind.is_open(prompt, continued)), calls)


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
