"""Ridgeline: an LLM inference engine that knows its own roofline."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ridgeline.core.errors import RidgelineError
from ridgeline.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ridgeline.core.config import EngineConfig
    from ridgeline.core.request import CompletionChunk, CompletionOutput, RequestOutput
    from ridgeline.engine.async_engine import AsyncEngine
    from ridgeline.engine.beam_search import BeamParams
    from ridgeline.engine.llm import LLM
    from ridgeline.engine.typed import format  # noqa: A004

__all__ = [
    "LLM",
    "AsyncEngine",
    "BeamParams",
    "CompletionChunk",
    "CompletionOutput",
    "EngineConfig",
    "RequestOutput",
    "RidgelineError",
    "SamplingParams",
    "format",
]

__version__ = "0.1.0"

# Imported when asked for: the engine needs torch, and packages that the GPU benchmark does without.
_MODULES = {
    "LLM": "engine.llm",
    "AsyncEngine": "engine.async_engine",
    "BeamParams": "engine.beam_search",
    "CompletionChunk": "core.request",
    "CompletionOutput": "core.request",
    "EngineConfig": "core.config",
    "RequestOutput": "core.request",
    "format": "engine.typed",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"ridgeline.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
