"""Finding a model's files, and reading its weights."""

from ridgeline.weights.checkpoint import Checkpoint
from ridgeline.weights.dummy import dummy_weights
from ridgeline.weights.location import EMBEDDED, download_model, embedded_draft_folder, locate_model
from ridgeline.weights.lora import Adapter, LoRAWeights, load_lora
from ridgeline.weights.matching import weight_shapes
from ridgeline.weights.packed import Weight, expanded
from ridgeline.weights.progress import Progress
from ridgeline.weights.safetensors_file import SafetensorsFile
from ridgeline.weights.source import (
    CheckpointWeights,
    DummyWeights,
    WeightSource,
    expanded_weights,
    only_of,
    rows_of,
    weight_parts,
)
from ridgeline.weights.storing import stored_tensors

__all__ = [
    "EMBEDDED",
    "Adapter",
    "Checkpoint",
    "CheckpointWeights",
    "DummyWeights",
    "LoRAWeights",
    "Progress",
    "SafetensorsFile",
    "Weight",
    "WeightSource",
    "download_model",
    "dummy_weights",
    "embedded_draft_folder",
    "expanded",
    "expanded_weights",
    "load_lora",
    "locate_model",
    "only_of",
    "rows_of",
    "stored_tensors",
    "weight_parts",
    "weight_shapes",
]
