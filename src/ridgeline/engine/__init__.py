"""The loop that turns requests into plans and results into text, and its wiring."""

from ridgeline.engine.llm import LLM
from ridgeline.engine.loading import LoadedModel, load_model
from ridgeline.engine.loop import EngineLoop

__all__ = ["LLM", "EngineLoop", "LoadedModel", "load_model"]
