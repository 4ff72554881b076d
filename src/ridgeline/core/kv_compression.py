"""What a request may leave out of its own KV cache."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

from ridgeline.core.checks import check_int
from ridgeline.core.errors import InvalidRequestError

_MAX_TOKENS = 2**31 - 1
_SINKS = 4
_OBSERVED = 64  # tokens at the end of a prompt


class KVWindow(NamedTuple):
    """A token sees the last ``window`` tokens, itself among them, and the first ``sinks``."""

    sinks: int
    window: int


class KVSelection(NamedTuple):
    """What becomes of a prompt of ``stop`` tokens as its end is computed.

    Its tokens from ``start`` on choose, for each KV head by itself, ``num_chosen`` of those before
    ``start``. Their K and V are then in KV slots ``[0, num_chosen)``, in the order that they had,
    and tokens behind the prompt see these and all from ``start`` on.
    """

    num_chosen: int
    start: int
    stop: int

    def clipped(self, start: int, stop: int) -> int:
        """How far a step from ``start`` may go, at most to ``stop``: tokens that choose are
        computed together, and what follows the prompt one by one. At ``start`` it has to wait."""
        if start >= self.stop:
            return min(stop, start + 1)
        return self.stop if stop >= self.stop else max(start, min(stop, self.start))

    def seen(self, position: int) -> KVWindow | None:
        """What the token at a position sees; ``None``: all before it."""
        return (
            None if position < self.stop else KVWindow(self.num_chosen, position - self.start + 1)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCompression:
    """Of one request, in layers with full attention; layers with a window of their own keep it.

    Attributes:
        method: streaming_llm: a token sees the last ``window`` tokens and the first ``sinks``
            (attention sinks), at the positions that they have in the text; all others leave memory
            (Xiao et al., arXiv 2309.17453). snapkv: when the prompt is computed, its last
            ``window`` tokens choose by their attention what stays of it, ``budget`` tokens of
            each KV head, themselves among them (Li et al., arXiv 2404.14469).
        window: tokens; of streaming_llm the one that sees them among them, of snapkv 64 if it is
            left out.
        sinks: tokens, of streaming_llm alone; 4 if it is left out.
        budget: tokens, of snapkv alone; more than ``window``.

    Raises:
        InvalidRequestError: a value has the wrong type or is out of bounds.
    """

    method: Literal["streaming_llm", "snapkv"] = "streaming_llm"
    window: int | None = None
    sinks: int | None = None
    budget: int | None = None

    def __post_init__(self) -> None:
        snaps = self.method == "snapkv"
        if not snaps and self.method != "streaming_llm":
            raise InvalidRequestError("kv_compression.method must be streaming_llm or snapkv.")
        needed, foreign = ("budget", "sinks") if snaps else ("window", "budget")
        if getattr(self, needed) is None:
            raise InvalidRequestError(f"kv_compression must have a {needed} with {self.method}.")
        if getattr(self, foreign) is not None:
            raise InvalidRequestError(f"kv_compression has no {foreign} with {self.method}.")
        check_int("kv_compression.window", self._window, 1, _MAX_TOKENS)
        if self.sinks is not None:
            check_int("kv_compression.sinks", self.sinks, 0, _MAX_TOKENS)
        if self.budget is not None:
            check_int("kv_compression.budget", self.budget, self._window + 1, _MAX_TOKENS)

    @classmethod
    def of(cls, given: object) -> "KVCompression | None":
        """What is given as a mapping, or is one already.

        Raises:
            InvalidRequestError: it is neither, or a value is out of bounds.
        """
        if given is None or isinstance(given, KVCompression):
            return given
        known = [field.name for field in fields(cls)]
        if not isinstance(given, Mapping) or not set(given) <= {*known}:
            raise InvalidRequestError(f"kv_compression may have {', '.join(known)}, no others.")
        return cls(**given)

    @property
    def seen(self) -> KVWindow | None:
        """What every token sees, if that is the same for all."""
        if self.method == "snapkv":
            return None
        return KVWindow(_SINKS if self.sinks is None else self.sinks, self._window)

    @property
    def num_choosing(self) -> int:
        """The last tokens of a prompt that choose, and so are computed together."""
        return self._window if self.method == "snapkv" else 0

    def selection(self, num_prompt_tokens: int) -> KVSelection | None:
        """What becomes of a prompt; ``None`` if all of it stays."""
        if self.budget is None or num_prompt_tokens <= self.budget:
            return None
        start = num_prompt_tokens - self._window
        return KVSelection(self.budget - self._window, start, num_prompt_tokens)

    @property
    def _window(self) -> int:
        return _OBSERVED if self.window is None else self.window
