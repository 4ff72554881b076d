"""The built-in scorer: texts and regular expressions, from a file, that no output may have."""

import re
from collections.abc import Iterable

from ridgeline.core.errors import SettingsError
from ridgeline.engine.guard.scorer import Decision, Release, Retract

MAX_FILE_BYTES = 1 << 20
_REGEX = "regex:"
_SEARCHED_CHARS = 4096  # before what is new, for regular expressions


class WordList:
    """Ends an output where one of its entries begins.

    A line is a text, found whatever the case of its letters, or ``regex:`` and a pattern of `re`;
    empty lines and those that begin with ``#`` are neither. Of a text not even its beginning goes
    out: what may become one is held back. A pattern is searched for in what is new and the 4,096
    characters before; what a match may begin with is the window's to hold back.

    Raises:
        SettingsError: there is no entry, or a pattern cannot be compiled.
    """

    def __init__(self, lines: Iterable[str]) -> None:
        entries = [line.strip() for line in lines]
        entries = [entry for entry in entries if entry and not entry.startswith("#")]
        if not entries:
            raise SettingsError("guard_list has no entries.")
        self._words = {_folded(entry) for entry in entries if not entry.startswith(_REGEX)}
        patterns = [entry.removeprefix(_REGEX).strip() for entry in entries]
        self._patterns = [
            _compiled(pattern)
            for pattern, entry in zip(patterns, entries, strict=True)
            if entry.startswith(_REGEX)
        ]
        self._longest = max(map(len, self._words), default=0)
        self._beginnings = {word[:end] for word in self._words for end in range(1, len(word))}

    @classmethod
    def read(cls, path: str) -> "WordList":
        """The list in a file of UTF-8; SettingsError if it cannot be read or is over 1 MiB."""
        try:
            with open(path, "rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
            if len(data) > MAX_FILE_BYTES:
                raise SettingsError(f"guard_list may have {MAX_FILE_BYTES:,} bytes.")
            return cls(data.decode().splitlines())
        except OSError as error:
            raise SettingsError(f"guard_list {path} cannot be read: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise SettingsError(f"guard_list {path} is not text in UTF-8.") from error

    @property
    def has_patterns(self) -> bool:
        return bool(self._patterns)

    def see(self, text: str, new: str, final: bool) -> Decision:
        """As `Scorer` says."""
        first = max(0, len(text) - len(new) - self._longest)
        tail = _folded(text[first:])
        found = [(at, at + len(word)) for word in self._words if (at := tail.find(word)) >= 0]
        matches = [(first + start, first + stop) for start, stop in found]
        since = max(0, len(text) - len(new) - _SEARCHED_CHARS)
        for pattern in self._patterns:
            if (match := pattern.search(text, since)) is not None:
                matches.append(match.span())
        if matches:
            return Retract(*min(matches), reason="guard_list")
        if final:
            return Release(len(text))
        for count in range(min(self._longest - 1, len(tail)), 0, -1):
            if tail[-count:] in self._beginnings:
                return Release(len(text) - count)
        return Release(len(text))


def _folded(text: str) -> str:
    """Letters in one case, character by character, so that places in it are those in the text."""
    return "".join(low if len(low := char.lower()) == 1 else char for char in text)


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        found = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise SettingsError(f"guard_list: {pattern[:80]!r} is no regex: {error}.") from error
    if found.match("") is not None:
        raise SettingsError(f"guard_list: {pattern[:80]!r} matches the empty text.")
    return found
