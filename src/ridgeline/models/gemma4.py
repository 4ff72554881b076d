"""Gemma 4, its text models (Google 2026, Gemma 4 E2B, E4B, 31B and 26B with experts).

Also serves ``gemma4``, the model with vision and audio, by its ``text_config``.
"""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.core.errors import CorruptFileError, UnsupportedModelError
from ridgeline.core.rope_spec import RopeSpec
from ridgeline.core.spec import (
    AttentionSpec,
    LayerInputSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    RoutingSpec,
    Scoring,
)
from ridgeline.models.config import ConfigReader
from ridgeline.models.family import Family, TensorSource
from ridgeline.models.fields import (
    FULL,
    SLIDING,
    Heads,
    Sizes,
    layer_windows,
    read_activation,
    read_heads,
    read_layer_kinds,
    read_rms_norm,
    read_sizes,
)
from ridgeline.models.gemma2 import MIN_CAP, gemma_decoder
from ridgeline.models.known_keys import refuse_unsupported
from ridgeline.models.rope_config import proportional_rope, read_nested_ropes, rope_section
from ridgeline.models.tensor_names import (
    GEMMA_TENSORS,
    LLAMA_IGNORED,
    fused_tensors,
    layer_tensors,
)
from ridgeline.models.vision import VISION_TENSORS, beside_vision, leave_out_vision

_MAX_HEADS = 2**14
_MAX_HEAD_DIM = 2**13
_THETAS = {FULL: 1_000_000.0, SLIDING: 10_000.0}
_INERT = ("moe_intermediate_size", "num_experts", "top_k_experts")
_COMPUTED = frozenset({"num_experts", "per_layer_config", "use_bidirectional_attention"})
AUDIO_KEYS = (
    "audio_config", "audio_token_id", "boa_token_id", "boi_token_id", "eoa_token_id",
    "eoa_token_index", "eoi_token_id", "vision_soft_tokens_per_image",
)  # fmt: skip
AUDIO_TENSORS = r"(model\.)?(audio_tower|embed_(audio|vision))\..*"


def build(config: ConfigReader) -> ModelSpec:
    """Global layers have heads of their own; the last layers may read K and V of earlier ones."""
    config.refuse("use_bidirectional_attention", unless=("vision",))  # of images alone
    sizes = read_sizes(config, max_position=131_072, vocab_size=262_144)
    default = [FULL if (layer + 1) % 6 == 0 else SLIDING for layer in range(sizes.num_layers)]
    kinds = (*read_layer_kinds(config, sizes.num_layers, default=default)[:-1], FULL)
    attention = _read_attention(config, sizes, kinds)
    spec = gemma_decoder(
        config,
        model_type="gemma4_text",
        sizes=sizes,
        attention=attention,
        logit_softcap=config.optional_number("final_logit_softcapping", minimum=MIN_CAP),
        max_position=sizes.max_position,
        unit_offset=False,
    )
    double = config.boolean("use_double_wide_mlp", default=False)
    experts = _read_experts(config)
    return replace(
        spec,
        layers=tuple(_layer(layer, experts, double=double) for layer in spec.layers),
        layer_inputs=_read_layer_inputs(config, sizes),
    )


def _read_layer_inputs(config: ConfigReader, sizes: Sizes) -> LayerInputSpec | None:
    inputs = read_layer_inputs(config)
    if inputs is not None and inputs.vocab_size < sizes.vocab_size:
        raise UnsupportedModelError(
            f"config.json has per-layer embeddings of {inputs.vocab_size} tokens, fewer than the "
            f"{sizes.vocab_size} of the vocabulary."
        )
    return inputs


