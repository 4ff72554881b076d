"""Tool calls with their arguments between tags: Qwen3-Coder and the models that follow it."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from ridgeline.text.output.argument_types import argument_types, as_json
from ridgeline.text.output.events import Event, ToolArguments, ToolCall
from ridgeline.text.output.json_calls import join_arguments
from ridgeline.text.output.markers import find_first, held_length
from ridgeline.text.output.tool_parsers import MAX_NAME_CHARS, CallReader, TaggedCalls, known_tools

Tools = Mapping[str, Mapping[str, Any]]

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_BETWEEN = (_PARAMETER, _FUNCTION_END, _CALL_END)
# A value may have a tag in it: what ends it is followed by the next one.
_VALUE_ENDS = (
    *((_PARAMETER_END, then) for then in _BETWEEN),
    (_FUNCTION_END, _CALL_END),
)


class Qwen3Coder(TaggedCalls):
    """``<tool_call><function=f><parameter=x>…</parameter></function></tool_call>``.

    Arguments are plain text, a line break before and after each; they become JSON of the types that
    the tool's schema names. Text streams; what has another type is given out once it is complete.
    """

    start, end = _CALL, _CALL_END

    def __init__(self, tools: Tools | None) -> None:
        super().__init__(tools)
        self._tools = tools

    def _reader(self) -> CallReader:
        return _FunctionCalls(self._next_index, self._tools)


class _FunctionCalls:
    """What is between ``<tool_call>`` and its end: one call, or several one after the other."""

    def __init__(self, first_index: int, tools: Tools | None) -> None:
        self.next_index = first_index
        self._tools = tools or {}
        self._is_tool = known_tools(tools)
        self._buffer = ""
        self._advance: Callable[[list[Event]], bool] = self._open
        self._is_over = False
        self._parameters: Mapping[str, Any] = {}
        self._num_arguments = 0
        self._value = _Value(frozenset())

    def feed(self, text: str, out: list[Event]) -> str | None:
        self._buffer += text
        while not self._is_over and self._advance(out):
            pass
        join_arguments(out)
        return self._buffer if self._is_over else None

    def finish(self) -> str:
        if self._advance == self._open:
            return self._buffer
        self.next_index += 1  # cut short
        return ""

    def _open(self, out: list[Event]) -> bool:
        text = self._buffer.lstrip()
        if not text.startswith(_FUNCTION):
            self._is_over = not _FUNCTION.startswith(text)
            return False
        name, mark, rest = text.removeprefix(_FUNCTION).partition(">")
        if not mark and len(name) <= MAX_NAME_CHARS:
            return False
        if not mark or not self._is_tool(name):
            self._is_over = True
            return False
        out.append(ToolCall(self.next_index, name))
        self._give("{", out)
        self._parameters, self._num_arguments = self._tools.get(name, {}), 0
        self._buffer, self._advance = rest, self._between
        return True

    def _between(self, out: list[Event]) -> bool:
        found = find_first(self._buffer, _BETWEEN)
        if found is None:
            self._buffer = self._buffer[len(self._buffer) - held_length(self._buffer, _BETWEEN) :]
            return False
        start, mark = found
        rest = self._buffer[start + len(mark) :]
        if mark != _PARAMETER:
            self._give("}", out)
            self.next_index += 1
            self._buffer = rest if mark == _FUNCTION_END else self._buffer[start:]
            self._advance = self._open
            return True
        name, mark, rest = rest.partition(">")
        if not mark:
            return False
        comma = ", " if self._num_arguments else ""
        self._give(f"{comma}{json.dumps(name, ensure_ascii=False)}: ", out)
        self._num_arguments += 1
        self._value = _Value(argument_types(self._parameters, name))
        self._buffer, self._advance = rest, self._in_value
        return True

    def _in_value(self, out: list[Event]) -> bool:
        text, bracket, rest = self._buffer.partition("<")
        self._give(self._value.push(text), out)
        self._buffer = bracket + rest
        if not bracket or (is_end := _ends_value(self._buffer)) is None:
            return False
        if is_end:
            self._give(self._value.end(), out)
            self._advance = self._between
        else:
            self._give(self._value.push(bracket), out)
            self._buffer = rest
        return True

    def _give(self, text: str, out: list[Event]) -> None:
        if text:
            out.append(ToolArguments(self.next_index, text))


class _Value:
    """One argument, from text to JSON."""

    def __init__(self, types: frozenset[str]) -> None:
        self._types = types
        self._streams = types == {"string"}
        self._is_first = True
        self._held = ""  # a line break that may be the last, or all of what does not stream
        self._num_given = 0

    def push(self, text: str) -> str:
        """Take text; return the JSON that it settles."""
        if self._is_first and text:
            self._is_first = False
            text = text.removeprefix("\n")
        text = self._held + text
        kept = text.removesuffix("\n") if self._streams else ""
        self._held = text[len(kept) :]
        return self._quoted(kept) if kept else ""

    def end(self) -> str:
        """The rest of the JSON."""
        if not self._streams:
            return as_json(self._held.removesuffix("\n"), self._types)
        return self._quoted("") + '"'

    def _quoted(self, text: str) -> str:
        """A piece of a JSON string; the first has its opening quote."""
        quote = "" if self._num_given else '"'
        self._num_given += 1
        return quote + json.dumps(text, ensure_ascii=False)[1:-1]


def _ends_value(text: str) -> bool | None:
    """Whether a value ends where ``text``, which begins with ``<``, begins; None: not yet known."""
    is_open = False
    for first, then in _VALUE_ENDS:
        if text.startswith(first):
            rest = text.removeprefix(first).lstrip()
            if rest.startswith(then):
                return True
            is_open |= then.startswith(rest)
        else:
            is_open |= first.startswith(text)
    return None if is_open else False
