"""Tool calls in JSON: between tags, after a marker, or as the whole output."""

from collections.abc import Callable, Collection
from typing import ClassVar, Protocol

from ridgeline.text.output.events import Event, ToolArguments, ToolCall
from ridgeline.text.output.json_calls import IsTool, JsonCalls, JsonExtent, content
from ridgeline.text.output.markers import SpaceHolder, find_first, held_length

MAX_NAME_CHARS = 256


def known_tools(names: Collection[str] | None) -> IsTool:
    """Says whether a name is a tool's; without names any is."""
    return (lambda _: True) if names is None else frozenset(names).__contains__


class CallReader(Protocol):
    """Reads the calls after a marker; ``next_index`` grows with each."""

    next_index: int

    def feed(self, text: str, out: list[Event]) -> str | None:
        """Take text; return what follows the calls once they are over."""

    def finish(self) -> str:
        """What was held back of text that is not a call."""


class TaggedCalls:
    """Calls after a marker, up to an end marker if there is one; content around them."""

    start: ClassVar[str]
    end: ClassVar[str | None] = None

    def __init__(self, names: Collection[str] | None) -> None:
        self._is_tool = known_tools(names)
        self._buffer = ""
        self._space = SpaceHolder()
        self._calls: CallReader | None = None
        self._next_index = 0
        self._advance: Callable[[list[Event]], bool] = self._read_content

    def push(self, text: str) -> list[Event]:
        out: list[Event] = []
        self._buffer += text
        while self._advance(out):
            pass
        return out

    def finish(self) -> list[Event]:
        if self._calls is not None:
            rest = self._calls.finish()
            if self._calls.next_index == self._next_index:
                self._buffer = self.start + rest
            self._next_index = self._calls.next_index
        elif self._advance == self._read_end:
            self._buffer = ""  # the beginning of the end marker
        text = self._space.push(self._buffer)
        return content(text if self._next_index else text + self._space.flush())

    def _reader(self) -> CallReader:
        return JsonCalls(self._next_index, self._is_tool)

    def _read_content(self, out: list[Event]) -> bool:
        """Pass content on up to the marker; False where more text is needed."""
        found = find_first(self._buffer, [self.start])
        if found is None:
            cut = len(self._buffer) - held_length(self._buffer, [self.start])
            out += content(self._space.push(self._buffer[:cut]))
            self._buffer = self._buffer[cut:]
            return False
        out += content(self._space.push(self._buffer[: found[0]]))
        self._buffer = self._buffer[found[0] + len(self.start) :]
        self._calls, self._advance = self._reader(), self._read_calls
        return True

    def _read_calls(self, out: list[Event]) -> bool:
        assert self._calls is not None
        events: list[Event] = []
        rest = self._calls.feed(self._buffer, events)
        out += events
        self._buffer = rest or ""
        if rest is None:
            return False
        is_call = self._calls.next_index > self._next_index
        self._next_index, self._calls = self._calls.next_index, None
        if is_call:
            self._space = SpaceHolder(drop_leading=True)
            self._advance = self._read_end if self.end else self._read_content
        else:  # the marker was only text
            out += content(self._space.push(self.start))
            self._advance = self._read_content
        return True

    def _read_end(self, out: list[Event]) -> bool:
        assert self.end is not None
        text = self._buffer.lstrip()
        if len(text) < len(self.end) and self.end.startswith(text):
            return False
        self._buffer = text.removeprefix(self.end)
        self._advance = self._read_content
        return True


class Hermes(TaggedCalls):
    """``<tool_call>{…}</tool_call>``: Hermes, Qwen 2.5 and 3."""

    start = "<tool_call>"
    end = "</tool_call>"


class Mistral(TaggedCalls):
    """``[TOOL_CALLS] [{…}, …]``, or ``[TOOL_CALLS]name[ARGS]{…}`` in later templates."""

    start = "[TOOL_CALLS]"

    def _reader(self) -> CallReader:
        return _MistralCalls(self._next_index, self._is_tool)


