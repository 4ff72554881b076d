"""gpt-oss (OpenAI 2025, arXiv 2508.10925): attention sinks, clamped SwiGLU, windows by turns."""

from dataclasses import replace

from ridgeline.core.errors import CorruptFileError
from ridgeline.core.spec import (
    ClampedSwiGLU,
    ModelSpec,
    MoESpec,
    RoutingSpec,
    Scoring,
)
from ridgeline.models.config import ConfigReader
from ridgeline.models.decoder import pre_norm_decoder
from ridgeline.models.family import Family, TensorSource
from ridgeline.models.fields import (
    FULL,
    SLIDING,
    layer_windows,
    read_heads,
    read_layer_kinds,
    read_sizes,
)
from ridgeline.models.moe_config import EXPERT_KEYS, ignore_training, read_num_experts, read_top_k
from ridgeline.models.rope_config import read_rope, rope_section
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS, layer_tensors


def _experts(config: ConfigReader, width: int) -> MoESpec:
    """Biases everywhere; softmax over the chosen experts' logits, as if all had been normalised."""
    config.refuse("hidden_act", unless=("silu", "swish"))
    ignore_training(config)
    num_experts = read_num_experts(config, "num_local_experts", "num_experts")
    return MoESpec(
        num_experts=num_experts,
        width=width,
        activation=ClampedSwiGLU(
            alpha=config.number("swiglu_alpha", minimum=1e-3, maximum=1e3, default=1.702),
            limit=config.number("swiglu_limit", minimum=1e-3, maximum=1e6, default=7.0),
        ),
        routing=RoutingSpec(
            top_k=read_top_k(config, num_experts, default=4),
            scoring=Scoring.SOFTMAX,
            normalised=True,
            bias=True,
        ),
        bias=True,
    )


def build(config: ConfigReader) -> ModelSpec:
    """Sliding layers first, then by turns, unless ``layer_types`` says otherwise."""
    if rope_section(config).is_empty():
        raise CorruptFileError("config.json has neither rope_parameters nor rope_scaling.")
    config.ignore("initial_context_length")  # says the same as the original length of the rope
    sizes = read_sizes(config, max_position=131_072, vocab_size=201_088)
    heads = read_heads(config, sizes.hidden_size, head_dim=64)
    by_turns = [FULL if layer % 2 else SLIDING for layer in range(sizes.num_layers)]
    kinds = read_layer_kinds(config, sizes.num_layers, default=by_turns)
    windows = layer_windows(kinds, config.optional_integer("sliding_window", default=128))
    rope = read_rope(
        config, head_dim=heads.head_dim, max_position=sizes.max_position, theta=150_000.0
    )
    bias = config.boolean("attention_bias", default=True)
    attention = (
        replace(
            heads.attention(rope),
            window=window,
            qkv_bias=bias,
            out_bias=bias,
            sinks=True,
        )
        for window in windows
    )
    return pre_norm_decoder(
        config,
        model_type="gpt_oss",
        sizes=sizes,
        attention=attention,
        mlps=[_experts(config, sizes.mlp_width)] * sizes.num_layers,
    )


_EXPERTS = "model.layers.{i}.mlp.experts"
_TENSORS = {
    **layer_tensors({"router": "mlp.router"}),
    "layers.{i}.router_bias": TensorSource(name="model.layers.{i}.mlp.router.bias"),
    "layers.{i}.sinks": TensorSource(name="model.layers.{i}.self_attn.sinks"),
    # [E, D, 2F], gate and up by turns.
    "layers.{i}.experts.gate": TensorSource(
        name=f"{_EXPERTS}.gate_up_proj", transpose=True, every_other=0
    ),
    "layers.{i}.experts.up": TensorSource(
        name=f"{_EXPERTS}.gate_up_proj", transpose=True, every_other=1
    ),
    "layers.{i}.experts.gate_bias": TensorSource(
        name=f"{_EXPERTS}.gate_up_proj_bias", every_other=0
    ),
    "layers.{i}.experts.up_bias": TensorSource(name=f"{_EXPERTS}.gate_up_proj_bias", every_other=1),
    "layers.{i}.experts.down": TensorSource(name=f"{_EXPERTS}.down_proj", transpose=True),
    "layers.{i}.experts.down_bias": TensorSource(name=f"{_EXPERTS}.down_proj_bias"),
}
FAMILY = Family(
    model_type="gpt_oss",
    build=build,
    tensors=LLAMA_TENSORS | _TENSORS,
    ignored=LLAMA_IGNORED,
    computes=EXPERT_KEYS,
)
