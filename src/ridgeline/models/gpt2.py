"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm, biases, matrices stored transposed."""

from dataclasses import replace

from ridgeline.core.errors import CorruptFileError
from ridgeline.core.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.family import Family, TensorSource
from ridgeline.models.fields import Sizes, read_activation, read_layer_norm

_PREFIX = "transformer."  # left out in the files that OpenAI's models are published with
_QKV = ("layers.{i}.q", "layers.{i}.k", "layers.{i}.v")
_FUSED = {
    f"{_PREFIX}h.{{i}}.attn.c_attn.weight": _QKV,
    f"{_PREFIX}h.{{i}}.attn.c_attn.bias": tuple(f"{name}_bias" for name in _QKV),
}
_MATRICES = {"o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
_NORMS = {"attention_norm": "ln_1", "mlp_norm": "ln_2"}
_UNUSED = (
    "reorder_and_upcast_attn",  # the order of operations in float16
    "n_ctx",  # an old copy of n_positions
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
)


def build(config: ConfigReader) -> ModelSpec:
    """Attention scaled by the layer too, if ``scale_attn_by_inverse_layer_idx``."""
    for name in _UNUSED:
        config.ignore(name)
    sizes, num_heads = _read_sizes(config), _either(config, "n_head", "num_attention_heads", 2**14)
    if sizes.hidden_size % num_heads:
        raise CorruptFileError(
            f"config.json gives n_embd as {sizes.hidden_size}, which is no multiple of n_head, "
            f"{num_heads}."
        )
    head_dim = sizes.hidden_size // num_heads
    scaled = config.boolean("scale_attn_weights", default=True)
    by_layer = config.boolean("scale_attn_by_inverse_layer_idx", default=False)
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5 if scaled else 1.0,
        rope=None,
        qkv_bias=True,
        out_bias=True,
    )
    activation = read_activation(config, "activation_function", default="gelu_new")
    norm = read_layer_norm(config, "layer_norm_epsilon", bias=True)
    return ModelSpec(
        model_type="gpt2",
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        layers=tuple(
            LayerSpec(
                attention=replace(attention, scale=attention.scale / (layer + 1))
                if by_layer
                else attention,
                mlp=MLPSpec(width=sizes.mlp_width, activation=activation, gated=False, bias=True),
                attention_norm=norm,
                mlp_norm=norm,
            )
            for layer in range(sizes.num_layers)
        ),
        final_norm=norm,
        max_position=sizes.max_position,
        learned_positions=sizes.max_position,
        tie_embeddings=config.boolean("tie_word_embeddings", default=True),
    )


def _read_sizes(config: ConfigReader) -> Sizes:
    hidden_size = _either(config, "n_embd", "hidden_size", 2**22)
    return Sizes(
        vocab_size=config.integer("vocab_size", maximum=2**24),
        hidden_size=hidden_size,
        mlp_width=config.integer("n_inner", maximum=2**22, default=4 * hidden_size),
        num_layers=_either(config, "n_layer", "num_hidden_layers", 4096),
        max_position=_either(config, "n_positions", "max_position_embeddings", 2**24),
    )


def _either(config: ConfigReader, name: str, other: str, maximum: int) -> int:
    """A size under its old name, or under the one that transformers takes as well."""
    return config.integer(other if other in config else name, maximum=maximum)


def _source(name: str, *, transpose: bool = False) -> TensorSource:
    return TensorSource(name=f"{_PREFIX}{name}", other_names=(name,), transpose=transpose)


def _tensors() -> dict[str, TensorSource]:
    tensors = {
        "embed": _source("wte.weight"),
        "positions": _source("wpe.weight"),
        "final_norm": _source("ln_f.weight"),
        "final_norm_bias": _source("ln_f.bias"),
        "head": TensorSource(name="lm_head.weight"),
    }
    for name, module in _NORMS.items():
        tensors[f"layers.{{i}}.{name}"] = _source(f"h.{{i}}.{module}.weight")
        tensors[f"layers.{{i}}.{name}_bias"] = _source(f"h.{{i}}.{module}.bias")
    for name, module in _MATRICES.items():
        tensors[f"layers.{{i}}.{name}"] = _source(f"h.{{i}}.{module}.weight", transpose=True)
        tensors[f"layers.{{i}}.{name}_bias"] = _source(f"h.{{i}}.{module}.bias")
    for tensor, names in _FUSED.items():
        source = _source(tensor.removeprefix(_PREFIX), transpose=tensor.endswith(".weight"))
        tensors |= dict.fromkeys(names, source)
    return tensors


FAMILY = Family(
    model_type="gpt2",
    build=build,
    tensors=_tensors(),
    fused=_FUSED,
    # The causal mask, which old files carry.
    ignored=(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",),
)
