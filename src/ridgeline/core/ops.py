"""The ops that a model is lowered to: what executors run and what the roofline prices.

A lowered model is an ordered tuple of ops over a few named buffers. ``x`` is the residual stream,
``h`` a branch, ``n`` a norm of ``x`` that two branches read, ``shared`` a branch that joins ``h``,
``q``, ``k``, ``v`` the heads, ``inner`` the inside of a feed-forward network that ranks share and
``logits`` the end. Every op is pure data: its buffers, its shapes
and the names of its weights. Linear weights are stored ``[out, in]``.

Shapes: T tokens of the pass, D hidden size, H heads, K KV heads, d head width, F feed-forward
width, V vocabulary, E experts; in latent attention, R latent elements, n and r the widths of a
head's parts without and with rotary positions, v the width of a head of V.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple, get_args, get_type_hints

from ridgeline.core.op_facts import Collective, OpFacts, OpKind, Role, Rows, Split, WeightFacts
from ridgeline.core.spec import (
    Activation,
    ClampedSwiGLU,
    NormScope,
    NormSpec,
    QueryGrowth,
    RopeSpec,
    RoutingSpec,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A parameter by its canonical name, e.g. ``layers.3.q``, and its shape."""

    name: str
    shape: tuple[int, ...]


# Weights by what is done with them, and by how ranks share them.
Product = Annotated[Weight, WeightFacts(Role.PRODUCT, Split.ROWS)]
ProductByColumns = Annotated[Weight, WeightFacts(Role.PRODUCT, Split.COLUMNS)]
WholeProduct = Annotated[Weight, WeightFacts(Role.PRODUCT, Split.WHOLE)]
KVProduct = Annotated[Weight, WeightFacts(Role.PRODUCT, Split.KV_HEADS)]
Experts = Annotated[Weight, WeightFacts(Role.PRODUCT, Split.EXPERT_ROWS)]
ExpertsByColumns = Annotated[Weight, WeightFacts(Role.PRODUCT, Split.EXPERT_COLUMNS)]
Bias = Annotated[Weight, WeightFacts(Role.BIAS, Split.ROWS)]
WholeBias = Annotated[Weight, WeightFacts(Role.BIAS, Split.WHOLE)]
KVBias = Annotated[Weight, WeightFacts(Role.BIAS, Split.KV_HEADS)]
ExpertsBias = Annotated[Weight, WeightFacts(Role.BIAS, Split.EXPERT_ROWS)]
Gain = Annotated[Weight, WeightFacts(Role.GAIN, Split.WHOLE)]
Router = Annotated[Weight, WeightFacts(Role.ROUTER, Split.WHOLE)]
OutputGate = Annotated[Weight, WeightFacts(Role.OUTPUT_GATE, Split.COLUMNS)]
WholeOutputGate = Annotated[Weight, WeightFacts(Role.OUTPUT_GATE, Split.WHOLE)]
Expansion = Annotated[Weight, WeightFacts(Role.EXPANSION, Split.ROWS)]
Sinks = Annotated[Weight, WeightFacts(Role.SINKS, Split.ROWS)]
Decay = Annotated[Weight, WeightFacts(Role.DECAY, Split.ROWS)]
Convolution = Annotated[Weight, WeightFacts(Role.CONVOLUTION, Split.ROWS)]
Table = Annotated[Weight, WeightFacts(Role.TABLE, Split.ROWS)]
Positions = Annotated[Weight, WeightFacts(Role.POSITIONS, Split.WHOLE)]
HeadMatrix = Annotated[Weight, WeightFacts(Role.HEAD, Split.ROWS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Embed:
    """x[T, D] = weight[token ids] · scale, plus positions[first_position + positions] and
    types[token types], where there are such tables.

    The table's rows are those of the tokens from ``first_token`` on; rows of x of tokens that it
    lacks, if another rank has them, mean nothing until `GatherTokens`.
    """

    facts: ClassVar = OpFacts(OpKind.OTHER, Rows.TOKENS, Collective.ALL_REDUCE)
    weight: Table
    scale: float
    positions: Positions | None = None
    first_position: int = 0
    types: Positions | None = None
    first_token: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """dst[T, D] = norm(src[T, D]) · weight + bias, of which a norm may lack either."""

    facts: ClassVar = OpFacts(OpKind.OTHER, Rows.TOKENS, Collective.NONE)
    src: str
    dst: str
    weight: Gain | None
    spec: NormSpec
    bias: WholeBias | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QKVProject:
    """q[T, H, d], k[T, K, d], v[T, K, d] = src[T, D] times three matrices, plus biases if any.

    ``clip`` bounds the results to [−clip, clip].
    """

    facts: ClassVar = OpFacts(OpKind.LINEAR, Rows.TOKENS, Collective.NONE)
    query: Product
    key: KVProduct
    value: KVProduct
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

    Biases have the shapes of the gains.
    """

    facts: ClassVar = OpFacts(OpKind.OTHER, Rows.TOKENS, Collective.NONE)
    query: Gain
    key: Gain
    spec: NormSpec
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scope: NormScope = NormScope.HEAD
    query_bias: WholeBias | None = None
    key_bias: WholeBias | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotate q[T, H, d] and k[T, K, d] by their positions.

    ``query_start`` and ``key_start`` are the first elements of a head that are rotated;
    ``head_dim`` and ``key_dim`` the whole widths of a head of q and of k.
    """

    facts: ClassVar = OpFacts(OpKind.OTHER, Rows.TOKENS, Collective.NONE)
    spec: RopeSpec
    num_heads: int
    num_kv_heads: int
    head_dim: int
    key_dim: int
    query_start: int = 0
    key_start: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KVWrite:
    """Store k, and v if the layer has it, of the pass's tokens into the KV cache of ``layer``.

    ``num_kv_heads`` heads of ``k_width`` and ``v_width`` elements.
    """

    facts: ClassVar = OpFacts(OpKind.OTHER, Rows.TOKENS, Collective.NONE)
    layer: int
    group: int
    num_kv_heads: int
    k_width: int
    v_width: int
    has_values: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowQueries:
    """Multiply q[T, H, d] by what `QueryGrowth` says of its position."""

    facts: ClassVar = OpFacts(OpKind.OTHER, Rows.TOKENS, Collective.NONE)
    growth: QueryGrowth
    num_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attend:
    """h[T, H·d] = softmax(scale · q·K) V over the cache of ``layer``, this pass's tokens included.

    ``sinks``[H] are logits that join each head's softmax, without a value.
    """

    facts: ClassVar = OpFacts(OpKind.ATTENTION, Rows.TOKENS, Collective.RING)
    layer: int
    group: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: Sinks | None = None

    @property
    def k_width(self) -> int:
        return self.head_dim

    @property
    def v_width(self) -> int:
        return self.head_dim

    @property
    def loaded_width(self) -> int:
        """Elements of K and V that queries are multiplied with, for each token and KV head."""
        return 2 * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class BidirectionalAttend:
    """h[T, H·d] = softmax(scale · q·k) v over each sequence's tokens, all of which are in the pass.

    ``window``: of tokens before and after, those less than so many positions away.
    """

    facts: ClassVar = OpFacts(OpKind.ATTENTION, Rows.TOKENS, Collective.RING)
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None

    @property
    def k_width(self) -> int:
        return self.head_dim

    @property
    def v_width(self) -> int:
        return self.head_dim

    @property
    def loaded_width(self) -> int:
        """Elements of K and V that queries are multiplied with, for each token and KV head."""
        return 2 * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttend:
    """h[T, H·v]: attention over the latents [C, R+r] in the cache of ``layer``.

    ``expand``[H·(n+v), R] maps a latent to the heads' K (n each) and V (v each). Executors choose
    between expanding the latents they see (plain) and taking the matrix into q and the output
    (absorbed); the results are the same.
    """

    facts: ClassVar = OpFacts(OpKind.ATTENTION, Rows.TOKENS, Collective.RING)
    layer: int
    group: int
    expand: Expansion
    num_heads: int
    latent_dim: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    scale: float
    num_kv_heads: ClassVar = 1
    v_width: ClassVar = 0
    window: ClassVar = None

    @property
    def k_width(self) -> int:
        return self.latent_dim + self.rope_dim

    @property
    def loaded_width(self) -> int:
        """Elements of a latent that queries are multiplied with, which are K's and V's."""
        return 2 * self.latent_dim + self.rope_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvProject:
    """q[T, D], k[T, D], v[T, D] = src[T, D] times three matrices, plus biases if any: the gates of
    a short convolution's input and of its output, and what is convolved."""

    facts: ClassVar = OpFacts(OpKind.LINEAR, Rows.TOKENS, Collective.NONE)
    in_gate: Product
    out_gate: Product
    value: Product
    in_gate_bias: Bias | None
    out_gate_bias: Bias | None
    value_bias: Bias | None
    src: str = "h"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConv:
    """h[T, D] = k · (Σ_j weight[:, j] · u[t − L + 1 + j] + bias) of u = q · v; weight is [D, L].

    The sequence's state has the last L − 1 rows of u, oldest first, from element ``offset`` on;
    before its first token these are 0.
    """

    facts: ClassVar = OpFacts(OpKind.OTHER, Rows.TOKENS, Collective.NONE)
    layer: int
    offset: int
    weight: Convolution
    bias: Bias | None

    @property
    def state_elements(self) -> int:
        """Of a sequence's state."""
        channels, length = self.weight.shape
        return (length - 1) * channels

    product_elements: ClassVar = 0  # a sum of a few inputs is no product of matrices


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaProject:
    """From src[T, D]: q[T, 2·K·d + G·v], which is query, key and value side by side, k[T, G·v], the
    gate of the output, and v[T, 2·G], beta and decay, for G value heads and K key heads."""

    facts: ClassVar = OpFacts(OpKind.LINEAR, Rows.TOKENS, Collective.NONE)
    query: Product
    key: Product
    value: Product
    gate: Product
    beta: Product
    decay: Product
    src: str = "h"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDelta:
    """h[T, G·v] of what `DeltaProject` gives, token by token (arXiv 2412.06464, equation 10).

    q passes a causal convolution and SiLU: q = silu(Σ_j conv[:, j] · q[t − L + 1 + j]). Of the
    result each head of query and key is divided by its length (‖x‖² + 1e-6)^½, the query by d^½ as
    well. With a = exp(−exp(decay_log) · softplus(decay + decay_bias)) and b = σ(beta), the head's
    matrix S[d, v] becomes a·S + key ⊗ b·(value − (a·S)ᵀ key), and its output is Sᵀ query, normed
    and multiplied by silu(gate).

    The sequence's state has the last L − 1 rows of q before the convolution, oldest first, from
    element ``offset`` on, and then S of each value head; before its first token these are 0.
    """

    facts: ClassVar = OpFacts(OpKind.OTHER, Rows.TOKENS, Collective.NONE)
    layer: int
    offset: int
    conv: Convolution
    decay_log: Decay
    decay_bias: Bias
    gain: Gain
    norm: NormSpec
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int

    @property
    def state_elements(self) -> int:
        """Of a sequence's state."""
        channels, length = self.conv.shape
        return (length - 1) * channels + self.num_value_heads * self.key_dim * self.value_dim

    @property
    def product_elements(self) -> int:
        """That a token is multiplied with: S is read by the key, changed, and read by the query."""
        return 3 * self.num_value_heads * self.key_dim * self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class GateHeads:
    """h[T, H·d] *= σ(src[T, D] times a matrix, plus a bias if any)."""

    facts: ClassVar = OpFacts(OpKind.LINEAR, Rows.TOKENS, Collective.NONE)
    weight: Product
    bias: Bias | None
    src: str = "n"


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
    """h[T, D] = Σ over a token's experts e of weight · down_e(act(gate_e src) · up_e src).

    ``router``[E, D], ``gate`` and ``up``[E, F, D], ``down``[E, D, F]; all of them may have biases.
    Of the stacked weights only the experts are read that some token goes to. With ``borders`` each
    rank has the experts ``[borders[r], borders[r + 1])``, and what they make of each token goes to
    all ranks, which add up.
    """

    facts: ClassVar = OpFacts(OpKind.EXPERTS, Rows.ROUTED, Collective.EXPERTS)
    router: Router
    router_bias: WholeBias | None
    correction_bias: WholeBias | None
    gate: Experts
    up: Experts
    down: ExpertsByColumns
    gate_bias: ExpertsBias | None
    up_bias: ExpertsBias | None
    down_bias: ExpertsBias | None
    routing: RoutingSpec
    activation: Activation | ClampedSwiGLU
    src: str = "h"
    borders: tuple[int, ...] = ()
    rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpert:
    """shared[T, D] = down(act(gate src) · up src), times σ(output_gate · src) if there is one."""

    facts: ClassVar = OpFacts(OpKind.LINEAR, Rows.TOKENS, Collective.LATER)
    gate: Product
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
class Head:
    """logits[N, V] = (h[N, D] times a matrix, plus a bias) · scale, and then the softcap.

    N are the rows that are wanted.
    """

    facts: ClassVar = OpFacts(OpKind.LINEAR, Rows.LOGITS, Collective.ALL_GATHER)
    weight: HeadMatrix
    softcap: float | None
    bias: Bias | None = None
    scale: float = 1.0


class _Parts:
    """Of an op that joins what the ranks have: rank r has ``[borders[r], borders[r + 1])``."""

    __slots__ = ()
    borders: tuple[int, ...]
    rank: int

    @property
    def num_ranks(self) -> int:
        return len(self.borders) - 1

    @property
    def own(self) -> int:
        """What this rank has."""
        return self.borders[self.rank + 1] - self.borders[self.rank]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather(_Parts):
    """buffer[T, W] from all ranks' buffer[T, own]: parts of columns, side by side."""

    facts: ClassVar = OpFacts(OpKind.OTHER, Rows.TOKENS, Collective.ITSELF)
    buffer: str
    borders: tuple[int, ...]
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherTokens(_Parts):
    """x[T, D]: each row from the rank whose part of the vocabulary, ``borders``, has its token."""

    facts: ClassVar = OpFacts(OpKind.OTHER, Rows.TOKENS, Collective.ITSELF)
    borders: tuple[int, ...]
    rank: int
    hidden_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherLogits(_Parts):
    """logits[N, V] from all ranks' logits[N, own], after the `Head`."""

    facts: ClassVar = OpFacts(OpKind.OTHER, Rows.LOGITS, Collective.ITSELF)
    borders: tuple[int, ...]
    rank: int


Op = (
    Embed | Norm | QKVProject | LatentProject | HeadNorm | Rope | KVWrite | GrowQueries | Attend
    | LatentAttend | BidirectionalAttend | ConvProject | ShortConv | DeltaProject | GatedDelta
    | GateHeads | OutProject | MLP | GateUp | Down | MoE | SharedExpert | AddShared | AddResidual
    | Head | Gather | GatherTokens | GatherLogits
)  # fmt: skip


AttentionOp = Attend | LatentAttend | BidirectionalAttend
GatherOp = Gather | GatherTokens | GatherLogits
StateOp = ShortConv | GatedDelta  # those that read and write the sequences' states


class WeightUse(NamedTuple):
    """A weight as an op uses it. ``num_kv_heads`` are there if it is split by them."""

    weight: Weight
    role: Role
    split: Split
    num_kv_heads: int | None = None

    @property
    def is_stacked(self) -> bool:
        """Whether it has a part for each expert, of which only some are read."""
        return self.split in (Split.EXPERT_ROWS, Split.EXPERT_COLUMNS)


def weight_uses(op: Op) -> tuple[WeightUse, ...]:
    """The weights that an op reads, in field order, and what it does with each."""
    heads = getattr(op, "num_kv_heads", None)
    fields = ((getattr(op, name), facts) for name, facts in _weight_fields(type(op)))
    return tuple(
        WeightUse(weight, facts.role, facts.split, heads)
        for weight, facts in fields
        if weight is not None
    )


def op_weights(op: Op) -> tuple[Weight, ...]:
    """The weights that an op reads, in field order."""
    return tuple(use.weight for use in weight_uses(op))


def weight_roles(ops: Iterable[Op]) -> dict[str, frozenset[Role]]:
    """What each weight is used for, by name; a tied head is a table as well."""
    found: dict[str, frozenset[Role]] = {}
    for op in ops:
        for use in weight_uses(op):
            found[use.weight.name] = found.get(use.weight.name, frozenset()) | {use.role}
    return found


def experts_of(op: Op) -> tuple[int, int]:
    """How many experts an op routes to, and how many of those a token meets; else (1, 1)."""
    if op.facts.rows is not Rows.ROUTED:
        return 1, 1
    assert isinstance(op, MoE)
    return op.router.shape[0], op.routing.top_k


def _weight_fields(kind: type) -> tuple[tuple[str, WeightFacts], ...]:
    """The fields of a class of ops that hold weights.

    Raises:
        TypeError: one of them is a plain `Weight`, of which nothing is known.
    """
    if kind not in _FIELDS:
        found: list[tuple[str, WeightFacts]] = []
        for name, hint in get_type_hints(kind, include_extras=True).items():
            parts = [hint, *get_args(hint)]  # ``X | None`` is a union
            notes = [note for part in parts for note in getattr(part, "__metadata__", ())]
            found += [(name, note) for note in notes if isinstance(note, WeightFacts)]
            if Weight in parts and not notes:
                raise TypeError(f"{kind.__name__}.{name} does not say what is done with it.")
        _FIELDS[kind] = tuple(found)
    return _FIELDS[kind]


_FIELDS: dict[type, tuple[tuple[str, WeightFacts], ...]] = {}
