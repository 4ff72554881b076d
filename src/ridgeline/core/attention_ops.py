"""The ops around the KV cache: positions, writing K and V, attending to them.

`core.ops` has the shapes and the buffers.
"""

from dataclasses import dataclass
from typing import ClassVar

from ridgeline.core.op_facts import Collective, OpFacts, OpKind, Rows
from ridgeline.core.op_weights import Expansion, Sinks
from ridgeline.core.rope_spec import QueryGrowth, RopeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotate q[T, H, d] and k[T, K, d] by their positions; K may be 0.

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

    ``sinks``[H] are logits that join each head's softmax, without a value. ``chunked``: ``window``
    is the length of chunks, and tokens of other chunks than one's own are not seen.
    """

    facts: ClassVar = OpFacts(OpKind.ATTENTION, Rows.TOKENS, Collective.CONTEXT)
    layer: int
    group: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: Sinks | None = None
    chunked: bool = False

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

    facts: ClassVar = OpFacts(OpKind.ATTENTION, Rows.TOKENS, Collective.CONTEXT)
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    chunked: ClassVar = False

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

    facts: ClassVar = OpFacts(OpKind.ATTENTION, Rows.TOKENS, Collective.CONTEXT)
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
    chunked: ClassVar = False

    @property
    def k_width(self) -> int:
        return self.latent_dim + self.rope_dim

    @property
    def loaded_width(self) -> int:
        """Elements of a latent that queries are multiplied with, which are K's and V's."""
        return 2 * self.latent_dim + self.rope_dim
