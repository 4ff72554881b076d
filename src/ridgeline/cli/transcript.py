"""The turns of a chat: what the model is given of them, and their file."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ridgeline.core.errors import ContextLengthError, InvalidRequestError
from ridgeline.roofline.storage import write_json

Message = dict[str, str]
_ROLES = ("user", "assistant")
_MAX_FILE_BYTES = 8 << 20
_FENCE = "```"


class Transcript:
    """A system message and turns, each a question and its answer.

    ``num_dropped`` turns, the oldest, are no longer given to the model, since the context is full;
    the transcript keeps them.
    """

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.turns: list[tuple[Message, Message]] = []
        self.num_dropped = 0

    def reset(self) -> None:
        """Forget every turn; the system message stays."""
        self.turns.clear()
        self.num_dropped = 0

    def undo(self) -> str:
        """Forget the last turn, and return its question.

        Raises:
            InvalidRequestError: there is none.
        """
        if not self.turns:
            raise InvalidRequestError("There is no turn yet.")
        question, _ = self.turns.pop()
        self.num_dropped = min(self.num_dropped, len(self.turns))
        return question["content"]

    def add(self, question: str, answer: str) -> None:
        """Append a turn."""
        self.turns.append((_message("user", question), _message("assistant", answer)))

    @property
    def messages(self) -> list[Message]:
        """All of it, the system message first."""
        system = [] if self.system is None else [_message("system", self.system)]
        return [*system, *(message for turn in self.turns for message in turn)]

    def prompt_for(
        self, question: str, encode: Callable[[Sequence[Message]], list[int]], max_tokens: int
    ) -> list[int]:
        """Token ids of the conversation that ends with ``question``, ``max_tokens`` at the most.

        As many of the oldest turns are dropped as it takes.

        Raises:
            ContextLengthError: the question alone is longer than the context.
            ChatTemplateError: as ``encode``.
        """
        system = [] if self.system is None else [_message("system", self.system)]
        for first in range(self.num_dropped, len(self.turns) + 1):
            kept = [message for turn in self.turns[first:] for message in turn]
            is_last = first == len(self.turns)
            try:
                token_ids = encode([*system, *kept, _message("user", question)])
            except ContextLengthError:
                if is_last:
                    raise
                continue
            if is_last or len(token_ids) <= max_tokens:
                self.num_dropped = first
                return token_ids
        raise AssertionError("the last turn returns or raises")

    def save(self, path: Path) -> None:
        """Write all turns as JSON, in the form of OpenAI's ``messages``.

        Raises:
            DiskError: the file cannot be written.
        """
        write_json(path, {"messages": self.messages})

    @classmethod
    def load(cls, path: Path) -> "Transcript":
        """What `save` wrote.

        Raises:
            InvalidRequestError: the file cannot be read, or is not such a transcript.
        """
        try:
            found: Any = json.loads(read_text(path))
            messages = [(each["role"], each["content"]) for each in found["messages"]]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            if isinstance(error, InvalidRequestError):
                raise
            raise InvalidRequestError(f"{path} is not a chat that /save wrote.") from error
        system = messages.pop(0)[1] if messages and messages[0][0] == "system" else None
        transcript = cls(system)
        roles, texts = [role for role, _ in messages], [text for _, text in messages]
        if roles != list(_ROLES) * (len(roles) // 2) or not all(
            isinstance(text, str) for text in (system or "", *texts)
        ):
            raise InvalidRequestError(f"{path} is not a chat of questions and answers in turn.")
        for question, answer in zip(texts[::2], texts[1::2], strict=True):
            transcript.add(question, answer)
        return transcript


def read_text(path: Path) -> str:
    """The text of a file of up to 8 MiB.

    Raises:
        InvalidRequestError: it cannot be read, is longer, or is not UTF-8.
    """
    try:
        with path.expanduser().open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
        if len(content) > _MAX_FILE_BYTES:
            raise InvalidRequestError(f"{path} is longer than {_MAX_FILE_BYTES >> 20} MiB.")
        return content.decode()
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{path} is not UTF-8 text.") from error


def quoted_file(path: Path, text: str) -> str:
    """A file as a part of a question: its name, then its text between fences that it lacks."""
    fence = _FENCE
    while fence in text:
        fence += "`"
    return f"{path.name}:\n{fence}\n{text.rstrip()}\n{fence}"


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
