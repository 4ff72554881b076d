"""Reasoning between tags, told from the answer that follows it."""

from collections.abc import Callable
from typing import ClassVar

from ridgeline.text.output.events import Content, Event, Reasoning
from ridgeline.text.output.markers import SpaceHolder, held_length


class TaggedReasoning:
    """Reasoning at the start of the output, between two tags; whitespace around it is dropped.

    ``inside``: the prompt has opened the tag already. A model that ends its reasoning without a
    start tag is understood if the prompt opened it.
    """

    start: ClassVar[str]
    end: ClassVar[str]

    def __init__(self, *, inside: bool = False) -> None:
        self._buffer = ""
        self._space = SpaceHolder(drop_leading=True)
        self._advance: Callable[[list[Event]], bool] = self._inside if inside else self._before

    @classmethod
    def is_open(cls, prompt: str, continued: str) -> bool:
        """Whether a rendered prompt ends within reasoning.

        Its end decides, or ``continued``, the text so far of a message that the output goes on
        with: tags in other messages are only their text.
        """
        if prompt.rstrip().endswith(cls.start):
            return True
        return continued.lstrip().startswith(cls.start) and cls.end not in continued

    def push(self, text: str) -> list[Event]:
        self._buffer += text
        out: list[Event] = []
        while self._advance(out):
            pass
        return out

    def finish(self) -> list[Event]:
        text, self._buffer = self._buffer, ""
        if self._advance == self._inside:
            text = self._space.push(text)
            return [Reasoning(text)] if text else []
        return [Content(text)] if text else []

    def _before(self, out: list[Event]) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(self.start):
            self._buffer = text[len(self.start) :]
            self._advance = self._inside
            return True
        if not self.start.startswith(text):
            self._advance = self._after
            return True
        return False

    def _inside(self, out: list[Event]) -> bool:
        text, tag, rest = self._buffer.partition(self.end)
        if not tag:
            cut = len(text) - held_length(text, [self.end])
            text, rest = text[:cut], text[cut:]
        self._buffer = rest
        if shown := self._space.push(text):
            out.append(Reasoning(shown))
        if tag:
            self._advance = self._after_tag
        return bool(tag)

    def _after_tag(self, out: list[Event]) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._advance = self._after
        return bool(self._buffer)

    def _after(self, out: list[Event]) -> bool:
        if self._buffer:
            out.append(Content(self._buffer))
        self._buffer = ""
        return False


class Think(TaggedReasoning):
    """DeepSeek-R1, Qwen 3, SmolLM 3 and most others."""

    start, end = "<think>", "</think>"


class MistralThink(TaggedReasoning):
    """Magistral."""

    start, end = "[THINK]", "[/THINK]"


class SeedThink(TaggedReasoning):
    """Seed-OSS."""

    start, end = "<seed:think>", "</seed:think>"


class Granite(TaggedReasoning):
    """Granite 3.2, which uses sentences as tags."""

    start, end = "Here is my thought process:", "Here is my response:"
