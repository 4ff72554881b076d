"""Command R (Cohere, 2024): parallel branches, LayerNorm without bias, interleaved rope."""

from dataclasses import replace

from ridgeline.core.spec import AttentionSpec, ModelSpec, NormScope
from ridgeline.models.config import ConfigReader
from ridgeline.models.decoder import pre_norm_decoder
from ridgeline.models.family import Family
from ridgeline.models.fields import read_heads, read_layer_norm, read_sizes
from ridgeline.models.rope_config import read_rope
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS


def build(config: ConfigReader) -> ModelSpec:
    """``use_qk_norm`` (Command R+) has a gain for each head; ``logit_scale`` multiplies logits."""
    sizes = read_sizes(config, max_position=8192)
    heads = read_heads(config, sizes.hidden_size)
    bias = config.boolean("attention_bias", default=False)
    norm = read_layer_norm(config, "layer_norm_eps", bias=False)
    rope = read_rope(
        config, head_dim=heads.head_dim, max_position=sizes.max_position, theta=500_000.0
    )
    qk_norm = norm if config.boolean("use_qk_norm", default=False) else None
    attention = AttentionSpec(
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        scale=heads.head_dim**-0.5,
        rope=replace(rope, interleaved=True),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=qk_norm,
        qk_norm_scope=NormScope.HEAD if qk_norm is None else NormScope.EACH_HEAD,
    )
    spec = pre_norm_decoder(
        config,
        model_type="cohere",
        sizes=sizes,
        attention=[attention] * sizes.num_layers,
        norm=norm,
        parallel=True,
        tied=True,
    )
    logit_scale = config.number("logit_scale", minimum=1e-9, maximum=1e9, default=0.0625)
    return replace(spec, logit_scale=logit_scale)


FAMILY = Family(
    model_type="cohere",
    build=build,
    tensors=LLAMA_TENSORS,
    ignored=LLAMA_IGNORED,
    computes=frozenset({"logit_scale"}),
)
