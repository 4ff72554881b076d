"""BERT (Devlin et al. 2018, arXiv 1810.04805): an encoder with norms behind each branch.

Also what RoBERTa (arXiv 1907.11692) and XLM-RoBERTa (arXiv 1911.02116) share with it.
"""

from collections.abc import Mapping
from dataclasses import replace

from ridgeline.core.spec import LayerSpec, MLPSpec, ModelSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.family import Family, TensorSource
from ridgeline.models.fields import read_activation, read_heads, read_layer_norm, read_sizes

_MODULES = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "o": "attention.output.dense",
    "attention_residual_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "mlp_residual_norm": "output.LayerNorm",
}
_UNUSED = (
    "attention_probs_dropout_prob",
    "classifier_dropout",
    "hidden_dropout_prob",
    "sentence_transformers",  # how scores are squashed (`models.pooling`)
    "sbert_ce_default_activation_function",
    "sbert_ce_default_activation_fn",
    "tie_word_embeddings",
)


def build(config: ConfigReader) -> ModelSpec:
    """Learned positions, token types, biases everywhere."""
    return build_encoder(config, model_type="bert", type_vocab_size=2)


def build_encoder(
    config: ConfigReader, *, model_type: str, type_vocab_size: int, first_position: int = 0
) -> ModelSpec:
    """``type_vocab_size`` is the default of that key; ``first_position`` see `ModelSpec`."""
    for name in _UNUSED:
        config.ignore(name)
    config.refuse("position_embedding_type", unless=("absolute",))
    config.refuse("is_decoder", unless=(False,))
    sizes = read_sizes(config, max_position=512, vocab_size=30522)
    heads = read_heads(config, sizes.hidden_size)
    norm = read_layer_norm(config, "layer_norm_eps", bias=True, default=1e-12)
    attention = replace(
        heads.attention(None),
        qkv_bias=True,
        out_bias=True,
        bidirectional=True,
    )
    mlp = MLPSpec(
        width=sizes.mlp_width,
        activation=read_activation(config, "hidden_act", default="gelu"),
        gated=False,
        bias=True,
    )
    layer = LayerSpec(
        attention=attention,
        mlp=mlp,
        attention_norm=None,
        mlp_norm=None,
        attention_residual_norm=norm,
        mlp_residual_norm=norm,
    )
    return ModelSpec(
        model_type=model_type,
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        layers=(layer,) * sizes.num_layers,
        final_norm=None,
        max_position=sizes.max_position - first_position,
        learned_positions=sizes.max_position,
        first_position=first_position,
        token_types=config.integer("type_vocab_size", maximum=2**16, default=type_vocab_size),
        embedding_norm=norm,
        tie_embeddings=False,
        has_head=False,
    )


def encoder_tensors(prefix: str) -> Mapping[str, TensorSource]:
    """Under ``prefix`` in checkpoints that have a head, and without it in the others."""

    def both(name: str, module: str) -> dict[str, TensorSource]:
        def source(kind: str, old: str) -> TensorSource:
            old_name = f"{module}.{old}"  # of TensorFlow's norms, in the first checkpoints
            others = (f"{module}.{kind}", f"{prefix}{old_name}", old_name)
            return TensorSource(name=f"{prefix}{module}.{kind}", other_names=others)

        return {name: source("weight", "gamma"), f"{name}_bias": source("bias", "beta")}

    tables = {
        "embed": "word_embeddings",
        "positions": "position_embeddings",
        "types": "token_type_embeddings",
    }
    tensors: dict[str, TensorSource] = {}
    for name, table in tables.items():
        module = f"embeddings.{table}.weight"
        tensors[name] = TensorSource(name=f"{prefix}{module}", other_names=(module,))
    tensors |= both("embedding_norm", "embeddings.LayerNorm")
    for name, module in _MODULES.items():
        tensors |= both(f"layers.{{i}}.{name}", f"encoder.layer.{{i}}.{module}")
    return tensors


# Heads for what the model was trained with, and those of classifiers, which are read apart from
# the layers (`models.pooling`); position ids, which old checkpoints carry.
ENCODER_IGNORED = (
    r"(\w+\.)?embeddings\.position_ids",
    r"(\w+\.)?pooler\.dense\.(weight|bias)",
    r"(cls|lm_head|classifier)\..*",
)
FAMILY = Family(
    model_type="bert", build=build, tensors=encoder_tensors("bert."), ignored=ENCODER_IGNORED
)
