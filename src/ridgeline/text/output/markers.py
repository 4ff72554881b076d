"""Finding markers in text that arrives in pieces."""

from collections.abc import Sequence


def find_first(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Where the first of the markers begins, and which; of two at one place, the longest."""
    found = [(start, -len(m), m) for m in markers if (start := text.find(m)) >= 0]
    if not found:
        return None
    start, _, marker = min(found)
    return start, marker


def held_length(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that may become a marker."""
    longest = min(len(text), max(len(marker) for marker in markers) - 1)
    for length in range(longest, 0, -1):
        tail = text[-length:]
        if any(marker.startswith(tail) for marker in markers):
            return length
    return 0


class SpaceHolder:
    """Passes text on, but holds whitespace until something follows it."""

    def __init__(self, *, drop_leading: bool = False) -> None:
        self._held = ""
        self._dropping = drop_leading

    def push(self, text: str) -> str:
        if self._dropping:
            text = text.lstrip()
            self._dropping = not text
        text = self._held + text
        kept = text.rstrip()
        self._held = text[len(kept) :]
        return kept

    def flush(self) -> str:
        """The whitespace that nothing followed."""
        held, self._held = self._held, ""
        return held
