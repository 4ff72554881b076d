"""Models as data: from a ``config.json`` to a spec, and from a spec to ops.

A family is one file: it reads its config into a `ModelSpec` and declares where its tensors are.
"""

from ridgeline.models.config import ConfigReader, parse_config, read_config
from ridgeline.models.draft_head import DraftHeadDefinition
from ridgeline.models.eagle3 import TOKEN_MAP, describe_head, is_draft_head
from ridgeline.models.family import Family, ModelDefinition, TensorSource
from ridgeline.models.lower import lower
from ridgeline.models.lower_head import lower_head, lower_later_heads
from ridgeline.models.medusa import describe_medusa
from ridgeline.models.mtp import describe_mtp
from ridgeline.models.presets import PRESETS
from ridgeline.models.registry import describe, model_types
from ridgeline.models.rope import inverse_frequencies, rope_attention_factor
from ridgeline.models.shard import Shard, shard

__all__ = [
    "PRESETS",
    "TOKEN_MAP",
    "ConfigReader",
    "DraftHeadDefinition",
    "Family",
    "ModelDefinition",
    "Shard",
    "TensorSource",
    "describe",
    "describe_head",
    "describe_medusa",
    "describe_mtp",
    "inverse_frequencies",
    "is_draft_head",
    "lower",
    "lower_head",
    "lower_later_heads",
    "model_types",
    "parse_config",
    "read_config",
    "rope_attention_factor",
    "shard",
]
