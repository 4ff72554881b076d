"""Tool calls written as a Python list of calls: ``[f(a=1, b="x"), g()]``."""

import json
from collections.abc import Collection

from ridgeline.text.output.events import Event, ToolArguments, ToolCall
from ridgeline.text.output.json_calls import content
from ridgeline.text.output.literals import literal
from ridgeline.text.output.tool_parsers import known_tools

_MAX_DEPTH = 64
_MAX_ARGUMENT_CHARS = 1 << 16


class Pythonic:
    """Llama 3.2 and 4. An argument is given out once it is complete, as JSON.

    The text is parsed, never run: literals, lists, dictionaries and signs are all that is taken.
    """

    def __init__(self, names: Collection[str] | None) -> None:
        self._is_tool = known_tools(names)
        self._index = 0
        self._is_content = False
        self._pending = ""  # since the last thing that was given out
        self._state = "start"
        self._piece = ""  # a name, or one argument
        self._scan = _Scan()
        self._arguments = 0

    def push(self, text: str) -> list[Event]:
        if self._is_content:
            return content(text)
        out: list[Event] = []
        for position, char in enumerate(text):
            self._pending += char
            if not self._feed(char, out):
                self._is_content = True
                rest, self._pending = self._pending + text[position + 1 :], ""
                return out + content(rest)
        return out

    def finish(self) -> list[Event]:
        if self._is_content or self._index or self._state == "arguments":
            return []
        return content(self._pending)

    def _feed(self, char: str, out: list[Event]) -> bool:
        """Take one character; False if the text is not a list of calls."""
        if self._state == "start":
            if char == "[":
                self._state = "name"
            return char == "[" or char.isspace()
        if self._state == "name":
            return self._name(char, out)
        if self._state == "arguments":
            return self._argument(char, out)
        if self._state == "between":
            if char == ",":
                self._state = "name"
            elif char == "]":
                self._state = "end"
            return char in ",]" or char.isspace()
        return char.isspace()

    def _name(self, char: str, out: list[Event]) -> bool:
        if char != "(":
            self._piece += char
            spelling = self._piece.strip().replace(".", "_").replace("-", "_")
            return not spelling or spelling.isidentifier()
        name, self._piece = self._piece.strip(), ""
        if not name or not self._is_tool(name):
            return False
        out.append(ToolCall(self._index, name))
        out.append(ToolArguments(self._index, "{"))
        self._state, self._pending, self._arguments, self._scan = "arguments", "", 0, _Scan()
        return True

    def _argument(self, char: str, out: list[Event]) -> bool:
        if not (self._scan.is_outside and char in ",)"):
            self._piece += char
            return self._scan.feed(char) and len(self._piece) <= _MAX_ARGUMENT_CHARS
        piece, self._piece = self._piece.strip(), ""
        if piece:
            name, equals, value = piece.partition("=")
            try:
                text = json.dumps(literal(value.strip()), ensure_ascii=False, allow_nan=False)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                return False
            if not equals or not name.strip().isidentifier():
                return False
            comma = ", " if self._arguments else ""
            out.append(ToolArguments(self._index, f"{comma}{json.dumps(name.strip())}: {text}"))
            self._arguments += 1
        self._pending = ""
        if char == ")":
            out.append(ToolArguments(self._index, "}"))
            self._index += 1
            self._state = "between"
        return True


class _Scan:
    """Follows brackets and quotes."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._escaped = False

    @property
    def is_outside(self) -> bool:
        return not self._depth and not self._quote

    def feed(self, char: str) -> bool:
        """Take one character; False where brackets do not pair or nest too deep."""
        if self._quote:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == self._quote:
                self._quote = ""
        elif char in "\"'":
            self._quote = char
        elif char in "([{":
            self._depth += 1
        elif char in ")]}":
            self._depth -= 1
        return 0 <= self._depth <= _MAX_DEPTH
