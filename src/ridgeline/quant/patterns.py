"""Names matched against the patterns of a config, in time linear in the name.

A config is somebody else's text, and Python's ``re`` can be made to run for years. This matcher
knows what configs use: characters, ``.``, escapes, classes, groups, ``|``, ``*``, ``+``, ``?``,
``^`` and ``$``. It follows all alternatives at once (Thompson 1968).
"""

from collections.abc import Callable
from dataclasses import dataclass

from ridgeline.core.errors import UnsupportedModelError

_MAX_LENGTH = 200  # of a pattern
_MAX_NAME = 256
_SETS: dict[str, Callable[[str], bool]] = {
    "d": str.isdecimal,
    "w": lambda c: c.isalnum() or c == "_",
    "s": str.isspace,
}
_PREFIX = "re:"


@dataclass(slots=True)
class _State:
    """Goes to ``then`` on a character that ``accepts``, or at once to all of ``free``."""

    accepts: Callable[[str], bool] | None
    then: int
    free: list[int]
    at: str = ""  # "^" or "$": free only there


class Pattern:
    """A pattern that must match from the start of a name, as ``re.match`` does.

    Raises:
        UnsupportedModelError: it is too long, or uses what this matcher does not know.
    """

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self._states: list[_State] = []
        if len(text) > _MAX_LENGTH or not text.isprintable():
            raise self._unknown()
        self._end = self._add(None)
        self._start = self._either(self._end, depth=0)
        if self._at < len(text):
            raise self._unknown()

    def matches(self, name: str) -> bool:
        if len(name) > _MAX_NAME:
            return False
        current = self._closure({self._start}, name, 0)
        for index, character in enumerate(name):
            if self._end in current:
                return True
            following = set()
            for number in current:
                state = self._states[number]
                if state.accepts is not None and state.accepts(character):
                    following.add(state.then)
            current = self._closure(following, name, index + 1)
        return self._end in current

    def _closure(self, numbers: set[int], name: str, index: int) -> set[int]:
        found, todo = set(numbers), list(numbers)
        while todo:
            state = self._states[todo.pop()]
            if (state.at == "^" and index) or (state.at == "$" and index < len(name)):
                continue
            for number in state.free:
                if number not in found:
                    found.add(number)
                    todo.append(number)
        return found

    # Each method builds the states of a piece of the text that lead on to the state ``then``.

    def _either(self, then: int, depth: int) -> int:
        branches = [self._sequence(then, depth)]
        while self._peek() == "|":
            self._at += 1
            branches.append(self._sequence(then, depth))
        return self._add(None, free=branches)

    def _sequence(self, then: int, depth: int) -> int:
        pieces: list[tuple[int, str]] = []
        while self._peek() not in ("", "|", ")"):
            pieces.append((self._at, self._skip(depth)))
        after = self._at
        for start, repeat in reversed(pieces):
            then = self._piece(start, repeat, then, depth)
        self._at = after
        return then

    def _piece(self, start: int, repeat: str, then: int, depth: int) -> int:
        self._at = start
        if repeat in ("*", "+"):
            loop = self._add(None)
            first = self._atom(loop, depth)
            self._states[loop].free = [first, then]
            return loop if repeat == "*" else first
        first = self._atom(then, depth)
        return self._add(None, free=[first, then]) if repeat == "?" else first

    def _skip(self, depth: int) -> str:
        """Pass over one atom and its repetition, which is returned."""
        states = len(self._states)
        self._atom(0, depth)
        del self._states[states:]
        repeat = self._peek() if self._peek() in ("*", "+", "?") else ""
        self._at += len(repeat)
        if self._peek() in ("*", "+", "?", "{"):
            raise self._unknown()
        return repeat

    def _atom(self, then: int, depth: int) -> int:
        character = self._next()
        if character == "(" and depth < 3:
            if self._text.startswith("?:", self._at):
                self._at += 2
            first = self._either(then, depth + 1)
            if self._next() != ")":
                raise self._unknown()
            return first
        if character in ("^", "$"):
            return self._add(None, free=[then], at=character)
        if character == "[":
            return self._add(self._class(), then)
        if character == ".":
            return self._add(lambda _: True, then)
        if character == "\\":
            return self._add(self._escape(), then)
        if character in "(){}]*+?" or not character:
            raise self._unknown()
        return self._add(character.__eq__, then)

    def _escape(self) -> Callable[[str], bool]:
        character = self._next()
        if character in _SETS:
            return _SETS[character]
        if not character or character.isalnum():
            raise self._unknown()
        return character.__eq__

    def _class(self) -> Callable[[str], bool]:
        members: list[Callable[[str], bool]] = []
        negated = self._peek() == "^"
        self._at += negated
        while (character := self._next()) != "]":
            if not character or character == "[":
                raise self._unknown()
            if character == "\\":
                members.append(self._escape())
            elif self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("", "]"):
                self._at += 1
                members.append(_between(character, self._next()))
            else:
                members.append(character.__eq__)
        return lambda c: any(member(c) for member in members) != negated

    def _add(
        self,
        accepts: Callable[[str], bool] | None,
        then: int = 0,
        *,
        free: list[int] | None = None,
        at: str = "",
    ) -> int:
        self._states.append(_State(accepts, then, free or [], at))
        return len(self._states) - 1

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _next(self) -> str:
        self._at += 1
        return self._text[self._at - 1 : self._at]

    def _unknown(self) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"quantization_config has the pattern {self._text[:60]!a}, which Ridgeline cannot "
            "read; load the unquantized checkpoint instead."
        )


def _between(low: str, high: str) -> Callable[[str], bool]:
    return lambda character: low <= character <= high


def name_matcher(target: str) -> Callable[[str], bool]:
    """Whether a module's name is ``target``, or matches it where it begins with ``re:``."""
    if target.startswith(_PREFIX):
        return Pattern(target.removeprefix(_PREFIX)).matches
    return target.__eq__
