"""What numbers of settings may be."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from ridgeline.core.sampling_params import MAX_TOKENS

try:
    from msgspec import Meta
except ImportError:  # kernels are timed and tested on a GPU with torch, triton and numpy alone
    if not TYPE_CHECKING:

        @dataclass(frozen=True, kw_only=True)
        class Meta:
            """A bound, where nothing reads it."""

            gt: float | None = None
            ge: float | None = None
            le: float | None = None


Count = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
NumBytes = Annotated[int, Meta(ge=1, le=2**62)]
Positive = Annotated[float, Meta(gt=0)]
Seconds = Positive

__all__ = ["Count", "Meta", "NumBytes", "Positive", "Seconds"]
