"""StableLM 2 (arXiv 2402.17834): LayerNorm, a quarter of each head rotated."""

from ridgeline.core.spec import AttentionSpec, ModelSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.decoder import pre_norm_decoder
from ridgeline.models.family import Family
from ridgeline.models.fields import read_heads, read_layer_norm, read_sizes
from ridgeline.models.rope_config import read_rope
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS, NORM_BIASES


def build(config: ConfigReader) -> ModelSpec:
    """With ``use_parallel_residual`` both branches read the same norm."""
    config.refuse("qk_layernorm", unless=(False,))  # a tensor for each head
    sizes = read_sizes(config, max_position=4096)
    heads = read_heads(config, sizes.hidden_size)
    attention = AttentionSpec(
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        scale=heads.head_dim**-0.5,
        rope=read_rope(
            config, head_dim=heads.head_dim, max_position=sizes.max_position, partial=0.25
        ),
        qkv_bias=config.boolean("use_qkv_bias", default=False),
    )
    return pre_norm_decoder(
        config,
        model_type="stablelm",
        sizes=sizes,
        attention=[attention] * sizes.num_layers,
        norm=read_layer_norm(config, "layer_norm_eps", bias=True),
        parallel=config.boolean("use_parallel_residual", default=False),
    )


FAMILY = Family(
    model_type="stablelm",
    build=build,
    tensors=LLAMA_TENSORS | NORM_BIASES,
    ignored=LLAMA_IGNORED,
    computes=frozenset({"partial_rotary_factor"}),
)
