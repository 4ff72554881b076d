"""An answer on the terminal while it streams: Markdown, and the model's reasoning folded."""

import time
from typing import Protocol, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

_FENCES = ("```", "~~~")
_TAIL_LINES = 4  # of the reasoning, while it goes on


class AnswerView(Protocol):
    """Where the pieces of an answer go; a context manager around one answer."""

    def add(self, text: str) -> None: ...

    def add_reasoning(self, text: str) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class PlainView:
    """The text as it is, in pipes and wherever Markdown is not wanted."""

    def __init__(self, console: Console, *, shows_reasoning: bool = False) -> None:
        self._console = console
        self._shows_reasoning = shows_reasoning

    def add(self, text: str) -> None:
        self._console.out(text, end="", highlight=False)

    def add_reasoning(self, text: str) -> None:
        if self._shows_reasoning:
            self.add(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._console.out("")


class MarkdownView:
    """Each block of Markdown is printed for good when it is whole; what is not yet is redrawn.

    So no more than a block is drawn twice, and what has scrolled away stays right. Reasoning
    becomes one line with its seconds, unless ``shows_reasoning``.
    """

    def __init__(self, console: Console, *, shows_reasoning: bool = False) -> None:
        self._console = console
        self._shows_reasoning = shows_reasoning
        self._pending = ""
        self._reasoning = ""
        self._reasoning_since_s = 0.0
        self._live = Live(console=console, transient=True, auto_refresh=False)

    def add(self, text: str) -> None:
        self._fold_reasoning()
        self._pending += text
        whole, self._pending = split_blocks(self._pending)
        if whole:
            self._draw(Text(""))
            self._console.print(Markdown(whole))
            self._console.print()
        self._draw(Markdown(self._tail(self._pending)))

    def add_reasoning(self, text: str) -> None:
        if not self._reasoning:
            self._reasoning_since_s = time.monotonic()
        self._reasoning += text
        lines = self._reasoning.strip().splitlines()
        shown = lines if self._shows_reasoning else lines[-_TAIL_LINES:]
        self._draw(Text("\n".join(["thinking …", *shown[-self._room :]]), style="dim italic"))

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._fold_reasoning()
        self._draw(Text(""))
        self._live.stop()
        if self._pending.strip():
            self._console.print(Markdown(self._pending))

    def _fold_reasoning(self) -> None:
        if not self._reasoning:
            return
        seconds = time.monotonic() - self._reasoning_since_s
        head = f"▸ thought for {seconds:.1f} s, {len(self._reasoning.split()):,} words"
        text = f"{head}\n{self._reasoning.strip()}" if self._shows_reasoning else head
        self._draw(Text(""))
        self._console.print(Text(text, style="dim italic"))
        self._reasoning = ""

    def _draw(self, shown: RenderableType) -> None:
        self._live.update(shown, refresh=True)

    @property
    def _room(self) -> int:
        return max(1, self._console.height - 3)

    def _tail(self, text: str) -> str:
        """What of an unfinished block has room on the screen, its end."""
        lines = text.splitlines()
        if len(lines) <= self._room:
            return text
        head = [lines[0]] if lines[0].lstrip().startswith(_FENCES) else []
        return "\n".join([*head, *lines[-self._room + len(head) :]])


def split_blocks(text: str) -> tuple[str, str]:
    """Markdown up to the last blank line outside code, and what follows it."""
    fence = ""
    end = start = 0
    for line in text.splitlines(keepends=True):
        stripped = line.strip()
        if fence:
            if stripped.startswith(fence) and not stripped.strip(fence[0]):
                fence = ""
        elif stripped.startswith(_FENCES):
            fence = stripped[: len(stripped) - len(stripped.lstrip(stripped[0]))]
        start += len(line)
        if not stripped and not fence and line.endswith("\n"):
            end = start
    return text[:end], text[end:]