def read_layer_inputs(config: ConfigReader) -> LayerInputSpec | None:
    """Per-layer embeddings; ``None`` if they have no width."""
    width = config.integer("hidden_size_per_layer_input", minimum=0, maximum=2**16, default=256)
    vocabulary = config.integer("vocab_size_per_layer_input", maximum=2**24, default=262_144)
    if not width:
        return None
    return LayerInputSpec(
        vocab_size=vocabulary,
        width=width,
        activation=read_activation(config, "hidden_activation", default="gelu_pytorch_tanh"),
        norm=read_rms_norm(config),
    )


def _read_experts(config: ConfigReader) -> MoESpec | None:
    """Those beside each layer's network."""
    if not config.boolean("enable_moe_block", default=False):
        for name in _INERT:
            config.ignore(name)
        return None
    count = config.integer("num_experts", maximum=2**16)
    return MoESpec(
        num_experts=count,
        width=config.integer("moe_intermediate_size", maximum=2**24),
        activation=read_activation(config, "hidden_activation", default="gelu_pytorch_tanh"),
        routing=RoutingSpec(
            top_k=config.integer("top_k_experts", maximum=count),
            scoring=Scoring.SOFTMAX,
            normalised=True,
            expert_scale=True,
        ),
    )


def _layer(layer: LayerSpec, experts: MoESpec | None, *, double: bool) -> LayerSpec:
    """Networks behind K and V of others are ``double`` as wide."""
    assert isinstance(layer.attention, AttentionSpec)
    assert isinstance(layer.mlp, MLPSpec)
    twice = double and layer.attention.kv_layer is not None
    mlp = replace(layer.mlp, width=layer.mlp.width * (2 if twice else 1))
    return replace(layer, mlp=mlp, experts_beside=experts, scaled_output=True)


def _read_attention(
    config: ConfigReader, sizes: Sizes, kinds: Sequence[str]
) -> list[AttentionSpec]:
    heads = read_heads(config, sizes.hidden_size, num_heads=8, num_kv_heads=4, head_dim=256)
    windows = layer_windows(kinds, config.optional_integer("sliding_window", default=512))
    value_is_key = config.boolean("attention_k_eq_v", default=False)
    bias = config.boolean("attention_bias", default=False)
    norm = read_rms_norm(config)
    sources = shared_kv_layers(config, kinds)
    specs = []
    for layer, (kind, window, source) in enumerate(zip(kinds, windows, sources, strict=True)):
        own = _own_heads(config, heads, layer, kind, value_is_key=value_is_key)
        has_values = source is None
        specs.append(
            AttentionSpec(
                num_heads=own.num_heads,
                num_kv_heads=own.num_kv_heads,
                head_dim=own.head_dim,
                scale=1.0,
                rope=_rope(config, kind, own.head_dim, sizes.max_position),
                window=window,
                qkv_bias=bias,
                out_bias=bias,
                qk_norm=norm,
                kv_layer=source,
                value_is_key=value_is_key and kind == FULL and has_values,
                value_norm=has_values,
            )
        )
    return specs


def _own_heads(
    config: ConfigReader, heads: Heads, layer: int, kind: str, *, value_is_key: bool
) -> Heads:
    """A layer's, by ``per_layer_config`` or the older keys of global layers."""
    own = config.section("per_layer_config").section(str(layer))
    defaults = heads
    if "per_layer_config" not in config:
        width = config.integer("global_head_dim", maximum=_MAX_HEAD_DIM, default=512)
        kv_heads = config.integer(
            "num_global_key_value_heads", maximum=_MAX_HEADS, default=heads.num_kv_heads
        )
        if kind == FULL:
            kv_heads = kv_heads if value_is_key else heads.num_kv_heads
            defaults = replace(heads, head_dim=width, num_kv_heads=kv_heads)
    found = replace(
        heads,
        head_dim=own.integer("head_dim", maximum=_MAX_HEAD_DIM, default=defaults.head_dim),
        num_kv_heads=own.integer(
            "num_key_value_heads", maximum=_MAX_HEADS, default=defaults.num_kv_heads
        ),
    )
    if found.num_heads % found.num_kv_heads or found.head_dim % 2:
        raise CorruptFileError(
            f"config.json gives layer {layer} {found.num_heads} heads over {found.num_kv_heads} KV "
            f"heads of {found.head_dim} elements, which do not go together."
        )
    return found


