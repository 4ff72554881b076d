"""What a scorer is asked of an output that grows, and what it may answer."""

from typing import Protocol

import msgspec


class Release(msgspec.Struct, frozen=True, tag=True):
    """The first ``num_chars`` characters of the text may go out; what did is not called back."""

    num_chars: int


class Hold(msgspec.Struct, frozen=True, tag=True):
    """Nothing more goes out yet. At the end of an output that is for ever."""


class End(msgspec.Struct, frozen=True, tag=True):
    """The output ends; of its text the first ``num_chars`` characters may still go out."""

    reason: str
    num_chars: int = 0


class Retract(msgspec.Struct, frozen=True, tag=True):
    """The output ends before ``start``; of ``[start, stop)`` is taken back what went out."""

    start: int
    stop: int
    reason: str


Decision = Release | Hold | End | Retract


class Scorer(Protocol):
    """Judges outputs; one for all of them, in a process of its own."""

    def see(self, text: str, new: str, final: bool) -> Decision:
        """What becomes of an output whose text is now ``text``, and ends with ``new``.

        ``text`` is as the model wrote it: reasoning and calls of tools are in it. Nothing follows
        if it is ``final``. An exception counts as a scorer that failed.
        """
        ...
