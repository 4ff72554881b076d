"""Youtu-LLM (Tencent, 2025): DeepSeek-V3's latent attention without experts."""

from ridgeline.core.spec import ModelSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.decoder import pre_norm_decoder
from ridgeline.models.family import Family
from ridgeline.models.fields import read_sizes
from ridgeline.models.mla_config import MLA_TENSORS, read_mla
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS


def build(config: ConfigReader) -> ModelSpec:
    """All layers are alike."""
    config.ignore("embedding_initializer_range")
    sizes = read_sizes(config, max_position=131_072, vocab_size=128_256)
    attention = read_mla(
        config,
        max_position=sizes.max_position,
        query_rank=1536,
        interleaved=config.boolean("rope_interleave", default=True),
    )
    return pre_norm_decoder(
        config,
        model_type="youtu",
        sizes=sizes,
        attention=[attention] * sizes.num_layers,
        tied=True,
    )


FAMILY = Family(
    model_type="youtu", build=build, tensors=LLAMA_TENSORS | MLA_TENSORS, ignored=LLAMA_IGNORED
)
