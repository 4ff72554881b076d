"""A model as data: what a Hugging Face config says, in one vocabulary for every family.

Every field below changes the logits unless its comment says otherwise; the parity tests prove it
field by field.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Final

from ridgeline.core.rope_spec import QueryGrowth, RopeSpec


class NormKind(StrEnum):
    """Root mean square, or mean and variance."""

    RMS = "rms"
    LAYER = "layer"


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """RMSNorm or LayerNorm, with a weight (the gain) and perhaps a bias.

    ``unit_offset``: the stored weight is the gain minus one (Gemma). ``gain`` is false for a norm
    without parameters (OLMo 1).
    """

    kind: NormKind
    eps: float
    unit_offset: bool = False
    gain: bool = True
    bias: bool = False


class NormScope(StrEnum):
    """What a norm on q and on k normalises, and the shape of its weight."""

    HEAD = "head"  # each head; one gain for all of them, [d]
    EACH_HEAD = "each_head"  # each head, by a gain of its own, [H, d]
    PROJECTION = "projection"  # all heads together, [H·d]


class Activation(StrEnum):
    """The non-linearity of a feed-forward network."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"
    RELU_SQUARED = "relu_squared"
    IDENTITY = "identity"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedSwiGLU:
    """gpt-oss: ``(u + 1) · g · σ(alpha · g)`` with g at most ``limit``, u within ±``limit``."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Multi-head, multi-query or grouped-query attention of one layer.

    ``scale`` multiplies q·k; ``window`` is the number of positions a token sees, itself included
    (``None``: all before it), or if ``chunked`` the length of consecutive chunks, of which it sees
    its own up to itself (Llama 4); ``softcap`` squashes scores to (−softcap, softcap) by tanh;
    ``sinks``: each head has one more score, learned, whose share of the softmax goes nowhere
    (Xiao et al. 2023, arXiv 2309.17453; gpt-oss); ``qkv_clip`` bounds the elements of q, k and v
    to [−qkv_clip, qkv_clip] as they are projected (OLMo 1). ``qk_norm`` comes before rotary
    positions, or if ``norm_after_rope`` behind them (Hunyuan). ``bidirectional``: a token sees
    those after it, too, as far as those before it (encoders); then nothing of it is cached.
    ``output_gate``: each head's output is multiplied by the sigmoid of a projection of the layer's
    input (Qwen3-Next), biased if q is. ``kv_layer``: the earlier layer whose K and V this one reads
    instead of its own (cross-layer attention, Brandon et al. 2024, arXiv 2405.12981); it has no
    matrices, biases and norm for K and V, and nothing of it is cached. KV heads, head width and
    window are that layer's. ``value_is_key``: V is K as projected, and has no matrix (Gemma 4).
    ``value_norm``: ``qk_norm``, without a gain, is applied to each head of V, too. ``out_norm`` is
    of all heads together, before they are projected (BitNet).
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
    qk_norm_scope: NormScope = NormScope.HEAD
    norm_after_rope: bool = False
    qkv_clip: float | None = None
    sinks: bool = False
    bidirectional: bool = False
    query_growth: QueryGrowth | None = None
    output_gate: bool = False
    kv_layer: int | None = None
    value_is_key: bool = False
    value_norm: bool = False
    out_norm: NormSpec | None = None
    chunked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MLASpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, §2.1).

    What is cached of a token is its latent: ``latent_dim`` normed elements, from which K and V of
    all heads are expanded, and ``rope_dim`` rotated elements of K that all heads share.

    ``nope_dim`` is the width of each head of q and k that is not rotated, ``v_dim`` that of each
    head of v. ``query_rank``: q too comes from a normed latent, of that width (``None``: straight
    from the hidden state). ``latent_bias``: biases on the projections to the latents.
    """

    num_heads: int
    query_rank: int | None
    latent_dim: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    scale: float
    rope: RopeSpec
    latent_norm: NormSpec
    latent_bias: bool = False
    out_bias: bool = False
    query_growth: QueryGrowth | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec:
    """A gated causal convolution along the sequence, in attention's place (LFM2, arXiv 2511.23404).

    Each channel by itself: ``length`` inputs, the token's own included, are summed by learned
    weights. A sequence keeps the last ``length - 1`` inputs of each channel. ``bias`` is of the
    projections and of the convolution.
    """

    rope: ClassVar[None] = None
    length: int
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaSpec:
    """Linear attention by the gated delta rule (Yang et al. 2024, arXiv 2412.06464).

    q, k and v pass a causal convolution along the sequence of ``conv_length`` inputs, and SiLU; q
    and k are scaled to length 1. Each value head keeps a matrix of ``key_dim`` by ``value_dim``,
    whose rows keys address; consecutive value heads share a key head. Each head's output is normed,
    and multiplied by the SiLU of a gate.
    """

    rope: ClassVar[None] = None
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_length: int
    norm: NormSpec

    @property
    def num_heads(self) -> int:
        return self.num_key_heads

    @property
    def num_channels(self) -> int:
        """Elements of q, k and v of a token, which the convolution is over."""
        keys, values = self.num_key_heads * self.key_dim, self.num_value_heads * self.value_dim
        return 2 * keys + values


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Spec:
    """Mamba-2's selective state space (Dao and Gu 2024, arXiv 2405.21060).

    x, B and C pass a causal convolution along the sequence of ``conv_length`` inputs, and SiLU.
    Each head keeps a matrix of ``state_dim`` by ``head_dim``, which forgets and takes in by a step
    that depends on the token; consecutive heads share the B and C of one of ``num_groups``. The
    outputs are multiplied by the SiLU of a gate, and then normed, those of each group together,
    unless there is no ``norm``. ``conv_bias`` is the convolution's, ``bias`` that of the
    projections around. ``input_scales`` multiply x, B and C before the convolution.
    """

    rope: ClassVar[None] = None
    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    conv_length: int
    norm: NormSpec | None
    conv_bias: bool = True
    bias: bool = False
    input_scales: tuple[float, float, float] = (1.0, 1.0, 1.0)

    @property
    def width(self) -> int:
        """Elements of x, and of the gate and the output, of a token."""
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """Elements of x, B and C of a token, which the convolution is over."""
        return self.width + 2 * self.num_groups * self.state_dim


