"""The ops that a model is lowered to: what executors run and what the roofline prices.

A lowered model is an ordered tuple of ops over a few named buffers. ``x`` is the residual stream,
``h`` a branch, ``n`` a norm of ``x`` that two branches read, ``shared`` a branch that joins ``h``,
``layers`` the embeddings for each layer, ``streams`` several
residual streams, ``q``, ``k``, ``v`` the heads, ``inner`` the inside of a
feed-forward network that ranks share and ``logits`` the end. Every op is pure data: its buffers,
its shapes and the names of its weights. Linear weights are stored ``[out, in]``.

Shapes: T tokens of the pass, D hidden size, H heads, K KV heads, d head width, F feed-forward
width, V vocabulary, E experts; in latent attention, R latent elements, n and r the widths of a
head's parts without and with rotary positions, v the width of a head of V.

Weights are in `core.op_weights`, the ops around the KV cache in `core.attention_ops`, those on
states in `core.state_ops`, those between ranks in `core.rank_ops`, those of per-layer embeddings in
`core.layer_input_ops`, those of several residual streams in `core.stream_ops`, those of drafters
that read hidden states in `core.feature_ops`, activations by themselves in
`core.activation_ops`; all of them are found here as well.
"""

from dataclasses import dataclass
from typing import ClassVar

from ridgeline.core.activation_ops import SparseGateUp, Xielu
from ridgeline.core.attention_ops import (
    Attend,
    BidirectionalAttend,
    GrowQueries,
    KVWrite,
    LatentAttend,
    Rope,
)
from ridgeline.core.feature_ops import AddInner, JoinFeatures, KeepFeatures, ReadFeatures
from ridgeline.core.layer_input_ops import LayerEmbed, LayerInput
from ridgeline.core.op_facts import Collective, OpFacts, OpKind, Rows
from ridgeline.core.op_weights import (
    Bias,
    Experts,
    ExpertsBias,
    ExpertsByColumns,
    Gain,
    HeadMatrix,
    KVBias,
    KVProduct,
    OutputGate,
    Positions,
    Product,
    ProductByColumns,
    Router,
    Table,
    Weight,
    WholeBias,
    WholeOutputGate,
    WholeProduct,
)
from ridgeline.core.rank_ops import (
    Gather,
    GatherContext,
    GatherLogits,
    GatherRanges,
    GatherSplits,
    GatherTokens,
    ReceiveHidden,
    SendHidden,
)  # fmt: skip
from ridgeline.core.spec import (
    Activation,
    ClampedSwiGLU,
    NormScope,
    NormSpec,
    RoutingSpec,
)
from ridgeline.core.state_ops import (
    ConvProject,
    DeltaProject,
    GatedDelta,
    GateHeads,
    ScanProject,
    SelectiveScan,
    ShortConv,
)
from ridgeline.core.stream_ops import (
    AddLaurel,
    AddToStreams,
    CorrectStreams,
    JoinStreams,
    PredictStreams,
    SplitStreams,
)