def _rope(config: ConfigReader, kind: str, head_dim: int, max_position: int) -> RopeSpec:
    section, theta = rope_section(config).section(kind), _THETAS[kind]
    absent = section.is_empty()
    is_proportional = kind == FULL and absent
    if is_proportional or section.text("rope_type", default="default") == "proportional":
        part = 0.25 if absent else 1.0
        return proportional_rope(section, head_dim=head_dim, theta=theta, part=part)
    return read_nested_ropes(
        config, head_dim=head_dim, max_position=max_position, thetas={kind: theta}
    )[kind]


def shared_kv_layers(
    config: ConfigReader, kinds: Sequence[str], *, default: int = 0
) -> list[int | None]:
    """Of each layer whose K and V it reads: those of the last of its kind that has its own.

    ``default`` is the number of layers that have none.
    """
    shared = config.integer("num_kv_shared_layers", minimum=0, default=default)
    first = len(kinds) - shared
    last = {kind: layer for layer, kind in enumerate(kinds[: max(first, 0)])}
    if set(kinds) - last.keys():
        raise CorruptFileError(
            f"config.json has num_kv_shared_layers {shared}, which leaves a kind of layers without "
            "K and V."
        )
    return [None if layer < first else last[kind] for layer, kind in enumerate(kinds)]


def build_with_vision(config: ConfigReader) -> ModelSpec:
    """The text model of a config that has towers for images and sound beside it."""
    leave_out_vision(config)
    for name in AUDIO_KEYS:
        config.ignore(name)
    text = config.section("text_config")
    refuse_unsupported(text, computed=_COMPUTED)
    spec = build(text)
    config.refuse("tie_word_embeddings", unless=(spec.tie_embeddings,))
    return spec


_GATE_UP = {
    "model.layers.{i}.experts.gate_up_proj": ("layers.{i}.experts.gate", "layers.{i}.experts.up")
}
FAMILY = Family(
    model_type="gemma4_text",
    build=build,
    tensors=GEMMA_TENSORS
    | {
        "layer_embed": TensorSource(name="model.embed_tokens_per_layer.weight"),
        "layer_projection": TensorSource(name="model.per_layer_model_projection.weight"),
        "layer_projection_norm": TensorSource(name="model.per_layer_projection_norm.weight"),
        "layers.{i}.scale": TensorSource(name="model.layers.{i}.layer_scalar"),
        "layers.{i}.router_norm": TensorSource(name="model.layers.{i}.router.scale"),
        "layers.{i}.expert_scale": TensorSource(name="model.layers.{i}.router.per_expert_scale"),
        "layers.{i}.experts.down": TensorSource(name="model.layers.{i}.experts.down_proj"),
    }
    | fused_tensors(_GATE_UP)
    | layer_tensors(
        {
            "input_gate": "per_layer_input_gate",
            "input_up": "per_layer_projection",
            "input_norm": "post_per_layer_input_norm",
            "mlp_own_norm": "post_feedforward_layernorm_1",
            "experts_norm": "pre_feedforward_layernorm_2",
            "experts_own_norm": "post_feedforward_layernorm_2",
            "router": "router.proj",
        }
    ),
    fused=_GATE_UP,
    # Checkpoints have what layers that read K and V of others do not use.
    ignored=(*LLAMA_IGNORED, r".*\.self_attn\.[kv]_(proj|norm)\.(weight|bias)"),
    computes=_COMPUTED,
)
FAMILY_WITH_VISION = Family(
    model_type="gemma4",
    build=build_with_vision,
    tensors=beside_vision(FAMILY.tensors),
    fused=_GATE_UP,
    ignored=(*FAMILY.ignored, VISION_TENSORS, AUDIO_TENSORS),
)
