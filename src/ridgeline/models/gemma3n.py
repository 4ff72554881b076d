"""Gemma 3n, its text models (Google 2025, Gemma 3n E2B and E4B).

Also serves ``gemma3n``, the model with vision and audio, by its ``text_config``.
"""

from dataclasses import replace
from statistics import NormalDist

from ridgeline.core.errors import CorruptFileError
from ridgeline.core.spec import (
    MOST_STREAMS,
    AttentionSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    StreamsSpec,
)
from ridgeline.models.config import ConfigReader
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
from ridgeline.models.gemma2 import MIN_CAP, gemma_decoder
from ridgeline.models.gemma3_text import read_gemma_ropes
from ridgeline.models.gemma4 import AUDIO_KEYS, AUDIO_TENSORS, read_layer_inputs, shared_kv_layers
from ridgeline.models.known_keys import refuse_unsupported
from ridgeline.models.tensor_names import GEMMA_TENSORS, LLAMA_IGNORED, layer_tensors
from ridgeline.models.vision import VISION_TENSORS, beside_vision, leave_out_vision

_MOST_RANK = 2**16
_LAYER_WIDTH = 2**22
_SPARSE_LAYERS, _SPARSITY = 10, 0.95  # where the config says nothing


def build(config: ConfigReader) -> ModelSpec:
    """Several residual streams, low-rank branches beside attention, per-layer embeddings."""
    config.refuse("altup_active_idx", unless=(0,))
    for name in ("altup_coef_clip", "altup_lr_multiplier"):  # of training
        config.ignore(name)
    widths = config.integers("intermediate_size") if config.is_list("intermediate_size") else None
    first = min(widths[0], _LAYER_WIDTH) if widths else None
    sizes = read_sizes(config, max_position=32_768, vocab_size=262_400, mlp_width=first)
    spec = gemma_decoder(
        config,
        model_type="gemma3n_text",
        sizes=sizes,
        attention=_attention(config, sizes),
        logit_softcap=config.optional_number(
            "final_logit_softcapping", minimum=MIN_CAP, default=30.0
        ),
        max_position=sizes.max_position,
        unit_offset=False,
    )
    inputs = read_layer_inputs(config)
    if inputs is None:
        raise CorruptFileError("config.json gives per-layer embeddings no width.")
    rank = config.integer("laurel_rank", maximum=_MOST_RANK, default=64)
    networks = _networks(config, sizes, spec.layers[0], widths)
    layers = zip(spec.layers, networks, strict=True)
    return replace(
        spec,
        layers=tuple(replace(layer, mlp=mlp, laurel_rank=rank) for layer, mlp in layers),
        layer_inputs=inputs,
        streams=StreamsSpec(
            num_streams=config.integer(
                "altup_num_inputs", minimum=2, maximum=MOST_STREAMS, default=4
            ),
            norm=read_rms_norm(config),
            scaled=config.boolean("altup_correct_scale", default=True),
        ),
    )


def _networks(
    config: ConfigReader, sizes: Sizes, layer: LayerSpec, widths: tuple[int, ...] | None
) -> list[MLPSpec]:
    """Each layer's, which may be narrower than others, or sparse inside."""
    sparse = _SPARSE_LAYERS if sizes.num_layers > _SPARSE_LAYERS else 0
    sparsities = config.numbers("activation_sparsity_pattern", minimum=0.0, maximum=1 - 2**-20)
    if sparsities is None:
        sparsities = (_SPARSITY,) * sparse + (0.0,) * (sizes.num_layers - sparse)
    widths = widths or (sizes.mlp_width,) * sizes.num_layers
    for name, values in (
        ("intermediate_size", widths), ("activation_sparsity_pattern", sparsities)
    ):  # fmt: skip
        if len(values) != sizes.num_layers:
            raise CorruptFileError(
                f"config.json lists {len(values)} values of {name} for {sizes.num_layers} layers."
            )
    if max(widths) > _LAYER_WIDTH:
        raise CorruptFileError(f"config.json lists an intermediate_size above {_LAYER_WIDTH}.")
    assert isinstance(layer.mlp, MLPSpec)
    return [
        replace(layer.mlp, width=width, cutoff=NormalDist().inv_cdf(part) if part else None)
        for width, part in zip(widths, sparsities, strict=True)
    ]


def _attention(config: ConfigReader, sizes: Sizes) -> list[AttentionSpec]:
    """The last layers read K and V of earlier ones."""
    heads = read_heads(config, sizes.hidden_size, num_heads=8, num_kv_heads=2, head_dim=256)
    by_turns = [SLIDING if layer % 5 else FULL for layer in range(1, sizes.num_layers + 1)]
    kinds = read_layer_kinds(config, sizes.num_layers, default=by_turns)
    windows = layer_windows(kinds, config.optional_integer("sliding_window", default=512))
    ropes = read_gemma_ropes(config, head_dim=heads.head_dim, max_position=sizes.max_position)
    bias = config.boolean("attention_bias", default=False)
    sources = shared_kv_layers(config, kinds, default=15)
    return [
        replace(
            heads.attention(ropes[kind]),
            scale=1.0,
            window=window,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=read_rms_norm(config),
            kv_layer=source,
            value_norm=source is None,
        )
        for kind, window, source in zip(kinds, windows, sources, strict=True)
    ]


def build_with_vision(config: ConfigReader) -> ModelSpec:
    """The text model of a config that has towers for images and sound beside it."""
    leave_out_vision(config)
    for name in (*AUDIO_KEYS, "audio_soft_tokens_per_image"):
        config.ignore(name)
    text = config.section("text_config")
    refuse_unsupported(text)
    spec = build(text)
    config.refuse("tie_word_embeddings", unless=(spec.tie_embeddings,))
    return spec


_STREAMS = {
    f"streams.{stream}.{ours}": TensorSource(name=f"model.{theirs}.{stream - 1}.weight")
    for stream in range(1, MOST_STREAMS)
    for ours, theirs in (("split", "altup_projections"), ("join", "altup_unembed_projections"))
}
FAMILY = Family(
    model_type="gemma3n_text",
    build=build,
    tensors=GEMMA_TENSORS
    | _STREAMS
    | {
        "layer_embed": TensorSource(name="model.embed_tokens_per_layer.weight"),
        "layer_projection": TensorSource(name="model.per_layer_model_projection.weight"),
        "layer_projection_norm": TensorSource(name="model.per_layer_projection_norm.weight"),
        "layers.{i}.correct_scale": TensorSource(
            name="model.layers.{i}.altup.correct_output_scale"
        ),
    }
    | layer_tensors(
        {
            "input_gate": "per_layer_input_gate",
            "input_up": "per_layer_projection",
            "input_norm": "post_per_layer_input_norm",
            "stream_router": "altup.modality_router",
            "stream_norm": "altup.router_norm",
            "predict": "altup.prediction_coefs",
            "correct": "altup.correction_coefs",
            "laurel_down": "laurel.linear_left",
            "laurel_up": "laurel.linear_right",
            "laurel_norm": "laurel.post_laurel_norm",
        }
    ),
    # Checkpoints have what layers that read K and V of others do not use, and unused scales.
    ignored=(
        *LLAMA_IGNORED,
        r".*\.self_attn\.[kv]_(proj|norm)\.(weight|bias)",
        r".*\.altup\.correct_output_scale",
    ),
)
FAMILY_WITH_VISION = Family(
    model_type="gemma3n",
    build=build_with_vision,
    tensors=beside_vision(FAMILY.tensors),
    ignored=(*FAMILY.ignored, VISION_TENSORS, AUDIO_TENSORS),
)
