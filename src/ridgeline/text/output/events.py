"""What an output parser yields, and the contract of a parser."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote to itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call begins; its arguments follow. ``index`` counts the calls of one output."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


Event = Content | Reasoning | ToolCall | ToolArguments


class OutputParser(Protocol):
    """Splits one output into events; holds the state of one stream.

    Joined per kind and call, the events are the same however the text is cut into pieces. Text that
    has the form of no call is content: nothing that the model wrote is lost without a trace.
    """

    def push(self, text: str) -> list[Event]:
        """Take the next piece of text; return what it settles."""

    def finish(self) -> list[Event]:
        """Return what was held back; the output is over."""
