"""The loop that turns requests into plans and results into text, and its wiring."""

from ridgeline.engine.llm import LLM
from ridgeline.engine.loading import LoadedModel, load_model
from ridgeline.engine.loop import EngineLoop
from ridgeline.engine.stream import CompletionStream

__all__ = ["LLM", "CompletionStream", "EngineLoop", "LoadedModel", "load_model"]
