"""ModernBERT (Warner et al. 2024, arXiv 2412.13663): rotary positions, GeGLU, local layers.

Every third layer sees the whole text, the others some tokens to each side.
"""

from dataclasses import replace

from ridgeline.core.errors import UnsupportedModelError
from ridgeline.core.rope_spec import RopeSpec
from ridgeline.core.spec import LayerSpec, MLPSpec, ModelSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.family import Family, TensorSource
from ridgeline.models.fields import (
    FULL,
    SLIDING,
    read_activation,
    read_heads,
    read_layer_kinds,
    read_layer_norm,
    read_sizes,
)
from ridgeline.models.rope_config import nested_by_kind, plain_rope, read_nested_ropes

_QKV = ("layers.{i}.q", "layers.{i}.k", "layers.{i}.v")
_GATED = ("layers.{i}.gate", "layers.{i}.up")
_FUSED = {
    "model.layers.{i}.attn.Wqkv.weight": _QKV,
    "model.layers.{i}.attn.Wqkv.bias": tuple(f"{name}_bias" for name in _QKV),
    "model.layers.{i}.mlp.Wi.weight": _GATED,
    "model.layers.{i}.mlp.Wi.bias": tuple(f"{name}_bias" for name in _GATED),
}
_MODULES = {
    "attention_norm": "attn_norm",
    "o": "attn.Wo",
    "mlp_norm": "mlp_norm",
    "down": "mlp.Wo",
}
_TRAINING = (
    "attention_dropout", "classifier_activation", "classifier_bias", "classifier_dropout",
    "classifier_pooling", "cls_token_id", "compile", "decoder_bias", "deterministic_flash_attn",
    "embedding_dropout", "initializer_cutoff_factor", "mlp_dropout", "reference_compile",
    "repad_logits_with_grad", "sparse_pred_ignore_index", "sparse_prediction",
    "sentence_transformers", "tie_word_embeddings", "position_embedding_type",
)  # fmt: skip


def build(config: ConfigReader) -> ModelSpec:
    """Pre-norm layers, of which the first has no norm before its attention."""
    for name in _TRAINING:
        config.ignore(name)
    sizes = read_sizes(config, max_position=8192, vocab_size=50368)
    heads = read_heads(config, sizes.hidden_size)
    norm = read_layer_norm(
        config, "norm_eps", bias=config.boolean("norm_bias", default=False), default=1e-5
    )
    every = config.integer("global_attn_every_n_layers", default=3)
    default = [SLIDING if layer % every else FULL for layer in range(sizes.num_layers)]
    kinds = read_layer_kinds(config, sizes.num_layers, default)
    ropes = _read_ropes(config, head_dim=heads.head_dim, max_position=sizes.max_position)
    # Half of it to each side.
    window = config.integer("local_attention", minimum=2, default=128) // 2 + 1
    bias = config.boolean("attention_bias", default=False)
    mlp = MLPSpec(
        width=sizes.mlp_width,
        activation=read_activation(config, "hidden_activation", default="gelu"),
        bias=config.boolean("mlp_bias", default=False),
    )
    layers = tuple(
        LayerSpec(
            attention=replace(
                heads.attention(ropes[kind]),
                window=window if kind == SLIDING else None,
                qkv_bias=bias,
                out_bias=bias,
                bidirectional=True,
            ),
            mlp=mlp,
            attention_norm=norm if layer else None,
            mlp_norm=norm,
        )
        for layer, kind in enumerate(kinds)
    )
    if heads.num_kv_heads != heads.num_heads:
        raise UnsupportedModelError("config.json gives ModernBERT fewer KV heads than heads.")
    return ModelSpec(
        model_type="modernbert",
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        layers=layers,
        embedding_norm=norm,
        final_norm=norm,
        max_position=sizes.max_position,
        tie_embeddings=False,
        has_head=False,
    )


def _read_ropes(config: ConfigReader, *, head_dim: int, max_position: int) -> dict[str, RopeSpec]:
    """Ropes by kind of layer, in the spelling of transformers 5 or in the old one."""
    thetas = {
        FULL: config.number("global_rope_theta", minimum=2.0, default=160_000.0),
        SLIDING: config.number("local_rope_theta", minimum=2.0, default=10_000.0),
    }
    if nested_by_kind(config):
        return read_nested_ropes(
            config, head_dim=head_dim, max_position=max_position, thetas=thetas
        )
    config.refuse("rope_parameters", unless=())
    return {kind: plain_rope(head_dim=head_dim, theta=theta) for kind, theta in thetas.items()}


def _source(name: str) -> TensorSource:
    return TensorSource(name=f"model.{name}", other_names=(name,))


def _tensors() -> dict[str, TensorSource]:
    tensors = {
        "embed": _source("embeddings.tok_embeddings.weight"),
        "embedding_norm": _source("embeddings.norm.weight"),
        "embedding_norm_bias": _source("embeddings.norm.bias"),
        "final_norm": _source("final_norm.weight"),
        "final_norm_bias": _source("final_norm.bias"),
    }
    for name, module in _MODULES.items():
        for canonical, kind in ((name, "weight"), (f"{name}_bias", "bias")):
            tensors[f"layers.{{i}}.{canonical}"] = _source(f"layers.{{i}}.{module}.{kind}")
    for tensor, names in _FUSED.items():
        tensors |= dict.fromkeys(names, _source(tensor.removeprefix("model.")))
    return tensors


FAMILY = Family(
    model_type="modernbert",
    build=build,
    tensors=_tensors(),
    fused=_FUSED,
    ignored=(r"(head|decoder|classifier)\..*",),
)
