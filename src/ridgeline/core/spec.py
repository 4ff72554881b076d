"""A model as data: what a Hugging Face config says, in one vocabulary for every family.

Every field below changes the logits unless its comment says otherwise; the parity tests prove it
field by field.
"""

from dataclasses import dataclass
from enum import StrEnum


class NormKind(StrEnum):
    RMS = "rms"
    LAYER = "layer"


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """RMSNorm or LayerNorm. ``unit_offset``: the stored weight is the gain minus one (Gemma)."""

    kind: NormKind
    eps: float
    unit_offset: bool = False


class Activation(StrEnum):
    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Positions divided by ``factor`` (kaiokendev 2023)."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicScaling:
    """NTK-aware base that grows with the sequence beyond ``original_max_position``."""

    factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): interpolation by wavelength, scaled attention.

    ``attention_factor`` multiplies cos and sin; it is resolved, never ``None``.
    """

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's interpolation of low frequencies with a smooth band between the two factors."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


RopeScaling = LinearScaling | DynamicScaling | YarnScaling | Llama3Scaling


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary positions (Su et al. 2021) over the first ``rotary_dim`` of each head.

    Halves are rotated against each other (the Hugging Face layout).
    """

    theta: float
    rotary_dim: int
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Multi-head, multi-query or grouped-query attention of one layer.

    ``scale`` multiplies q·k; ``window`` is the number of positions a token sees, itself included
    (``None``: all before it); ``softcap`` squashes scores to (−softcap, softcap) by tanh.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec | None
    window: int | None = None
    softcap: float | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: NormSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPSpec:
    """Feed-forward network: ``down(act(gate(x)) * up(x))``, or ``down(act(up(x)))`` if ungated."""

    width: int
    activation: Activation
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One decoder layer: normed attention and normed feed-forward, each added to the residual.

    A post norm is applied to a branch's output before it is added (Gemma 2 and 3).
    """

    attention: AttentionSpec
    mlp: MLPSpec
    attention_norm: NormSpec
    mlp_norm: NormSpec
    attention_post_norm: NormSpec | None = None
    mlp_post_norm: NormSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only language model.

    ``max_position`` is the longest context that the checkpoint was made for, in tokens (a limit;
    it does not change the logits). ``embedding_scale`` multiplies embeddings; ``logit_softcap``
    squashes logits by tanh.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec
    max_position: int
    tie_embeddings: bool
    embedding_scale: float = 1.0
    logit_softcap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers whose K and V are stored alike, and so share one block table per request."""

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: int | None

    @property
    def elements_per_token(self) -> int:
        """K and V elements that one token adds, over all layers of the group."""
        return 2 * len(self.layers) * self.num_kv_heads * self.head_dim


def kv_groups(spec: ModelSpec) -> tuple[KVGroup, ...]:
    """The KV groups of a model, in order of their first layer."""
    members: dict[tuple[int, int, int | None], list[int]] = {}
    for index, layer in enumerate(spec.layers):
        attn = layer.attention
        members.setdefault((attn.num_kv_heads, attn.head_dim, attn.window), []).append(index)
    return tuple(
        KVGroup(layers=tuple(layers), num_kv_heads=heads, head_dim=dim, window=window)
        for (heads, dim, window), layers in members.items()
    )
