"""What a client has of a stream, so that another engine can go on with it."""

import re
from typing import Any

import msgspec

from ridgeline.fleet.upstream import UNREADABLE
from ridgeline.server.continuation import HANDED_OVER, MARK, ChoiceState, StreamState
from ridgeline.server.replies import DONE

_MARKS = re.compile(rb"^" + MARK + rb".*\n", re.MULTILINE)
_ERROR = b'data: {"error"'  # not within another event: there its quotes are escaped
_DATA = b"data:"
_FOLD_BYTES = 64 << 10
_MAX_EVENT_BYTES = 4 << 20


class _Choice(msgspec.Struct):
    index: int
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    """As much of an event as is asked for here."""

    id: str = ""
    created: int = 0
    choices: list[_Choice] | None = None
    usage: dict[str, Any] | None = None


_DECODER = msgspec.json.Decoder(_Event)


class StreamLog:
    """Takes the marks out of a stream of events, and knows what they say when it is asked.

    Events pass whole: half an event is held back, so that what the client has ends at one. While
    all goes well they are only kept, and read in batches of 64 KiB or when the engine is lost.
    A stream of events that cannot be read passes as well, and cannot go on. ``num_tokens``
    are those that the marks name; ``is_handed_over``: it ended so that another engine goes on.
    """

    def __init__(self) -> None:
        self._half = b""
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._id, self._created = "", 0
        self._choices: dict[int, ChoiceState] = {}
        self._has_usage = False
        self._has_events = self._is_unreadable = False
        self.num_marks = 0  # one for each piece of the output, mostly a token
        self.is_done = self.is_handed_over = False
        self.num_tokens = 0
        self.error: bytes | None = None

    def take(self, data: bytes) -> bytes:
        """The next bytes of a stream; returns the events that are whole, without their marks.

        An event that is an error is not among them, and nor is anything after it: it is ``error``.

        Raises:
            ValueError: an event is longer than any is.
        """
        if self._half:
            data = self._half + data
        end = data.rfind(b"\n\n") + 2
        if end == 1:
            if len(data) > _MAX_EVENT_BYTES:
                raise ValueError("An event of the stream has no end.")
            self._half = data
            return b""
        self._half = data[end:]
        events = data[:end] if self._half else data
        if _ERROR in events:
            at = events.index(_ERROR)
            at = events.rfind(b"\n\n", 0, at) + 2 if b"\n\n" in events[:at] else 0
            events, self.error = events[:at], _MARKS.sub(b"", events[at:])
        if HANDED_OVER in events:  # the text of an answer has no empty line; pings may follow
            events, self.is_handed_over = events.partition(HANDED_OVER)[0], True
        self._kept.append(events)
        self._kept_bytes += len(events)
        if self._kept_bytes > _FOLD_BYTES:
            self._fold()
        if events.endswith(DONE):
            self.is_done = True
        if MARK not in events:
            return events
        shown, num_marks = _MARKS.subn(b"", events)
        self.num_marks += num_marks  # of which the text of an answer has none
        self.num_tokens += num_marks + events.count(b",") - shown.count(b",")
        return shown

    def drop_half(self) -> None:
        """The stream has broken off: what it sent of an event is worth nothing."""
        self._half, self.error = b"", None

    @property
    def is_empty(self) -> bool:
        """Whether the client has no event yet, so that the stream may as well begin anew."""
        self._fold()
        return not self._has_events

    @property
    def can_go_on(self) -> bool:
        """Whether `state` says all that the client has."""
        self._fold()
        return self.num_marks > 0 and not self._is_unreadable

    @property
    def lacks_only_the_end(self) -> bool:
        """Whether the client has everything but the line that says so."""
        self._fold()
        return self._has_usage and not self.is_done

    def state(self) -> StreamState:
        """How far the client has come."""
        self._fold()
        return StreamState(id=self._id, created=self._created, choices=self._choices)

    def _fold(self) -> None:
        text = b"".join(self._kept)
        self._kept.clear()
        self._kept_bytes = 0
        for line in text.split(b"\n"):
            if self._is_unreadable and self._has_events:
                return
            try:
                self._read_line(line)
            except (ValueError, *UNREADABLE):
                self._is_unreadable = True

    def _read_line(self, line: bytes) -> None:
        if line.startswith(MARK):
            _, choice, token_ids = line.split(b" ", 2)
            self._choice(int(choice)).token_ids += map(int, token_ids.split(b","))
        elif line.startswith(_DATA) and line != DONE.rstrip():
            self._has_events = True
            self._read(_DECODER.decode(line[len(_DATA) :]))

    def _read(self, event: Any) -> None:
        self._id, self._created = event.id, event.created
        self._has_usage = event.choices == [] and event.usage is not None
        for choice in event.choices or ():
            if choice.finish_reason is not None:
                self._choice(choice.index).is_finished = True

    def _choice(self, index: int) -> ChoiceState:
        return self._choices.setdefault(index, ChoiceState())
