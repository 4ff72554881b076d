"""Nemotron-H and Nemotron Nano 2 and 3 (NVIDIA, arXiv 2504.03624): each layer is one of Mamba-2,
attention, a feed-forward network, or experts."""

from dataclasses import replace

from ridgeline.core.errors import CorruptFileError, UnsupportedModelError
from ridgeline.core.spec import (
    LayerSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    NormKind,
    NormSpec,
    SharedExpertSpec,
)
from ridgeline.models.config import ConfigReader, show
from ridgeline.models.deepseek_v3 import read_sigmoid_routing
from ridgeline.models.family import Family, TensorSource
from ridgeline.models.fields import FULL, Sizes, read_activation, read_heads, read_sizes
from ridgeline.models.mamba_config import (
    LINEAR,
    OLD_KINDS,
    Mamba2Keys,
    mamba2_fused,
    mamba2_tensors,
    read_mamba2,
)
from ridgeline.models.moe_config import (
    EXPERT_KEYS,
    check_routing,
    ignore_training,
    read_num_experts,
    read_width,
)
from ridgeline.models.tensor_names import LLAMA_IGNORED, layer_tensors

_MLP, _MOE = "mlp", "moe"
_LETTERS = {"M": LINEAR, "*": FULL, "-": _MLP, "E": _MOE}
_KEYS = Mamba2Keys(
    num_heads="mamba_num_heads",
    head_dim="mamba_head_dim",
    num_groups="n_groups",
    state_dim="ssm_state_size",
    conv_length="conv_kernel",
    conv_bias="use_conv_bias",
    bias="use_bias",
    activation="mamba_hidden_act",
)
# Of checkpoints; transformers reads none of them, or only where it trains.
_INERT = (
    "expand", "mamba_proj_bias", "moe_shared_expert_overlap", "mtp_hybrid_override_pattern",
    "mtp_layers_block_type", "num_logits_to_keep", "num_nextn_predict_layers",
    "attention_bias", "sliding_window",
)  # fmt: skip
_EXPERT_KEYS = (
    "moe_intermediate_size", "moe_latent_size", "moe_shared_expert_intermediate_size", "n_group",
    "n_routed_experts", "n_shared_experts", "norm_topk_prob", "num_experts_per_tok",
    "routed_scaling_factor", "topk_group",
)  # fmt: skip


def build(config: ConfigReader) -> ModelSpec:
    """Attention has no positions."""
    for name in (*_INERT, "num_hidden_layers"):
        config.ignore(name)
    ignore_training(config)
    kinds = _kinds(config)
    config.complete({"num_hidden_layers": len(kinds)})
    sizes = read_sizes(config, max_position=4096, vocab_size=131_072)
    eps = config.number("layer_norm_epsilon", minimum=1e-15, maximum=1.0, default=1e-5)
    norm = NormSpec(kind=NormKind.RMS, eps=eps)
    heads = read_heads(config, sizes.hidden_size, num_heads=32, num_kv_heads=8, head_dim=128)
    scan = LayerSpec(
        attention=read_mamba2(config, _KEYS, hidden_size=sizes.hidden_size, norm=norm),
        mlp=None,
        attention_norm=norm,
        mlp_norm=None,
    )
    dense = LayerSpec(
        attention=None, mlp=_read_mlp(config, sizes), attention_norm=None, mlp_norm=norm
    )
    layers = {
        LINEAR: scan,
        FULL: replace(scan, attention=heads.attention(None)),
        _MLP: dense,
        _MOE: replace(dense, mlp=_read_experts(config, needed=_MOE in kinds)),
    }
    return ModelSpec(
        model_type="nemotron_h",
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        layers=tuple(layers[kind] for kind in kinds),
        final_norm=norm,
        max_position=sizes.max_position,
        tie_embeddings=config.boolean("tie_word_embeddings", default=False),
    )


def _kinds(config: ConfigReader) -> tuple[str, ...]:
    """What each layer is, from ``hybrid_override_pattern`` or a list of words."""
    pattern = "hybrid_override_pattern"
    if pattern in config:
        kinds = tuple(_LETTERS.get(letter, letter) for letter in config.text(pattern))
    else:
        name = "layers_block_type" if "layers_block_type" in config else "layer_types"
        kinds = tuple(OLD_KINDS.get(kind, kind) for kind in config.texts(name) or ())
    unknown = sorted(set(kinds) - set(_LETTERS.values()))
    if unknown:
        raise UnsupportedModelError(
            f"config.json lists layers of {show(unknown[0])}; supported are "
            f"{', '.join(_LETTERS.values())}."
        )
    if not kinds:
        raise CorruptFileError("config.json does not say what its layers are.")
    return kinds


def _read_mlp(config: ConfigReader, sizes: Sizes) -> MLPSpec:
    return MLPSpec(
        width=sizes.mlp_width,
        activation=read_activation(config, "mlp_hidden_act", default="relu2"),
        gated=False,
        bias=config.boolean("mlp_bias", default=False),
    )


def _read_experts(config: ConfigReader, *, needed: bool) -> MoESpec | None:
    """The experts, if there are any; as DeepSeek-V3's, without gates.

    Raises:
        UnsupportedModelError: they have biases or work on latents.
    """
    if not needed:
        for name in _EXPERT_KEYS:
            config.ignore(name)
        return None
    if "moe_latent_size" in config or config.boolean("mlp_bias", default=False):
        raise UnsupportedModelError(
            "config.json has experts that work on latents (moe_latent_size) or have biases "
            "(mlp_bias), which Ridgeline lacks."
        )
    num_experts = read_num_experts(config, "n_routed_experts", "num_local_experts")
    config.refuse("n_shared_experts", unless=(1,))
    routing = read_sigmoid_routing(config, num_experts, top_k=2)
    check_routing(routing, num_experts)
    return MoESpec(
        num_experts=num_experts,
        width=read_width(config, "moe_intermediate_size"),
        activation=read_activation(config, "mlp_hidden_act", default="relu2"),
        routing=routing,
        shared=SharedExpertSpec(width=read_width(config, "moe_shared_expert_intermediate_size")),
        gated=False,
    )


_MODULES = {
    "attention_norm": "norm",
    "mlp_norm": "norm",
    **{name: f"mixer.{name}_proj" for name in ("q", "k", "v", "o")},
    "router": "mixer.gate",
    "experts.up": "mixer.experts.{e}.up_proj",
    "experts.down": "mixer.experts.{e}.down_proj",
    "shared.up": "mixer.shared_experts.up_proj",
    "shared.down": "mixer.shared_experts.down_proj",
}
_TENSORS = {
    "embed": TensorSource(name="model.embeddings.weight"),
    "final_norm": TensorSource(name="model.norm_f.weight"),
    "head": TensorSource(name="lm_head.weight"),
    "layers.{i}.correction_bias": TensorSource(
        name="model.layers.{i}.mixer.gate.e_score_correction_bias"
    ),
    **layer_tensors(_MODULES),
    **layer_tensors({name: f"mixer.{name}_proj" for name in ("up", "down")}, bias=True),
    **mamba2_tensors("mixer"),
}
FAMILY = Family(
    model_type="nemotron_h",
    build=build,
    # NVIDIA's own name for what transformers calls the model.
    tensors={
        name: replace(source, other_names=(source.name.replace("model.", "backbone.", 1),))
        for name, source in _TENSORS.items()
    },
    fused=mamba2_fused("mixer"),
    ignored=(*LLAMA_IGNORED, r"mtp\..*"),
    computes=EXPERT_KEYS,
)
