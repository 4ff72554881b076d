"""BitNet b1.58 2B4T (Ma et al. 2025, arXiv 2504.12285): Llama with a norm before the last product
of each branch, and the square of a ReLU. Its weights are ternary (`quant.bitnet`) or bfloat16.
"""

from dataclasses import replace

from ridgeline.core.errors import UnsupportedModelError
from ridgeline.core.spec import MLPSpec, ModelSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.decoder import pre_norm_decoder
from ridgeline.models.family import Family
from ridgeline.models.fields import read_activation, read_heads, read_rms_norm, read_sizes
from ridgeline.models.rope_config import read_rope
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS, layer_tensors


def build(config: ConfigReader) -> ModelSpec:
    """``attention_bias`` is on all projections of attention."""
    sizes = read_sizes(config, max_position=2048)
    heads = read_heads(config, sizes.hidden_size)
    if heads.num_heads * heads.head_dim != sizes.hidden_size:
        raise UnsupportedModelError(
            "The heads of this bitnet model are not as wide as its hidden states, which the norm "
            "behind them is; no such model is known."
        )
    norm = read_rms_norm(config, eps=1e-5)
    bias = config.boolean("attention_bias", default=False)
    attention = replace(
        heads.attention(
            read_rope(config, head_dim=heads.head_dim, max_position=sizes.max_position)
        ),
        qkv_bias=bias,
        out_bias=bias,
        out_norm=norm,
    )
    mlp = MLPSpec(
        width=sizes.mlp_width,
        activation=read_activation(config, "hidden_act", default="relu2"),
        inner_norm=norm,
    )
    return pre_norm_decoder(
        config,
        model_type="bitnet",
        sizes=sizes,
        attention=[attention] * sizes.num_layers,
        mlps=[mlp] * sizes.num_layers,
        norm=norm,
    )


FAMILY = Family(
    model_type="bitnet",
    build=build,
    tensors=LLAMA_TENSORS
    | layer_tensors(
        {"out_norm": "self_attn.attn_sub_norm", "inner_norm": "mlp.ffn_sub_norm"},
    ),
    ignored=LLAMA_IGNORED,
)
