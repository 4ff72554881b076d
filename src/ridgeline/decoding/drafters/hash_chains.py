"""Where in a text its own end, or another's, has occurred before; constant time per token."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

KEY_TOKENS = 2  # shorter repeats are chance
MAX_MATCH = 32
MAX_CANDIDATES = 8


class Recurrence(NamedTuple):
    """The last ``length`` tokens occurred before ``position``, where they were followed."""

    length: int
    position: int


NO_MATCH = Recurrence(0, 0)


class HashChains:
    """The suffix structure of LZ77 matchers (RFC 1951, section 4), over tokens.

    A table has the last place of each pair of tokens, and each place points to the one before it.
    The longest match is looked for among the `MAX_CANDIDATES` latest places. Memory is one table
    entry per distinct pair and twelve bytes per token. Tokens are entered, each in constant time,
    when a match is looked for next: a text in which none is looked for costs next to nothing.
    """

    def __init__(self) -> None:
        self.tokens = array("q")
        self._before = array("i")  # place with the same pair before it, or −1
        self._last: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        self.tokens.extend(token_ids)

    def find_own_end(self) -> Recurrence:
        """The longest earlier occurrence of this text's end; of equals the latest."""
        return _longest(self.own_ends())

    def find(self, end: Sequence[int]) -> Recurrence:
        """The longest occurrence of another text's end, of which the last tokens are enough."""
        return _longest(self.ends_of(end))

    def own_ends(self) -> Iterator[Recurrence]:
        """Earlier occurrences of this text's end, the latest first."""
        if len(self.tokens) <= KEY_TOKENS:
            return iter(())
        self._enter()
        return self._matches(self._before[-1], self.tokens)

    def ends_of(self, end: Sequence[int]) -> Iterator[Recurrence]:
        """Occurrences of another text's end, the latest first."""
        if len(end) < KEY_TOKENS:
            return iter(())
        self._enter()
        return self._matches(self._last.get(_key(end[-2], end[-1]), -1), end)

    def following(self, match: Recurrence, count: int) -> tuple[int, ...]:
        """Up to ``count`` tokens that came after a match."""
        return tuple(self.tokens[match.position : match.position + count]) if match.length else ()

    def continuation(self, match: Recurrence, count: int) -> tuple[int, ...]:
        """``count`` tokens that may follow this text: what came after its end's ``match``.

        A text that repeats itself goes on doing so. Empty if the end never occurred before.
        """
        following = self.following(match, count)
        return tuple(following[i % len(following)] for i in range(count)) if following else ()

    def best_following(self, others: Sequence["HashChains"], count: int) -> tuple[int, ...]:
        """Up to ``count`` tokens after the longest match of this text's end: in itself, or in one
        of other texts, which end."""
        own, end = self.find_own_end(), self.tokens[-MAX_MATCH:]
        found = [(each.find(end), each) for each in others]
        match, text = max(found, key=lambda pair: pair[0].length, default=(NO_MATCH, self))
        if match.length <= own.length:
            return self.continuation(own, count)
        return text.following(match, count)

    def _enter(self) -> None:
        """Enter the tokens that came since the last call."""
        tokens, before, last = self.tokens, self._before, self._last
        for place in range(len(before), len(tokens)):
            if place < KEY_TOKENS - 1:
                before.append(-1)
                continue
            key = _key(tokens[place - 1], tokens[place])
            before.append(last.get(key, -1))
            last[key] = place

    def _matches(self, place: int, end: Sequence[int]) -> Iterator[Recurrence]:
        tokens = self.tokens
        for _ in range(MAX_CANDIDATES):
            if place < 0:
                break
            length, limit = KEY_TOKENS, min(MAX_MATCH, place + 1, len(end))
            while length < limit and tokens[place - length] == end[-1 - length]:
                length += 1
            if place + 1 < len(tokens):
                yield Recurrence(length, place + 1)
            place = self._before[place]


def _longest(matches: Iterable[Recurrence]) -> Recurrence:
    return max(matches, key=lambda match: match.length, default=NO_MATCH)


def _key(first: int, second: int) -> int:
    return first << 32 | (second & 0xFFFFFFFF)
