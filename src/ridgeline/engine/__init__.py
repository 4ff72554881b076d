"""The loop that turns requests into plans and results into text, and its wiring."""

from ridgeline.engine.async_engine import AsyncEngine, Embedding
from ridgeline.engine.llm import LLM
from ridgeline.engine.loading import LoadedModel, load_model
from ridgeline.engine.loop import EngineLoop
from ridgeline.engine.stats import EngineStats, EngineStatus, Health
from ridgeline.engine.stream import CompletionStream

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionStream",
    "Embedding",
    "EngineLoop",
    "EngineStats",
    "EngineStatus",
    "Health",
    "LoadedModel",
    "load_model",
]
