"""Stop strings in a stream of text deltas."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.core.errors import InvalidRequestError


@dataclass(frozen=True, kw_only=True)
class StopMatch:
    """The stop string that ended the text; ``start`` and ``end`` are character offsets."""

    stop: str
    start: int
    end: int


class StopStringMatcher:
    """Finds the first stop string in a text that arrives in deltas of any size.

    Which stop wins: the one whose **end** comes first in the text; of several that end there, the
    longest. Neither the order of the stops nor the split into deltas plays a part. ``push`` returns
    text that no stop can claim any more; with ``include_stop`` the text runs to the end of the
    match, so nothing is held back. Linear in the text (Aho and Corasick 1975).
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        if any(not isinstance(stop, str) or not stop for stop in stops):
            raise InvalidRequestError("A stop string must be a non-empty string.")
        self._include_stop = include_stop
        self._build(stops)
        self._state = 0
        self._length = 0
        self._held = ""
        self.match: StopMatch | None = None

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Take a delta; return what is safe to emit. After a match, nothing more comes.

        Without ``may_stop`` no stop counts that ends in this delta; one may still begin in it.
        """
        if self.match is not None:
            return ""
        held, start = self._held, self._length
        for index, char in enumerate(text):
            self._step(char)
            stop = self._output[self._state]
            if stop is not None and may_stop:
                end = start + index + 1
                self.match = StopMatch(stop=stop, start=end - len(stop), end=end)
                self._length, self._held = end, ""
                cut = end if self._include_stop else self.match.start
                return (held + text)[: cut - (start - len(held))]
        self._length += len(text)
        keep = 0 if self._include_stop else self._depth[self._state]
        text = held + text
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, None while there is none."""
        return None if self.match is None else self.match.stop

    def flush(self) -> str:
        """Return what was held back, now that no more text comes (empty after a match)."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> None:
        state = self._state
        while (following := self._next[state].get(char)) is None:
            if state == 0:
                return
            state = self._fail[state]
            self._state = state
        self._state = following

    def _build(self, stops: Sequence[str]) -> None:
        """Make the automaton: a state is the longest suffix of the text that begins a stop."""
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._depth = [0]
        self._output: list[str | None] = [None]
        for stop in stops:
            state = 0
            for char in stop:
                if char not in self._next[state]:
                    self._next[state][char] = len(self._next)
                    self._next.append({})
                    self._fail.append(0)
                    self._depth.append(self._depth[state] + 1)
                    self._output.append(None)
                state = self._next[state][char]
            self._output[state] = stop
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                fail = self._fail[state]
                while fail and char not in self._next[fail]:
                    fail = self._fail[fail]
                self._fail[child] = self._next[fail].get(char, 0)
                if self._output[child] is None:
                    self._output[child] = self._output[self._fail[child]]
                queue.append(child)
