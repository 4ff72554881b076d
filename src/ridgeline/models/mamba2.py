"""Mamba-2 alone (Dao and Gu 2024, arXiv 2405.21060): no attention, and no feed-forward networks."""

from ridgeline.core.spec import LayerSpec, ModelSpec, NormKind, NormSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.family import Family, TensorSource
from ridgeline.models.fields import read_sizes
from ridgeline.models.mamba_config import Mamba2Keys, mamba2_fused, mamba2_tensors, read_mamba2
from ridgeline.models.tensor_names import LLAMA_IGNORED, layer_tensors

_KEYS = Mamba2Keys(
    num_heads="num_heads",
    head_dim="head_dim",
    num_groups="n_groups",
    state_dim="state_size",
    conv_length="conv_kernel",
    conv_bias="use_conv_bias",
    bias="use_bias",
    expand="expand",
)


def build(config: ConfigReader) -> ModelSpec:
    """Configs give no longest context: states do not grow."""
    sizes = read_sizes(config, max_position=2**20, vocab_size=32_768, mlp_width=0)
    eps = config.number("layer_norm_epsilon", minimum=1e-15, maximum=1.0, default=1e-5)
    norm = NormSpec(kind=NormKind.RMS, eps=eps)
    layer = LayerSpec(
        attention=read_mamba2(config, _KEYS, hidden_size=sizes.hidden_size, norm=norm),
        mlp=None,
        attention_norm=norm,
        mlp_norm=None,
    )
    return ModelSpec(
        model_type="mamba2",
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        layers=(layer,) * sizes.num_layers,
        final_norm=norm,
        max_position=sizes.max_position,
        tie_embeddings=config.boolean("tie_word_embeddings", default=False),
    )


FAMILY = Family(
    model_type="mamba2",
    build=build,
    tensors={
        name: TensorSource(name=source.name.replace("model.", "backbone."), squeeze=source.squeeze)
        for name, source in {
            "embed": TensorSource(name="model.embeddings.weight"),
            "final_norm": TensorSource(name="model.norm_f.weight"),
            "head": TensorSource(name="lm_head.weight"),
            **layer_tensors({"attention_norm": "norm"}),
            **mamba2_tensors("mixer"),
        }.items()
    },
    fused={
        name.replace("model.", "backbone."): parts for name, parts in mamba2_fused("mixer").items()
    },
    ignored=LLAMA_IGNORED,
)
