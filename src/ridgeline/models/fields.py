"""Config fields that families share, read with bounds that no real model comes near."""

from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.core.errors import CorruptFileError, UnsupportedModelError
from ridgeline.core.rope_spec import RopeSpec
from ridgeline.core.spec import Activation, AttentionSpec, NormKind, NormSpec
from ridgeline.models.config import ConfigReader, show

FULL = "full_attention"
SLIDING = "sliding_attention"

_MAX_LAYERS = 4096
_MAX_WIDTH = 2**22
_MAX_VOCABULARY = 2**24
_MAX_HEADS = 2**14
_MAX_HEAD_DIM = 2**13

# transformers' names (``ACT2FN``); those of one line compute the same function.
_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "relu2": Activation.RELU_SQUARED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes that every decoder has; widths in elements, ``max_position`` in tokens."""

    vocab_size: int
    hidden_size: int
    mlp_width: int
    num_layers: int
    max_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The shape of attention: query heads, KV heads, and the width of each."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def attention(self, rope: RopeSpec | None) -> AttentionSpec:
        """Attention by these heads with scores divided by √d, as in Vaswani et al. 2017."""
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            rope=rope,
        )


def read_sizes(
    config: ConfigReader,
    *,
    max_position: int,
    vocab_size: int | None = None,
    mlp_width: int | None = None,
) -> Sizes:
    """The sizes; the arguments are the defaults of keys that the family's configs leave out, but
    for ``mlp_width``, which stands in place of what the config says."""
    if mlp_width is None:
        mlp_width = config.integer("intermediate_size", maximum=_MAX_WIDTH)
    return Sizes(
        vocab_size=config.integer("vocab_size", maximum=_MAX_VOCABULARY, default=vocab_size),
        hidden_size=config.integer("hidden_size", maximum=_MAX_WIDTH),
        mlp_width=mlp_width,
        num_layers=config.integer("num_hidden_layers", maximum=_MAX_LAYERS),
        max_position=config.integer("max_position_embeddings", default=max_position),
    )


def read_heads(
    config: ConfigReader,
    hidden_size: int,
    *,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
) -> Heads:
    """The heads; without defaults, as many KV heads as heads, which together fill the width.

    Raises:
        CorruptFileError: the heads do not divide evenly.
    """
    num_heads = config.integer("num_attention_heads", maximum=_MAX_HEADS, default=num_heads)
    num_kv_heads = config.integer(
        "num_key_value_heads", maximum=_MAX_HEADS, default=num_kv_heads or num_heads
    )
    if num_heads % num_kv_heads:
        raise CorruptFileError(
            f"config.json gives num_attention_heads as {num_heads}, which is no multiple of "
            f"num_key_value_heads, {num_kv_heads}."
        )
    if "head_dim" not in config and head_dim is None:
        if hidden_size % num_heads:
            raise CorruptFileError(
                f"config.json gives hidden_size as {hidden_size}, which is no multiple of "
                f"num_attention_heads, {num_heads}."
            )
        head_dim = hidden_size // num_heads
    head_dim = config.integer("head_dim", maximum=_MAX_HEAD_DIM, default=head_dim)
    if head_dim % 2:
        raise UnsupportedModelError(f"config.json gives an odd head_dim, {head_dim}.")
    return Heads(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)


def read_rms_norm(
    config: ConfigReader, *, unit_offset: bool = False, eps: float = 1e-6
) -> NormSpec:
    """The RMSNorm that a family uses everywhere; ``eps`` is the default."""
    eps = config.number("rms_norm_eps", minimum=1e-15, maximum=1.0, default=eps)
    return NormSpec(kind=NormKind.RMS, eps=eps, unit_offset=unit_offset)


def read_layer_norm(
    config: ConfigReader, name: str, *, bias: bool, default: float = 1e-5
) -> NormSpec:
    """The LayerNorm that a family uses everywhere; ``name`` is the key of its epsilon."""
    eps = config.number(name, minimum=1e-15, maximum=1.0, default=default)
    return NormSpec(kind=NormKind.LAYER, eps=eps, bias=bias)


def read_activation(config: ConfigReader, name: str, *, default: str) -> Activation:
    """The activation under the key ``name``."""
    text = config.text(name, default=default)
    if text not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"config.json sets {name} to {show(text)}; supported are {', '.join(_ACTIVATIONS)}."
        )
    return _ACTIVATIONS[text]


def read_layer_kinds(
    config: ConfigReader, num_layers: int, default: Sequence[str]
) -> tuple[str, ...]:
    """For each layer ``FULL`` or ``SLIDING``, from ``layer_types``."""
    kinds = config.texts("layer_types")
    if kinds is None:
        return tuple(default)
    unknown = sorted(set(kinds) - {FULL, SLIDING})
    if unknown:
        raise UnsupportedModelError(
            f"config.json lists {show(unknown[0])} in layer_types; supported are {FULL} and "
            f"{SLIDING}."
        )
    if len(kinds) != num_layers:
        raise CorruptFileError(
            f"config.json lists {len(kinds)} layer_types for {num_layers} layers."
        )
    return kinds


def layer_windows(kinds: Sequence[str], window: int | None) -> tuple[int | None, ...]:
    """The window of each layer, in positions.

    Raises:
        UnsupportedModelError: a sliding layer has no window.
    """
    if window is None and SLIDING in kinds:
        raise UnsupportedModelError(
            f"config.json has layers of {SLIDING}, but gives them no sliding_window."
        )
    return tuple(window if kind == SLIDING else None for kind in kinds)
