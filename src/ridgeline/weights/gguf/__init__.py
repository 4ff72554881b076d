"""GGUF files: reading, names of weights, and the model that their metadata describes."""

from ridgeline.weights.gguf.checkpoint import GGUFCheckpoint
from ridgeline.weights.gguf.config import describe_gguf
from ridgeline.weights.gguf.file import GGUFFile
from ridgeline.weights.gguf.values import Metadata

__all__ = ["GGUFCheckpoint", "GGUFFile", "Metadata", "describe_gguf"]
