"""AFMoE (Arcee AI 2025: Trinity): gated attention between two norms, windows with rotary positions
in most layers and neither in the others, DeepSeek-V3's experts."""

from dataclasses import replace

from ridgeline.core.spec import AttentionSpec, ModelSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.decoder import with_post_norms
from ridgeline.models.deepseek_v2 import deepseek_decoder
from ridgeline.models.deepseek_v3 import SIGMOID_MOE_TENSORS, read_sigmoid_routing
from ridgeline.models.family import Family, TensorSource
from ridgeline.models.fields import (
    FULL,
    SLIDING,
    Sizes,
    layer_windows,
    read_heads,
    read_layer_kinds,
    read_rms_norm,
    read_sizes,
)
from ridgeline.models.moe_config import EXPERT_KEYS, read_num_experts
from ridgeline.models.rope_config import read_rope
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS, layer_tensors

_EPS = 1e-5
# What configs say besides, with the values that all published models have.
_FIXED: dict[str, tuple[object, ...]] = {
    "attention_bias": (False,),
    "num_expert_groups": (1,),
    "num_limited_groups": (1,),
    "route_norm": (True,),
    "score_func": ("sigmoid",),
}


def build(config: ConfigReader) -> ModelSpec:
    """``mup_enabled``: embeddings are times √D."""
    for name, values in _FIXED.items():
        config.refuse(name, unless=values)
    for name in ("load_balance_coeff", "use_grouped_mm"):
        config.ignore(name)
    sizes = read_sizes(config, max_position=16_384, vocab_size=200_192)
    num_experts = read_num_experts(config, "num_experts", "num_local_experts")
    scale = config.number("route_scale", minimum=1e-6, maximum=1e6, default=1.0)
    spec = deepseek_decoder(
        config,
        model_type="afmoe",
        sizes=sizes,
        attention=_attention(config, sizes),
        num_experts=num_experts,
        routing=read_sigmoid_routing(config, num_experts, top_k=6, scale=scale),
        num_shared=config.integer("num_shared_experts", minimum=0, maximum=2**10, default=2),
        num_dense=config.integer("num_dense_layers", minimum=0, default=1),
        eps=_EPS,
    )
    if config.boolean("mup_enabled", default=False):
        spec = replace(spec, embedding_scale=sizes.hidden_size**0.5)
    return with_post_norms(spec)


def _attention(config: ConfigReader, sizes: Sizes) -> list[AttentionSpec]:
    """Without ``layer_types`` each ``global_attn_every_n_layers``-th layer has no window."""
    heads = read_heads(config, sizes.hidden_size, head_dim=128)
    every = config.integer("global_attn_every_n_layers", default=4)
    by_turns = [SLIDING if layer % every else FULL for layer in range(1, sizes.num_layers + 1)]
    kinds = read_layer_kinds(config, sizes.num_layers, default=by_turns)
    windows = layer_windows(kinds, config.optional_integer("sliding_window", default=1024))
    rope = read_rope(config, head_dim=heads.head_dim, max_position=sizes.max_position)
    return [
        replace(
            heads.attention(rope if kind == SLIDING else None),
            window=window,
            qk_norm=read_rms_norm(config, eps=_EPS),
            output_gate=True,
        )
        for kind, window in zip(kinds, windows, strict=True)
    ]


FAMILY = Family(
    model_type="afmoe",
    build=build,
    tensors=LLAMA_TENSORS
    | SIGMOID_MOE_TENSORS
    | layer_tensors(
        {
            "gate_heads": "self_attn.gate_proj",
            "attention_post_norm": "post_attention_layernorm",
            "mlp_norm": "pre_mlp_layernorm",
            "mlp_post_norm": "post_mlp_layernorm",
            "router": "mlp.router.gate",
        }
    )
    | {"layers.{i}.correction_bias": TensorSource(name="model.layers.{i}.mlp.expert_bias")},
    ignored=LLAMA_IGNORED,
    computes=EXPERT_KEYS,
)