StateSpec = ShortConvSpec | GatedDeltaSpec | Mamba2Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPSpec:
    """Feed-forward network: ``down(act(gate(x)) * up(x))``, or ``down(act(up(x)))`` if ungated.

    ``inner_norm``: of what ``down`` reads (BitNet). ``xielu``: what ``activation`` gives goes
    through xIELU, whose four numbers are each layer's own (arXiv 2411.13010; Apertus). ``cutoff``:
    what ``gate`` gives of a token is less its mean and so many of its standard deviations, and not
    below 0 (Gemma 3n).
    """

    width: int
    activation: Activation
    gated: bool = True
    bias: bool = False
    inner_norm: NormSpec | None = None
    xielu: bool = False
    cutoff: float | None = None


class Scoring(StrEnum):
    """How router logits become scores of experts."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


class GroupScore(StrEnum):
    """What a group of experts is worth: its best expert, or the sum of its best two."""

    BEST = "best"
    BEST_TWO = "best_two"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLimit:
    """Only experts of the best ``top_groups`` of ``num_groups`` consecutive, equal groups may be
    chosen (DeepSeek-V2, arXiv 2405.04434, §2.2.2)."""

    num_groups: int
    top_groups: int
    score: GroupScore


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSpec:
    """Which experts a token goes to, and with what weight.

    Of the scores of all experts the ``top_k`` highest are chosen; their weights are the scores,
    divided by their sum if ``normalised``, times ``scale``. (Softmax over the chosen logits alone,
    as in gpt-oss, is softmax over all, normalised.) ``bias`` is added to the logits;
    ``correction_bias`` to the scores, but only for the choice (DeepSeek-V3, arXiv 2412.19437,
    §2.1.2). ``expert_scale``: the weights are also times a learned number of each expert (Gemma 4).
    ``scales_inputs``: weights multiply what experts read, and their outputs are summed (Llama 4).
    """

    top_k: int
    scoring: Scoring
    normalised: bool
    scale: float = 1.0
    groups: GroupLimit | None = None
    bias: bool = False
    correction_bias: bool = False
    expert_scale: bool = False
    scales_inputs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpertSpec:
    """A feed-forward network that every token goes through, beside its experts.

    ``gated_output``: its output is multiplied by the sigmoid of a learned number (Qwen2-MoE).
    """

    width: int
    gated_output: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """A mixture of feed-forward networks of ``width`` each (Shazeer et al. 2017), gated or not, as
    is the one that all tokens share."""

    num_experts: int
    width: int
    activation: Activation | ClampedSwiGLU
    routing: RoutingSpec
    bias: bool = False
    shared: SharedExpertSpec | None = None
    gated: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer: normed attention, or what stands in its place, and normed feed-forward, each added
    to the residual; or only one of the two (Nemotron-H, Mamba-2), without a norm for the other.

    A post norm is applied to a branch's output before it is added (Gemma 2 and 3; OLMo 2, which
    has no other norms); a residual norm to the sum, which goes on normed (BERT, whose only norms
    these are). ``parallel``: both branches read the same input, normed once (Phi-2), or for the
    second by ``mlp_norm`` (GPT-NeoX). ``scan`` reads what attention reads, and is added as well
    (Falcon-H1). The scales multiply what each branch adds, those of norms what a branch reads.
    ``scaled_output``: a learned number multiplies the residual behind the layer (Gemma 4).
    ``experts_beside`` the network of ``mlp`` read the residual as well; both have norms of their
    own before and behind, and are added before the post norm, all like ``mlp_norm``. A norm with a
    gain of its own, times D^-½, is what their router reads (Gemma 4 26B). ``laurel_rank``: what
    attention reads, and its projection to so many elements and back, normed like it, are added to
    the residual as well, and the sum is times 2^-½ (LAuReL, arXiv 2411.07501; Gemma 3n).
    """

    attention: AttentionSpec | MLASpec | StateSpec | None
    mlp: MLPSpec | MoESpec | None
    attention_norm: NormSpec | None
    mlp_norm: NormSpec | None
    attention_post_norm: NormSpec | None = None
    mlp_post_norm: NormSpec | None = None
    attention_residual_norm: NormSpec | None = None
    mlp_residual_norm: NormSpec | None = None
    parallel: bool = False
    scan: Mamba2Spec | None = None
    experts_beside: MoESpec | None = None
    attention_scale: float = 1.0
    scan_scale: float = 1.0
    mlp_scale: float = 1.0
    attention_norm_scale: float = 1.0
    mlp_norm_scale: float = 1.0
    scaled_output: bool = False
    laurel_rank: int | None = None

    @property
    def state(self) -> StateSpec | None:
        """What keeps a state of each sequence, if anything does."""
        return self.attention if isinstance(self.attention, StateSpec) else self.scan

    @property
    def experts(self) -> MoESpec | None:
        """Instead of a network, or beside one."""
        return self.mlp if isinstance(self.mlp, MoESpec) else self.experts_beside


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputSpec:
    """Per-layer embeddings (Gemma 3n and 4): each layer has one of ``width`` elements of each of
    ``vocab_size`` tokens, and the first's for tokens beyond these, mixed with a projection of the
    common one. Behind its other branches it is gated by the residual, projected, normed by
    ``norm``, and added.
    """

    vocab_size: int
    width: int
    activation: Activation
    norm: NormSpec


