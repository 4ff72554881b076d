"""What a request may leave out of its own KV cache."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

from ridgeline.core.checks import check_int
from ridgeline.core.errors import InvalidRequestError

_MAX_TOKENS = 2**31 - 1


class KVWindow(NamedTuple):
    """A token sees the last ``window`` tokens, itself among them, and the first ``sinks``."""

    sinks: int
    window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCompression:
    """Of one request, in layers with full attention; layers with a window of their own keep it.

    Attributes:
        method: streaming_llm: a token sees the last ``window`` tokens and the first ``sinks``
            (attention sinks), at the positions that they have in the text; all others leave memory
            (Xiao et al., arXiv 2309.17453).
        window: tokens, the one that sees them among them.
        sinks: tokens.

    Raises:
        InvalidRequestError: a value has the wrong type or is out of bounds.
    """

    method: Literal["streaming_llm"] = "streaming_llm"
    window: int
    sinks: int = 4

    def __post_init__(self) -> None:
        if self.method != "streaming_llm":
            raise InvalidRequestError("kv_compression.method must be streaming_llm.")
        check_int("kv_compression.window", self.window, 1, _MAX_TOKENS)
        check_int("kv_compression.sinks", self.sinks, 0, _MAX_TOKENS)

    @classmethod
    def of(cls, given: object) -> "KVCompression | None":
        """What is given as a mapping, or is one already.

        Raises:
            InvalidRequestError: it is neither, or a value is out of bounds.
        """
        if given is None or isinstance(given, KVCompression):
            return given
        known = {field.name for field in fields(cls)}
        if not isinstance(given, Mapping) or not set(given) <= known or "window" not in given:
            raise InvalidRequestError(
                "kv_compression must have a window, and may have sinks and a method."
            )
        return cls(**given)

    @property
    def seen(self) -> KVWindow:
        """What a token sees."""
        return KVWindow(self.sinks, self.window)
