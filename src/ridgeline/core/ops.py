"""The ops that a model is lowered to: what executors run and what the roofline prices.

A lowered model is an ordered tuple of ops over a few named buffers. ``x`` is the residual stream,
``h`` a branch, ``n`` a norm of ``x`` that two branches read, ``shared`` a branch that joins ``h``,
``q``, ``k``, ``v`` the heads and ``logits`` the end. Every op is pure data: its buffers, its shapes
and the names of its weights. Linear weights are stored ``[out, in]``.

Shapes: T tokens of the pass, D hidden size, H heads, K KV heads, d head width, F feed-forward
width, V vocabulary, E experts; in latent attention, R latent elements, n and r the widths of a
head's parts without and with rotary positions, v the width of a head of V.
"""

from dataclasses import dataclass

from ridgeline.core.spec import (
    Activation,
    ClampedSwiGLU,
    NormScope,
    NormSpec,
    RopeSpec,
    RoutingSpec,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A parameter by its canonical name, e.g. ``layers.3.q``, and its shape."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Embed:
    """x[T, D] = weight[token ids] · scale, plus positions[positions] if there is such a table."""

    weight: Weight
    scale: float
    positions: Weight | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """dst[T, D] = norm(src[T, D]) · weight + bias, of which a norm may lack either."""

    src: str
    dst: str
    weight: Weight | None
    spec: NormSpec
    bias: Weight | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QKVProject:
    """q[T, H, d], k[T, K, d], v[T, K, d] = src[T, D] times three matrices, plus biases if any.

    ``clip`` bounds the results to [−clip, clip].
    """

    query: Weight
    key: Weight
    value: Weight
    query_bias: Weight | None
    key_bias: Weight | None
    value_bias: Weight | None
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

    query_latent: Weight | None
    query_latent_bias: Weight | None
    query_norm: Weight | None
    query: Weight
    latent: Weight
    latent_bias: Weight | None
    latent_norm: Weight
    norm: NormSpec
    num_heads: int
    src: str = "h"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorm:
    """Normalise each head of q[T, H, d] and of k[T, K, d], or all heads together, by ``scope``.

    Biases have the shapes of the gains.
    """

    query: Weight
    key: Weight
    spec: NormSpec
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scope: NormScope = NormScope.HEAD
    query_bias: Weight | None = None
    key_bias: Weight | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotate q[T, H, d] and k[T, K, d] by their positions.

    ``query_start`` and ``key_start`` are the first elements of a head that are rotated;
    ``head_dim`` and ``key_dim`` the whole widths of a head of q and of k.
    """

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

    layer: int
    group: int
    num_kv_heads: int
    k_width: int
    v_width: int
    has_values: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Attend:
    """h[T, H·d] = softmax(scale · q·K) V over the cache of ``layer``, this pass's tokens included.

    ``sinks``[H] are logits that join each head's softmax, without a value.
    """

    layer: int
    group: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: Weight | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttend:
    """h[T, H·v]: attention over the latents [C, R+r] in the cache of ``layer``.

    ``expand``[H·(n+v), R] maps a latent to the heads' K (n each) and V (v each). Executors choose
    between expanding the latents they see (plain) and taking the matrix into q and the output
    (absorbed); the results are the same.
    """

    layer: int
    group: int
    expand: Weight
    num_heads: int
    latent_dim: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OutProject:
    """h[T, D] = h[T, H·d] (or [T, H·v]) times a matrix, plus a bias if any."""

    weight: Weight
    bias: Weight | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MLP:
    """h[T, D] = down(act(gate src) · up src), or down(act(up src)) where there is no gate."""

    gate: Weight | None
    up: Weight
    down: Weight
    up_bias: Weight | None
    gate_bias: Weight | None
    down_bias: Weight | None
    activation: Activation
    src: str = "h"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoE:
    """h[T, D] = Σ over a token's experts e of weight · down_e(act(gate_e src) · up_e src).

    ``router``[E, D], ``gate`` and ``up``[E, F, D], ``down``[E, D, F]; all of them may have biases.
    Of the stacked weights only the experts are read that some token goes to.
    """

    router: Weight
    router_bias: Weight | None
    correction_bias: Weight | None
    gate: Weight
    up: Weight
    down: Weight
    gate_bias: Weight | None
    up_bias: Weight | None
    down_bias: Weight | None
    routing: RoutingSpec
    activation: Activation | ClampedSwiGLU
    src: str = "h"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpert:
    """shared[T, D] = down(act(gate src) · up src), times σ(output_gate · src) if there is one."""

    gate: Weight
    up: Weight
    down: Weight
    output_gate: Weight | None
    activation: Activation | ClampedSwiGLU
    src: str = "h"


@dataclass(frozen=True, slots=True, kw_only=True)
class AddShared:
    """h[T, D] += shared[T, D]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddResidual:
    """x[T, D] += h[T, D] · scale."""

    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """logits[N, V] = (h[N, D] times a matrix, plus a bias) · scale, and then the softcap.

    N are the rows that are wanted.
    """

    weight: Weight
    softcap: float | None
    bias: Weight | None = None
    scale: float = 1.0


Op = (
    Embed | Norm | QKVProject | LatentProject | HeadNorm | Rope | KVWrite | Attend | LatentAttend
    | OutProject | MLP | MoE | SharedExpert | AddShared | AddResidual | Head
)  # fmt: skip


def op_weights(op: Op) -> tuple[Weight, ...]:
    """The weights that an op reads, in field order."""
    fields = (getattr(op, name) for name in type(op).__dataclass_fields__)
    return tuple(value for value in fields if isinstance(value, Weight))