MOST_STREAMS: Final = 8  # that kernels hold at once


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsSpec:
    """Several residual streams (AltUp, Baykal et al. 2023, arXiv 2301.13310; Gemma 3n).

    Projections of the embedding make them. Before a layer each is predicted as a mixture of all;
    the layer computes the first, and its result corrects all; the factors come from the first,
    normed by ``norm``. What a layer's own embedding adds is gated by the first stream, times a
    learned vector if ``scaled``, and goes to the others. In the end projections are averaged.
    """

    num_streams: int
    norm: NormSpec
    scaled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleSpec:
    """A drafter that reads the target's hidden states (EAGLE-3, arXiv 2503.01840, section 3.1).

    Its features are the target's residual after each of ``feature_layers`` so many layers, side by
    side, projected to ``hidden_size``. The first of ``layers``, which has no norm of its own,
    attends over the normed embedding beside them, normed. ``norm`` is all its norms.
    ``norm_features``: of the features before they are projected. ``norm_residual``: the residual
    begins normed. ``norm_output``: what it reads of its own is behind the last norm.
    Its K and V are stored beside the target's, as those of layers behind the last.
    """

    hidden_size: int
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    feature_layers: tuple[int, ...]
    norm: NormSpec
    norm_features: bool = False
    norm_residual: bool = False
    norm_output: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPSpec:
    """A layer that was trained with the target to predict one token more (MTP, arXiv 2412.19437,
    section 2.2), and drafts further ones from its own states.

    It computes over a projection of the normed embedding and the normed features, side by side;
    ``features_first``: the other way round. Features are what the head reads: the target's, and
    then its own. ``norm`` is all its norms but ``layer``'s. Embedding and head are the target's.
    Its K and V are stored beside the target's, as those of a layer behind the last.
    """

    hidden_size: int
    layer: LayerSpec
    norm: NormSpec
    features_first: bool = False

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return (self.layer,)


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaSpec:
    """Heads over the target's final hidden states h, normed, each of which guesses the token at
    another distance (Medusa, arXiv 2401.10774, section 2.1.1).

    Each is ``num_blocks`` times h += silu(W h + b), and a matrix to the vocabulary. There is no KV.
    """

    hidden_size: int
    num_heads: int
    num_blocks: int

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return ()


