"""One published figure, and what is said of ours beside it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Reports = Sequence[Any]  # what commands printed, in their order
_NEAR = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure that somebody published.

    Attributes:
        row: of the feature that answers to it.
        what: is measured, or compared.
        low, high: its bounds, in ``unit``; the same number twice for a single figure.
        published: as it was put, where bounds do not say it all.
        commands: of ours, without ``ridgeline`` and ``--json``. What ``{scratch}`` names is a
            folder for files.
        ours: from what they print; ``None`` where this machine, or the engine, has no answer.
        seconds: that it takes on two cores, about.
        note: in what ours differs.
        why_not: what an answer would take.
    """

    row: str
    what: str
    low: float
    high: float
    unit: str = "×"
    published: str = ""
    commands: tuple[str, ...] = ()
    ours: Callable[[Reports], float] | None = None
    seconds: float = 5.0
    note: str = ""
    why_not: str = ""

    @property
    def name(self) -> str:
        return f"{self.row}: {self.what}"

    def verdict(self, ours: float) -> str:
        """``as published``: within the bounds or a tenth of them, else ``more`` or ``less``."""
        if ours > self.high * (1 + _NEAR):
            return "more"
        return "less" if ours < self.low * (1 - _NEAR) else "as published"


def figure(row: str, what: str, low: float, high: float | None = None, /, **answer: Any) -> Figure:
    """One between two bounds, or a single one."""
    return Figure(row=row, what=what, low=low, high=low if high is None else high, **answer)
