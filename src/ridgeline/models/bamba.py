"""Bamba (IBM, Princeton, CMU, UIUC 2024): Mamba-2 in most layers, attention in a few."""

from dataclasses import replace

from ridgeline.core.spec import ModelSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.decoder import pre_norm_decoder
from ridgeline.models.family import Family, TensorSource
from ridgeline.models.fields import read_heads, read_rms_norm, read_sizes
from ridgeline.models.mamba_config import BAMBA_KEYS, mamba2_fused, mamba2_tensors, read_mamba2
from ridgeline.models.rope_config import read_rope
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS, layer_tensors


def build(config: ConfigReader) -> ModelSpec:
    """Half of each head is rotated; ``attn_layer_indices`` are the layers that attend."""
    for name in ("num_logits_to_keep", "z_loss_coefficient"):
        config.ignore(name)
    sizes = read_sizes(config, max_position=262_144)
    heads = read_heads(config, sizes.hidden_size, num_kv_heads=8)
    norm = read_rms_norm(config, eps=1e-5)
    bias = config.boolean("attention_bias", default=False)
    rope = read_rope(config, head_dim=heads.head_dim, max_position=sizes.max_position, partial=0.5)
    attention = replace(heads.attention(rope), qkv_bias=bias, out_bias=bias)
    scan = read_mamba2(config, BAMBA_KEYS, hidden_size=sizes.hidden_size, norm=norm)
    attending = config.integers("attn_layer_indices", minimum=0) or ()
    return pre_norm_decoder(
        config,
        model_type="bamba",
        sizes=sizes,
        attention=[attention if i in attending else scan for i in range(sizes.num_layers)],
        mlp_bias=config.boolean("mlp_bias", default=False),
        norm=norm,
    )


_NETWORK = {name: f"feed_forward.{name}_proj" for name in ("gate", "up", "down")}
FAMILY = Family(
    model_type="bamba",
    build=build,
    tensors=LLAMA_TENSORS
    | mamba2_tensors("mamba")
    | layer_tensors(_NETWORK, bias=True)
    | layer_tensors({"mlp_norm": "pre_ff_layernorm"})
    | {"final_norm": TensorSource(name="model.final_layernorm.weight")},
    fused=mamba2_fused("mamba"),
    ignored=LLAMA_IGNORED,
    computes=frozenset({"partial_rotary_factor"}),
)