DraftHeadSpec = EagleSpec | MTPSpec | MedusaSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only language model, or an encoder (``has_head`` is false): one stack of layers.

    ``max_position`` is the longest context that the checkpoint was made for, in tokens (a limit;
    it does not change the logits). ``learned_positions`` is the number of rows of a table that is
    added to the embeddings by position (GPT-2), ``first_position`` the row of the first token
    (RoBERTa's is behind the padding's), ``token_types`` the number of rows of a table that tells
    the two texts of a pair apart (BERT). ``embedding_norm`` norms the sum of these.
    ``embedding_scale`` multiplies embeddings, ``logit_scale`` logits; ``logit_softcap`` then
    squashes them by tanh. Without ``final_norm`` the last layer ends in a residual norm.
    ``layer_inputs``: embeddings of each layer's own. ``streams``: there are several residuals.
    ``stage``: of ``layers`` only these, ``[first, stop)``, are computed, as a pipeline's stage.
    ``draft_head``: a drafter that reads its hidden states, and keeps K and V beside its.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec | None
    max_position: int
    tie_embeddings: bool
    embedding_scale: float = 1.0
    learned_positions: int | None = None
    first_position: int = 0
    token_types: int | None = None
    embedding_norm: NormSpec | None = None
    has_head: bool = True
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    layer_inputs: LayerInputSpec | None = None
    streams: StreamsSpec | None = None
    stage: tuple[int, int] | None = None
    draft_head: DraftHeadSpec | None = None

    @property
    def layers_here(self) -> range:
        """The numbers of the layers that are computed."""
        return range(*(self.stage or (0, len(self.layers))))
