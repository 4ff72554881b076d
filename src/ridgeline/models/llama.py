"""Llama 2 and 3 (Touvron et al. 2023, arXiv 2307.09288; Dubey et al. 2024, arXiv 2407.21783).

InternLM 3 and IQuest-Coder are Llama under other names; Helium (Kyutai 2025) rotates neighbours.
"""

from dataclasses import replace

from ridgeline.core.spec import AttentionSpec, ModelSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.decoder import pre_norm_decoder
from ridgeline.models.family import Family
from ridgeline.models.fields import read_heads, read_sizes
from ridgeline.models.rope_config import read_rope
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS


def build(config: ConfigReader) -> ModelSpec:
    """Grouped-query attention and SwiGLU; biases where the config asks for them."""
    config.refuse("pretraining_tp", unless=(1,))
    sizes = read_sizes(config, max_position=2048)
    heads = read_heads(config, sizes.hidden_size)
    bias = config.boolean("attention_bias", default=False)
    attention = replace(
        heads.attention(
            read_rope(config, head_dim=heads.head_dim, max_position=sizes.max_position)
        ),
        qkv_bias=bias,
        out_bias=bias,
    )
    return pre_norm_decoder(
        config,
        model_type="llama",
        sizes=sizes,
        attention=[attention] * sizes.num_layers,
        mlp_bias=config.boolean("mlp_bias", default=False),
    )


def build_internlm3(config: ConfigReader) -> ModelSpec:
    """InternLM 3 (2025), whose biases have other names in its first configs."""
    for name in ("qkv_bias", "bias"):
        config.refuse(name, unless=(False,))
    return build(config)


def build_helium(config: ConfigReader) -> ModelSpec:
    """Neighbours are rotated against each other, and the output has no bias."""
    config.complete({"rope_theta": 100_000.0, "rms_norm_eps": 1e-8, "head_dim": 128})
    spec = build(config)

    def turned(attention: AttentionSpec) -> AttentionSpec:
        assert attention.rope is not None
        return replace(attention, rope=replace(attention.rope, interleaved=True), out_bias=False)

    layers = (
        replace(layer, attention=turned(layer.attention))
        for layer in spec.layers
        if isinstance(layer.attention, AttentionSpec)
    )
    return replace(spec, model_type="helium", layers=tuple(layers))


FAMILY = Family(model_type="llama", build=build, tensors=LLAMA_TENSORS, ignored=LLAMA_IGNORED)
INTERNLM_3 = replace(FAMILY, model_type="internlm3", build=build_internlm3)
IQUEST_CODER = replace(FAMILY, model_type="iquestcoder")
HELIUM = replace(FAMILY, model_type="helium", build=build_helium)
