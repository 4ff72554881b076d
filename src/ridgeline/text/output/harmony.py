"""gpt-oss: channels of reasoning, commentary, answers and calls."""

from collections.abc import Collection

from ridgeline.text.output.events import Content, Event, Reasoning, ToolArguments, ToolCall
from ridgeline.text.output.markers import find_first, held_length
from ridgeline.text.output.tool_parsers import known_tools

_MARK = "<|"  # how every mark begins
_MESSAGE = "<|message|>"
_BODY_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_RECIPIENT = "to=functions."


class Harmony:
    """``<|channel|>analysis<|message|>…<|end|>``, one message after the other.

    The channel ``analysis`` is reasoning; a message to ``functions.NAME`` is a call; the rest is
    content. A header runs from the end of one message to the ``<|message|>`` of the next.
    """

    def __init__(self, names: Collection[str] | None) -> None:
        self._is_tool = known_tools(names)
        self._buffer = ""
        self._kind: str | None = None  # of the message that is being read; None in a header
        self._next_index = 0
        self._plain = False

    def push(self, text: str) -> list[Event]:
        self._buffer += text
        out: list[Event] = []
        while self._header(out) if self._kind is None else self._body(out):
            pass
        return out

    def finish(self) -> list[Event]:
        text, self._buffer = self._buffer, ""
        out: list[Event] = []
        if self._kind is not None:
            self._give(text, out)
        elif text and not text.lstrip().startswith(_MARK):
            out.append(Content(text))
        return out

    def _header(self, out: list[Event]) -> bool:
        start = self._buffer.lstrip()[: len(_MARK)]
        if not _MARK.startswith(start):
            self._kind = "content"  # text without a header
            return True
        header, mark, rest = self._buffer.partition(_MESSAGE)
        if not mark:
            return False
        self._buffer = rest
        if _RECIPIENT in header:
            name = header.partition(_RECIPIENT)[2].split("<|")[0].split()[:1]
            if name and self._is_tool(name[0]):
                self._kind = "call"
                out.append(ToolCall(self._next_index, name[0]))
                return True
        self._kind = "reasoning" if "<|channel|>analysis" in header else "content"
        return True

    def _body(self, out: list[Event]) -> bool:
        found = find_first(self._buffer, _BODY_ENDS)
        if found is None:
            cut = len(self._buffer) - held_length(self._buffer, _BODY_ENDS)
            self._give(self._buffer[:cut], out)
            self._buffer = self._buffer[cut:]
            return False
        start, mark = found
        self._give(self._buffer[:start], out)
        opens = mark in ("<|start|>", "<|channel|>")
        self._buffer = self._buffer[start if opens else start + len(mark) :]
        self._next_index += self._kind == "call"
        self._kind = None
        return bool(self._buffer)

    def _give(self, text: str, out: list[Event]) -> None:
        if not text:
            return
        if self._kind == "call":
            out.append(ToolArguments(self._next_index, text))
        else:
            out.append(Reasoning(text) if self._kind == "reasoning" else Content(text))
