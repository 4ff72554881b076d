"""What somebody may have meant by a name that there is not."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str], *, alike: float = 0.6) -> str | None:
    """The known name that is spelled most alike, if one is at all (`SequenceMatcher.ratio`)."""
    return next(iter(get_close_matches(name, list(known), n=1, cutoff=alike)), None)


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of a sentence that says a name is not known: the nearest one, or a full stop."""
    near = nearest(name, known)
    return "." if near is None else f"; did you mean {near!r}?"
