"""Qwen 3, dense (arXiv 2505.09388): RMSNorm on the heads of q and k instead of biases."""

from dataclasses import replace

from ridgeline.core.spec import ModelSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.decoder import pre_norm_decoder
from ridgeline.models.family import Family
from ridgeline.models.fields import read_heads, read_rms_norm, read_sizes
from ridgeline.models.qwen2 import read_windows
from ridgeline.models.rope_config import read_ropes
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS


def build(config: ConfigReader) -> ModelSpec:
    """Windows as in Qwen 2; ``attention_bias`` means all four projections."""
    sizes = read_sizes(config, max_position=32_768)
    heads = read_heads(config, sizes.hidden_size, head_dim=128)
    kinds, windows = read_windows(config, sizes.num_layers)
    ropes = read_ropes(config, head_dim=heads.head_dim, max_position=sizes.max_position)
    bias = config.boolean("attention_bias", default=False)
    qk_norm = read_rms_norm(config)
    attention = (
        replace(
            heads.attention(ropes[kind]),
            window=window,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=qk_norm,
        )
        for kind, window in zip(kinds, windows, strict=True)
    )
    return pre_norm_decoder(config, model_type="qwen3", sizes=sizes, attention=attention)


FAMILY = Family(model_type="qwen3", build=build, tensors=LLAMA_TENSORS, ignored=LLAMA_IGNORED)
