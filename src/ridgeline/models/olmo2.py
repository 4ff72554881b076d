"""OLMo 2 (arXiv 2501.00656): norms after each branch instead of before, and on all of q and k."""

from ridgeline.core.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, NormScope
from ridgeline.models.config import ConfigReader
from ridgeline.models.family import Family
from ridgeline.models.fields import read_activation, read_heads, read_rms_norm, read_sizes
from ridgeline.models.rope_config import extended_context, read_rope
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS, layer_tensors


def build(config: ConfigReader) -> ModelSpec:
    """The branches read the residual stream as it is; ``attention_bias`` is on all projections."""
    sizes = read_sizes(config, max_position=2048)
    heads = read_heads(config, sizes.hidden_size)
    bias = config.boolean("attention_bias", default=False)
    norm = read_rms_norm(config, eps=1e-5)
    rope = read_rope(config, head_dim=heads.head_dim, max_position=sizes.max_position)
    attention = AttentionSpec(
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        scale=heads.head_dim**-0.5,
        rope=rope,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=norm,
        qk_norm_scope=NormScope.PROJECTION,
    )
    activation = read_activation(config, "hidden_act", default="silu")
    layer = LayerSpec(
        attention=attention,
        mlp=MLPSpec(width=sizes.mlp_width, activation=activation),
        attention_norm=None,
        mlp_norm=None,
        attention_post_norm=norm,
        mlp_post_norm=norm,
    )
    return ModelSpec(
        model_type="olmo2",
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        layers=(layer,) * sizes.num_layers,
        final_norm=norm,
        max_position=extended_context(sizes.max_position, [rope]),
        tie_embeddings=config.boolean("tie_word_embeddings", default=False),
    )


FAMILY = Family(
    model_type="olmo2",
    build=build,
    tensors=LLAMA_TENSORS
    | layer_tensors(
        {
            "attention_post_norm": "post_attention_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        }
    ),
    ignored=LLAMA_IGNORED,
)
