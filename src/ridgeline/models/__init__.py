"""Models as data: from a ``config.json`` to a spec, and from a spec to ops.

A family is one file: it reads its config into a `ModelSpec` and declares where its tensors are.
"""

from ridgeline.models.config import ConfigReader, parse_config, read_config
from ridgeline.models.family import Family, ModelDefinition, TensorSource
from ridgeline.models.lower import lower
from ridgeline.models.presets import PRESETS
from ridgeline.models.registry import describe, model_types, register
from ridgeline.models.rope import inverse_frequencies, rope_attention_factor
from ridgeline.models.shard import Shard, shard

__all__ = [
    "PRESETS",
    "ConfigReader",
    "Family",
    "ModelDefinition",
    "Shard",
    "TensorSource",
    "describe",
    "inverse_frequencies",
    "lower",
    "model_types",
    "parse_config",
    "read_config",
    "register",
    "rope_attention_factor",
    "shard",
]
