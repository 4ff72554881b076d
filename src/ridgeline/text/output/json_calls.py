"""Tool calls written as JSON, ``{"name": …, "arguments": {…}}``, read a character at a time."""

import json
from collections.abc import Callable

from ridgeline.text.output.events import Content, Event, ToolArguments, ToolCall

_ARGUMENT_KEYS = ("arguments", "parameters")
_CALL_KEYS = frozenset({*_ARGUMENT_KEYS, "name", "function", "type", "id", "index"})
_CALL_TYPES = ("function", "function_call", "tool_call")
_NULL = "null"
_SPACE = " \t\r\n"
IsTool = Callable[[str], bool]


class JsonExtent:
    """Follows one JSON array, object or string to its end."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    @property
    def is_outside(self) -> bool:
        return self._depth == 0 and not self._in_string

    def feed(self, char: str) -> bool:
        """Take one character; True if it is the value's last."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        return char in '"}]' and self.is_outside


class JsonCall:
    """One object. The name is announced where the arguments begin, which then stream.

    Arguments that come before the name wait for it. A call that is wrapped in a ``function`` object
    (as the API writes calls) is found as well. ``failed`` is set where the text is not a call of a
    known tool; with ``strict``, also where what comes before the arguments is nothing that a call
    has, as in most data with a name, or in the definition of a tool whose description comes before
    its parameters. A definition without one reads as a call.
    """

    def __init__(self, index: int, is_tool: IsTool, *, strict: bool = False) -> None:
        self.index = index
        self.done = self.failed = self.announced = False
        self.raw: list[str] = []
        self._is_tool = is_tool
        self._strict = strict
        self._state: Callable[[str, list[Event]], None] = self._open
        self._key = ""
        self._text: list[str] = []  # of the key, or of a value that is read whole
        self._wrappers = 0
        self._name: str | None = None
        self._waiting: list[str] = []  # arguments before the name
        self._has_arguments = False
        self._extent = JsonExtent()
        self._is_arguments = self._streams = False

    def feed(self, char: str, out: list[Event]) -> None:
        """Take one character; what it settles is appended to ``out``."""
        self.raw.append(char)
        self._state(char, out)

    def _open(self, char: str, out: list[Event]) -> None:
        if char == "{":
            self._state = self._before_key
        elif char not in _SPACE:
            self.failed = True

    def _before_key(self, char: str, out: list[Event]) -> None:
        if char == '"':
            self._text, self._extent = [char], JsonExtent()
            self._extent.feed(char)
            self._state = self._in_key
        elif char == "}":
            self._close(out)
        elif char not in _SPACE and char != ",":
            self.failed = True

    def _in_key(self, char: str, out: list[Event]) -> None:
        self._text.append(char)
        if self._extent.feed(char):
            self._key = _string("".join(self._text)) or ""
            self._state = self._before_value
            is_foreign = self._key not in _CALL_KEYS
            self.failed = self._strict and is_foreign and not self.announced

    def _before_value(self, char: str, out: list[Event]) -> None:
        if char in _SPACE or char == ":":
            return
        if char in "},]":
            self.failed = True
            return
        if self._key == "function" and char == "{":
            self._wrappers += 1
            self._state = self._before_key
            return
        self._text, self._extent = [], JsonExtent()
        self._is_arguments = self._key in _ARGUMENT_KEYS and not self._has_arguments
        self._streams = self._is_arguments and char == "{"
        if self._streams:
            self._begin_arguments(out)
        self._state = self._in_value
        self._in_value(char, out)

    def _in_value(self, char: str, out: list[Event]) -> None:
        if char in ",}" and self._text and self._extent.is_outside:
            self._end_value(out)  # the end of a number, true, false or null
            self._state = self._before_key
            if char == "}" and not self.failed:
                self._close(out)
            return
        self._text.append(char)
        if self._streams:
            self._arguments(char, out)
        if self._extent.feed(char):
            self._end_value(out)
            self._state = self._before_key

    def _end_value(self, out: list[Event]) -> None:
        text = "".join(self._text)
        if self._key == "name" and self._name is None:
            self._name = _string(text)
            if self._name is None or not self._is_tool(self._name):
                self.failed = True
            elif self._has_arguments:
                self._announce(out)
        elif self._is_arguments and not self._streams and text != _NULL:
            inner = _object_text(text)
            if inner is None:
                self.failed = True
                return
            self._begin_arguments(out)
            self._arguments(inner, out)
        elif self._key == "type" and self._strict and not self.announced:
            self.failed = _string(text) not in _CALL_TYPES

    def _begin_arguments(self, out: list[Event]) -> None:
        self._has_arguments = True
        if self._name is not None:
            self._announce(out)

    def _announce(self, out: list[Event]) -> None:
        assert self._name is not None
        self.announced = True
        out.append(ToolCall(self.index, self._name))
        if self._waiting:
            out.append(ToolArguments(self.index, "".join(self._waiting)))
            self._waiting = []

    def _arguments(self, text: str, out: list[Event]) -> None:
        if self.announced:
            out.append(ToolArguments(self.index, text))
        else:
            self._waiting.append(text)

    def _close(self, out: list[Event]) -> None:
        if self._wrappers:
            self._wrappers -= 1
            self._state = self._before_key
            return
        if self._name is None:
            self.failed = True
            return
        if not self.announced:
            self._announce(out)
            out.append(ToolArguments(self.index, "{}"))
        self.done = True


