"""DeepSeek-V3.2 (2025): V3 whose tokens attend to the ``index_topk`` that an indexer picks.

Up to so many tokens the indexer picks all of them, so that attention is V3's; Ridgeline has no
indexer and reads these models for contexts up to there. ``glm_moe_dsa`` (GLM-5, Zhipu 2026) is the
same with other sizes; of some of its layers the choice is that of a layer before.
"""

import logging
from dataclasses import replace

from ridgeline.core.spec import ModelSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.deepseek_v3 import FAMILY as DEEPSEEK_V3
from ridgeline.models.deepseek_v3 import build as build_v3
from ridgeline.models.tensor_names import LLAMA_IGNORED

_INDEXER = (
    "index_head_dim", "index_n_heads", "index_skip_topk_offset", "index_topk_freq",
    "index_topk_pattern", "indexer_rope_interleave", "indexer_types",
)  # fmt: skip
_INDEXER_TENSORS = r".*\.self_attn\.indexer\..*"
_log = logging.getLogger(__name__)


def build(config: ConfigReader) -> ModelSpec:
    """DeepSeek's."""
    return _up_to_choice(config, build_v3(config))


def _build_glm(config: ConfigReader) -> ModelSpec:
    return _up_to_choice(config, build_v3(config, num_groups=1, top_groups=1, query_rank=2048))


def _up_to_choice(config: ConfigReader, spec: ModelSpec) -> ModelSpec:
    """The context ends where the indexer would begin to leave tokens out."""
    for name in (*_INDEXER, "layer_types"):  # all layers have an indexer, or another's choice
        config.ignore(name)
    model_type = config.text("model_type")
    limit = min(config.integer("index_topk", default=2048), spec.max_position)
    _log.warning(
        "This %s model has an indexer, which is left out: its context is the %d tokens that the "
        "indexer would not choose among.", model_type, limit,
    )  # fmt: skip
    return replace(spec, model_type=model_type, max_position=limit)


FAMILY = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v32",
    build=build,
    ignored=(*DEEPSEEK_V3.ignored, _INDEXER_TENSORS),
)
GLM_MOE_DSA = replace(
    FAMILY,
    model_type="glm_moe_dsa",
    build=_build_glm,
    ignored=(*LLAMA_IGNORED, r"model\.layers\.78\..*", _INDEXER_TENSORS),
)
