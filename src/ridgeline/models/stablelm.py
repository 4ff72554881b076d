"""StableLM 2 (arXiv 2402.17834): LayerNorm, a quarter of each head rotated."""

from dataclasses import replace

from ridgeline.core.spec import ModelSpec, NormScope
from ridgeline.models.config import ConfigReader
from ridgeline.models.decoder import pre_norm_decoder
from ridgeline.models.family import Family
from ridgeline.models.fields import read_heads, read_layer_norm, read_sizes
from ridgeline.models.rope_config import read_rope
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS, NORM_BIASES, layer_tensors


def build(config: ConfigReader) -> ModelSpec:
    """``use_parallel_residual``: both branches read the same norm; ``qk_layernorm``: each head of
    q and of k has a norm of its own."""
    sizes = read_sizes(config, max_position=4096)
    heads = read_heads(config, sizes.hidden_size)
    norm = read_layer_norm(config, "layer_norm_eps", bias=True)
    qk_norm = replace(norm, bias=False) if config.boolean("qk_layernorm", default=False) else None
    attention = replace(
        heads.attention(
            read_rope(
                config, head_dim=heads.head_dim, max_position=sizes.max_position, partial=0.25
            )
        ),
        qkv_bias=config.boolean("use_qkv_bias", default=False),
        qk_norm=qk_norm,
        qk_norm_scope=NormScope.HEAD if qk_norm is None else NormScope.EACH_HEAD,
    )
    return pre_norm_decoder(
        config,
        model_type="stablelm",
        sizes=sizes,
        attention=[attention] * sizes.num_layers,
        norm=norm,
        parallel=config.boolean("use_parallel_residual", default=False),
    )


FAMILY = Family(
    model_type="stablelm",
    build=build,
    tensors=LLAMA_TENSORS
    | NORM_BIASES
    | layer_tensors(
        {
            "q_norm": "self_attn.q_layernorm.norms.{e}",
            "k_norm": "self_attn.k_layernorm.norms.{e}",
        }
    ),
    ignored=LLAMA_IGNORED,
    computes=frozenset({"partial_rotary_factor"}),
)