__all__ = [
    "MLP",
    "AddInner",
    "AddLaurel",
    "AddResidual",
    "AddShared",
    "AddToStreams",
    "Attend",
    "AttentionOp",
    "BidirectionalAttend",
    "ContextOp",
    "ConvProject",
    "CorrectStreams",
    "DeltaProject",
    "Down",
    "Embed",
    "FeatureOp",
    "GateHeads",
    "GateUp",
    "GatedDelta",
    "Gather",
    "GatherContext",
    "GatherLogits",
    "GatherOp",
    "GatherRanges",
    "GatherSplits",
    "GatherTokens",
    "GrowQueries",
    "Head",
    "HeadNorm",
    "JoinFeatures",
    "JoinStreams",
    "KVWrite",
    "KeepFeatures",
    "LatentAttend",
    "LatentProject",
    "LayerEmbed",
    "LayerInput",
    "MoE",
    "Norm",
    "Op",
    "OutProject",
    "PredictStreams",
    "QKVProject",
    "ReadFeatures",
    "ReceiveHidden",
    "Rope",
    "ScaleHidden",
    "ScanProject",
    "SelectiveScan",
    "SendHidden",
    "SharedExpert",
    "ShortConv",
    "SparseGateUp",
    "SplitStreams",
    "StageOp",
    "StateOp",
    "StreamOp",
    "Weight",
    "Xielu",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Embed:
    """x[T, D] = weight[token ids] · scale, plus positions[first_position + positions] and
    types[token types], where there are such tables.

    The table's rows are those of the tokens from ``first_token`` on; rows of x of tokens that it
    lacks, if another rank has them, mean nothing until `GatherTokens`. ``is_tied``: the table is
    the head's matrix, too, which may be in another stage of a pipeline.
    """

    facts: ClassVar = OpFacts(OpKind.OTHER, Rows.TOKENS, Collective.ALL_REDUCE)
    weight: Table
    scale: float
    positions: Positions | None = None
    first_position: int = 0
    types: Positions | None = None
    first_token: int = 0
    is_tied: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """dst[T, D] = (norm(src[T, D]) · weight + bias) · scale; a norm may lack weight and bias."""

    facts: ClassVar = OpFacts(OpKind.OTHER, Rows.TOKENS, Collective.NONE)
    src: str
    dst: str
    weight: Gain | None
    spec: NormSpec
    bias: WholeBias | None = None
    scale: float = 1.0

    def width(self, hidden_size: int) -> int:
        """Elements of a token that are normalised: those of the gain, or the hidden state's."""
        return hidden_size if self.weight is None else self.weight.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class QKVProject:
    """q[T, H, d], k[T, K, d], v[T, K, d] = src[T, D] times three matrices, plus biases if any.

    ``clip`` bounds the results to [−clip, clip]. Without ``value`` v is k. Of a layer that reads
    the K and V of another it is q alone: there are no other matrices, and K is 0.
    """

    facts: ClassVar = OpFacts(OpKind.LINEAR, Rows.TOKENS, Collective.NONE)
    query: Product
    key: KVProduct | None
    value: KVProduct | None
    query_bias: Bias | None
    key_bias: KVBias | None
    value_bias: KVBias | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    src: str = "h"
    clip: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentProject:
    """From src[T, D] q[T, H, n+r] and k[T, 1, R+r] for latent attention, k's R elements normed.

    ``query_latent`` is there if q comes from a latent of its own, which ``query_norm`` norms.
    """

    facts: ClassVar = OpFacts(OpKind.LINEAR, Rows.TOKENS, Collective.NONE)
    query_latent: WholeProduct | None
    query_latent_bias: WholeBias | None
    query_norm: Gain | None
    query: Product
    latent: WholeProduct
    latent_bias: WholeBias | None
    latent_norm: Gain
    norm: NormSpec
    num_heads: int
    src: str = "h"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorm:
    """Normalise each head of q[T, H, d] and of k[T, K, d], or all heads together, by ``scope``.

    Biases have the shapes of the gains; a norm may lack both. K may be 0. ``values``: each head of
    v[T, K, d] is normalised as well, without a gain.
    """

    facts: ClassVar = OpFacts(OpKind.OTHER, Rows.TOKENS, Collective.NONE)
    query: Gain | None
    key: Gain | None
    spec: NormSpec
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scope: NormScope = NormScope.HEAD
    query_bias: WholeBias | None = None
    key_bias: WholeBias | None = None
    values: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OutProject:
    """h[T, D] = h[T, H·d] (or [T, H·v]) times a matrix, plus a bias if any."""

    facts: ClassVar = OpFacts(OpKind.LINEAR, Rows.TOKENS, Collective.ALL_REDUCE)
    weight: ProductByColumns
    bias: Bias | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MLP:
    """h[T, D] = down(act(gate src) · up src), or down(act(up src)) where there is no gate."""

    facts: ClassVar = OpFacts(OpKind.LINEAR, Rows.TOKENS, Collective.ALL_REDUCE)
    gate: Product | None
    up: Product
    down: ProductByColumns
    up_bias: Bias | None
    gate_bias: Bias | None
    down_bias: Bias | None
    activation: Activation
    src: str = "h"


@dataclass(frozen=True, slots=True, kw_only=True)
class GateUp:
    """inner[T, f] = act(gate src) · up src, or act(up src): a rank's part of a network's inside."""

    facts: ClassVar = OpFacts(OpKind.LINEAR, Rows.TOKENS, Collective.NONE)
    gate: Product | None
    up: Product
    gate_bias: Bias | None
    up_bias: Bias | None
    activation: Activation | ClampedSwiGLU
    src: str = "h"


@dataclass(frozen=True, slots=True, kw_only=True)
class Down:
    """dst[T, D'] = inner[T, F] times a matrix, plus a bias if any: a rank's part of what is left of
    the network. Times σ(output_gate · src) if there is one."""

    facts: ClassVar = OpFacts(OpKind.LINEAR, Rows.TOKENS, Collective.NONE)
    weight: Product
    bias: Bias | None
    dst: str = "h"
    output_gate: WholeOutputGate | None = None
    src: str = "h"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoE:
    """h[T, D] = Σ over a token's experts e of weight · down_e(act(gate_e src) · up_e src), or of
    weight · down_e(act(up_e src)) where there are no gates.

    ``router``[E, D], ``gate`` and ``up``[E, F, D], ``down``[E, D, F]; all of them may have biases.
    Of the stacked weights only the experts are read that some token goes to. With ``borders`` each
    rank has the experts ``[borders[r], borders[r + 1])``, and what they make of each token goes to
    all ranks, which add up. The router reads ``router_src``, or else ``src``; with
    ``expert_scale``[E] an expert's weight is times its own number. Weights multiply src instead of
    outputs if the routing says so.
    """

    facts: ClassVar = OpFacts(OpKind.EXPERTS, Rows.ROUTED, Collective.EXPERTS)
    router: Router
    router_bias: WholeBias | None
    correction_bias: WholeBias | None
    gate: Experts | None
    up: Experts
    down: ExpertsByColumns
    gate_bias: ExpertsBias | None
    up_bias: ExpertsBias | None
    down_bias: ExpertsBias | None
    routing: RoutingSpec
    activation: Activation | ClampedSwiGLU
    src: str = "h"
    router_src: str | None = None
    expert_scale: Gain | None = None
    borders: tuple[int, ...] = ()
    rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpert:
    """shared[T, D] = down(act(gate src) · up src), or down(act(up src)) where there is no gate;
    times σ(output_gate · src) if there is one."""

    facts: ClassVar = OpFacts(OpKind.LINEAR, Rows.TOKENS, Collective.LATER)
    gate: Product | None
    up: Product
    down: ProductByColumns
    output_gate: OutputGate | None
    activation: Activation | ClampedSwiGLU
    src: str = "h"


@dataclass(frozen=True, slots=True, kw_only=True)
class AddShared:
    """h[T, D] += shared[T, D]."""

    facts: ClassVar = OpFacts(OpKind.OTHER, Rows.TOKENS, Collective.NONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class AddResidual:
    """x[T, D] += h[T, D] · scale."""

    facts: ClassVar = OpFacts(OpKind.OTHER, Rows.TOKENS, Collective.NONE)
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleHidden:
    """x[T, D] *= weight[1]."""

    facts: ClassVar = OpFacts(OpKind.OTHER, Rows.TOKENS, Collective.NONE)
    weight: Gain


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """logits[N, V] = (h[N, D] times a matrix, plus a bias) · scale, and then the softcap.

    N are the rows that are wanted.
    """

    facts: ClassVar = OpFacts(OpKind.LINEAR, Rows.LOGITS, Collective.ALL_GATHER)
    weight: HeadMatrix
    softcap: float | None
    bias: Bias | None = None
    scale: float = 1.0


Op = (
    Embed | Norm | QKVProject | LatentProject | HeadNorm | Rope | KVWrite | GrowQueries | Attend
    | LatentAttend | BidirectionalAttend | ConvProject | ShortConv | DeltaProject | GatedDelta
    | ScanProject | SelectiveScan | GateHeads | OutProject | MLP | GateUp | Xielu | Down | MoE
    | SharedExpert | AddShared | AddResidual | ScaleHidden | Head | Gather | GatherTokens
    | GatherLogits | GatherContext | GatherSplits | GatherRanges | SendHidden | ReceiveHidden
    | LayerEmbed | LayerInput | KeepFeatures | ReadFeatures | JoinFeatures | AddInner | SparseGateUp
    | SplitStreams | PredictStreams | CorrectStreams | AddToStreams | JoinStreams | AddLaurel
)  # fmt: skip


AttentionOp = Attend | LatentAttend | BidirectionalAttend
GatherOp = Gather | GatherTokens | GatherLogits
ContextOp = GatherContext | GatherSplits | GatherRanges  # of context-parallel ranks
StageOp = SendHidden | ReceiveHidden
StreamOp = SplitStreams | PredictStreams | CorrectStreams | AddToStreams | JoinStreams
FeatureOp = KeepFeatures | ReadFeatures | JoinFeatures | AddInner
StateOp = ShortConv | GatedDelta | SelectiveScan  # those that read and write the sequences' states