class _MistralCalls:
    """Chooses between the two forms by the first character."""

    def __init__(self, first_index: int, is_tool: IsTool) -> None:
        self.next_index = first_index
        self._is_tool = is_tool
        self._lead = ""
        self._inner: CallReader | None = None

    def feed(self, text: str, out: list[Event]) -> str | None:
        if self._inner is None:
            self._lead += text
            body = self._lead.lstrip()
            if not body:
                return None
            kind = JsonCalls if body[0] in "[{" else NamedCall
            self._inner = kind(self.next_index, self._is_tool)
            text = self._lead
        rest = self._inner.feed(text, out)
        self.next_index = self._inner.next_index
        return rest

    def finish(self) -> str:
        if self._inner is None:
            return self._lead
        rest = self._inner.finish()
        self.next_index = self._inner.next_index
        return rest


class NamedCall:
    """``name[CALL_ID]id[ARGS]{…}``; the middle parts may be missing."""

    def __init__(self, first_index: int, is_tool: IsTool) -> None:
        self.next_index = first_index
        self._is_tool = is_tool
        self._head = ""
        self._extent: JsonExtent | None = None

    def feed(self, text: str, out: list[Event]) -> str | None:
        if self._extent is None:
            self._head += text
            head, brace, text = self._head.partition("{")
            name = head.partition("[")[0].strip()
            if not brace:
                return None if len(head) <= MAX_NAME_CHARS else head
            if len(head) > MAX_NAME_CHARS or not self._is_tool(name):
                return self._head
            out.append(ToolCall(self.next_index, name))
            self._extent, text = JsonExtent(), brace + text
        for position, char in enumerate(text):
            if self._extent.feed(char):
                out.append(ToolArguments(self.next_index, text[: position + 1]))
                self.next_index += 1
                return text[position + 1 :]
        if text:
            out.append(ToolArguments(self.next_index, text))
        return None

    def finish(self) -> str:
        if self._extent is None:
            return self._head
        self.next_index += 1
        return ""


class WholeJson:
    """The output is one call or several, from its first character, or it is all content."""

    marker: ClassVar[str] = ""

    def __init__(self, names: Collection[str] | None) -> None:
        self._calls = JsonCalls(0, known_tools(names), strict=True)
        self._lead = ""
        self._space = SpaceHolder()
        self._advance: Callable[[str], list[Event]] = self._open

    def push(self, text: str) -> list[Event]:
        return self._advance(text)

    def finish(self) -> list[Event]:
        if self._advance == self._open:
            return content(self._lead)
        rest = self._calls.finish() if self._advance == self._read else ""
        if self._calls.next_index == 0:
            return content(self._space.push(self._lead + rest) + self._space.flush())
        return []

    def _open(self, text: str) -> list[Event]:
        self._lead += text
        body = self._lead.lstrip()
        if len(body) < len(self.marker) and self.marker.startswith(body):
            return []
        body = body.removeprefix(self.marker).lstrip()
        if not body:
            return []
        if body[0] not in "{[":
            body, self._lead, self._advance = self._lead, "", self._read_content
        else:
            self._lead = self._lead[: len(self._lead) - len(body)]
            self._advance = self._read
        return self._advance(body)

    def _read(self, text: str) -> list[Event]:
        out: list[Event] = []
        rest = self._calls.feed(text, out)
        if rest is None:
            return out
        if self._calls.next_index == 0:
            rest = self._lead + rest
        self._lead, self._advance = "", self._read_content
        return out + self._read_content(rest)

    def _read_content(self, text: str) -> list[Event]:
        return content(self._space.push(text))


class Llama3Json(WholeJson):
    """``{"name": …, "parameters": {…}}``, ``;`` between several, perhaps after a marker."""

    marker = "<|python_tag|>"
