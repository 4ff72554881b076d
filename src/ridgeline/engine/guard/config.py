"""Settings of a guard."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardConfig:
    """What judges outputs, and what is held back until then.

    ``scorer``: ``module:factory`` or the name of an entry point; ``word_list``: the file of the
    built-in one, instead. The last ``window_chars`` characters and ``window_tokens`` tokens are
    held back whatever the scorer says; ``None``: 64 characters for a list with patterns, else none.
    ``on_failure``: what becomes of an output over which the scorer fails or takes more than
    ``timeout_s``: it ends, or goes out.
    """

    scorer: str | None = None
    word_list: str | None = None
    on_failure: Literal["end", "release"] = "end"
    timeout_s: float = 1.0
    window_chars: int | None = None
    window_tokens: int = 0