class JsonCalls:
    """One call, several one after the other (parted by ``;``, ``,`` or space), or an array of them.

    ``feed`` returns the text after the last call once the calls are over, ``None`` until then.
    ``strict`` is that of `JsonCall`.
    """

    def __init__(self, first_index: int, is_tool: IsTool, *, strict: bool = False) -> None:
        self.next_index = first_index
        self._is_tool = is_tool
        self._strict = strict
        self._call: JsonCall | None = None
        self._between = ""
        self._in_array = False

    def feed(self, text: str, out: list[Event]) -> str | None:
        """Take text; events are appended to ``out``."""
        rest = self._feed(text, out)
        join_arguments(out)
        return rest

    def _feed(self, text: str, out: list[Event]) -> str | None:
        for position, char in enumerate(text):
            if self._call is None and (rest := self._outside(char)) is not None:
                return rest + text[position + 1 :]
            if self._call is not None:
                self._call.feed(char, out)
                if self._call.failed:
                    return self._give_up() + text[position + 1 :]
                if self._call.done:
                    self.next_index += 1
                    self._call, self._between = None, ""
        return None

    def finish(self) -> str:
        """What was held back of text that is not a call."""
        return self._between if self._call is None else self._give_up()

    def _outside(self, char: str) -> str | None:
        if char == "{":
            self._call = JsonCall(self.next_index, self._is_tool, strict=self._strict)
            return None
        self._between += char
        if char == "[" and not self._in_array:
            self._in_array = True
        elif char == "]" and self._in_array:
            return ""
        elif char not in _SPACE and char not in ",;":
            return self._between
        return None

    def _give_up(self) -> str:
        """The text of a call that is none; what has been announced stays announced."""
        assert self._call is not None
        if self._call.announced:
            self.next_index += 1
            return ""
        return self._between + "".join(self._call.raw)


def join_arguments(out: list[Event]) -> None:
    """Join neighbouring pieces of one call's arguments, in place."""
    joined: list[Event] = []
    for event in out:
        last = joined[-1] if joined else None
        if (
            isinstance(event, ToolArguments)
            and isinstance(last, ToolArguments)
            and last.index == event.index
        ):
            joined[-1] = ToolArguments(event.index, last.text + event.text)
        else:
            joined.append(event)
    out[:] = joined


def content(text: str) -> list[Event]:
    """The text as an event, if there is any."""
    return [Content(text)] if text else []


def _string(text: str) -> str | None:
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None


def _object_text(text: str) -> str | None:
    """The JSON of an object that is written within a string, ``None`` for anything else."""
    inner = _string(text)
    if inner is None or not inner.strip():
        return None if inner is None else "{}"
    try:
        return inner if isinstance(json.loads(inner, strict=False), dict) else None
    except (ValueError, RecursionError):
        return None
