"""Ridgeline: an LLM inference engine that knows its own roofline."""

from typing import TYPE_CHECKING, Any

from ridgeline.core.errors import RidgelineError
from ridgeline.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ridgeline.core.request import CompletionChunk, CompletionOutput, RequestOutput
    from ridgeline.engine import LLM
    from ridgeline.engine.typed import format  # noqa: A004

__all__ = [
    "LLM",
    "CompletionChunk",
    "CompletionOutput",
    "RequestOutput",
    "RidgelineError",
    "SamplingParams",
    "format",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import the engine, and torch with it, only when it is asked for; and what needs other
    packages, which the GPU benchmark does without."""
    if name == "LLM":
        from ridgeline.engine import LLM

        return LLM
    if name == "format":
        from ridgeline.engine.typed import format  # noqa: A004

        return format
    if name in ("CompletionChunk", "CompletionOutput", "RequestOutput"):
        from ridgeline.core import request

        return getattr(request, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
