"""Lines of a chat: edited on a terminal, with the history of earlier ones; else as they come."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from ridgeline.cli.display import error_console
from ridgeline.roofline.storage import state_folder

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding.key_processor import KeyPressEvent

_LEAVE_WITHIN_S = 2.0
_QUOTES = '"""'


def read_lines(commands: Iterable[str], status: Callable[[], str]) -> Iterator[str]:
    """What is asked, one question or command at a time, until the input ends.

    On a terminal lines are edited; Ctrl-C clears one, and leaves if it comes twice. ``commands``
    are completed, ``status`` stands below the line. Elsewhere every line is one of its own.
    """
    if sys.stdin is None:
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        for line in _piped_lines():
            yield line.strip()
        return
    session = _session(commands, status)
    interrupted_s = -_LEAVE_WITHIN_S
    while True:
        try:
            line = session.prompt("> ", prompt_continuation="· ").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            now = time.monotonic()
            if now - interrupted_s < _LEAVE_WITHIN_S:
                return
            interrupted_s = now
            error_console.print("Ctrl-C once more, or Ctrl-D, leaves.", style="dim")
            continue
        interrupted_s = -_LEAVE_WITHIN_S
        yield line.removeprefix(_QUOTES).removesuffix(_QUOTES).strip()


def _piped_lines() -> Iterator[str]:
    while True:
        try:
            yield input()
        except (EOFError, KeyboardInterrupt):
            return


def _session(commands: Iterable[str], status: Callable[[], str]) -> "PromptSession[str]":
    # Imported here: it takes 0.1 s, which pipes and --help do without.
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.filters import Condition
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    def is_open() -> bool:
        """Whether three quotes began what they have not ended."""
        text = session.default_buffer.text
        return text.startswith(_QUOTES) and not (
            len(text) >= 2 * len(_QUOTES) and text.rstrip().endswith(_QUOTES)
        )

    def new_line(event: "KeyPressEvent") -> None:
        event.current_buffer.insert_text("\n")

    keys.add("escape", "enter")(new_line)
    keys.add("c-j")(new_line)
    keys.add("enter", filter=Condition(is_open))(new_line)
    history = state_folder() / "chat_history"
    try:
        history.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(history, os.O_CREAT | os.O_APPEND | os.O_RDWR, 0o600))
        kept: FileHistory | InMemoryHistory = FileHistory(str(history))
    except OSError as error:
        error_console.print(f"No history is kept: {history}: {error.strerror}.", style="yellow")
        kept = InMemoryHistory()
    session: PromptSession[str] = PromptSession(
        history=kept,
        key_bindings=keys,
        completer=WordCompleter(list(commands), sentence=True),
        complete_while_typing=Condition(lambda: session.default_buffer.text.startswith("/")),
        enable_history_search=True,
        bottom_toolbar=status,
    )
    return session
