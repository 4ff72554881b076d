"""Memory of weights, KV and states, and the largest batch and context that fit."""

from bisect import bisect_right
from dataclasses import dataclass
from math import prod

from ridgeline.core.config import blocks_per_sequence, states_per_sequence
from ridgeline.core.errors import UnsupportedModelError
from ridgeline.core.op_facts import Role
from ridgeline.core.ops import Embed, Op
from ridgeline.core.sharding import num_kv_parts, num_parts
from ridgeline.core.weight_uses import experts_of, op_weights, weight_uses
from ridgeline.roofline.model import PricedModel, weights_of

# Left to the runtime, activations and fragmentation, as vLLM's gpu_memory_utilization does.
USABLE_SHARE = 0.9


def weights_bytes(model: PricedModel) -> float:
    """Bytes of all weights, over all ranks of one replica without what ranks hold twice."""
    return sum(map(model.bytes_of, weights_of(model)))


def num_parameters(model: PricedModel) -> int:
    """Elements of all weights; what is tied counts once."""
    return sum(prod(weight.shape) for weight in weights_of(model))


def bits_per_weight(model: PricedModel) -> float:
    """Average over all weights that multiply something: layers and head, scales included."""
    ops = (op for op in model.ops if not isinstance(op, Embed))
    weights = {weight.name: weight for op in ops for weight in op_weights(op)}.values()
    elements = sum(prod(weight.shape) for weight in weights)
    return 8 * sum(map(model.bytes_of, weights)) / elements


def rank_weights_bytes(model: PricedModel) -> float:
    """Bytes of weights that the fullest rank holds.

    `core.sharding` says what tensor- and expert-parallel ranks hold; layers are split over the
    pipeline.
    """
    uses = {use.weight.name: use for op in reversed(model.ops) for use in weight_uses(op)}
    sizes = (model.bytes_of(use.weight) / num_parts(use, model.layout) for use in uses.values())
    return sum(sizes) / model.layout.pipeline


def kv_bytes_per_token(model: PricedModel) -> float:
    """Bytes of K and V that one more token adds while no window is full, over all ranks."""
    return sum(len(group.layers) * model.kv_token_bytes(group) for group in model.groups)


def kv_bytes(model: PricedModel, context: int) -> float:
    """Bytes of K, V and states of one sequence of ``context`` tokens; windowed layers hold their
    window."""
    return model.state_bytes + sum(
        len(group.layers) * model.kv_token_bytes(group) * min(context, group.window or context)
        for group in model.groups
    )


def rank_pool_bytes(model: PricedModel, context: int, *, block_tokens: int) -> float:
    """What one rank's pools need for a sequence of ``context`` tokens to run in the engine.

    These are whole blocks, with windows some for tokens in flight as well
    (`blocks_per_sequence`). A KV head is on max(1, ranks / heads) of the ranks. Beside them, its
    state and the checkpoints of it (`states_per_sequence`).
    """
    layout = model.layout
    states = model.state_bytes * states_per_sequence(context) / (layout.tensor * layout.pipeline)
    return states + sum(
        len(group.layers)
        * model.kv_token_bytes(group)
        * block_tokens
        * blocks_per_sequence(context, group.window, block_tokens=block_tokens)
        / num_kv_parts(group.num_kv_heads, layout)
        for group in model.groups
    ) / (layout.pipeline * layout.context)


def activation_bytes(model: PricedModel, *, tokens: int, rows: int) -> float:
    """Bytes of buffers of a step of ``tokens``, ``rows`` of which have logits, on one rank.

    The residual stream, the widest op's inputs and outputs, and logits in float32; attention never
    holds its scores.
    """
    hidden = model.spec.hidden_size
    widest = max(map(_output_width, model.ops))
    elements = tokens * (2 * hidden + widest / model.layout.tensor)
    return elements * model.activation_bytes + 4.0 * rows * model.spec.vocab_size


def _output_width(op: Op) -> int:
    """Elements a token of the products of an op's matrices, which are held at once."""
    met = experts_of(op)[1]
    return sum(
        use.weight.shape[-2] * (met if use.is_stacked else 1)
        for use in weight_uses(op)
        if use.role.is_matrix and use.role is not Role.HEAD
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """What a device of ``memory_bytes`` holds beside its part of the weights."""

    memory_bytes: float
    weights_bytes: float
    activation_bytes: float
    kv_pool_bytes: float
    max_batch: int
    max_context: int

    @property
    def fits(self) -> bool:
        """Whether one sequence of the asked length runs."""
        return self.max_batch > 0


def fit(
    model: PricedModel,
    *,
    memory_bytes: float,
    context: int,
    block_tokens: int,
    step_tokens: int = 2048,
    kv_share: float | None = None,
) -> MemoryFit:
    """How many sequences of ``context`` tokens run, and how long a single one may be.

    ``block_tokens`` are in a KV block, and ``step_tokens`` are computed in one step at the most.
    ``kv_share`` is the part of the memory beside the weights that is KV's; without it KV has what
    `USABLE_SHARE` of the memory leaves, or less where a step's activations take more than the rest.

    Raises:
        UnsupportedModelError: the model has no KV cache, as encoders have none.
    """

    def pool_bytes(context: int) -> float:
        return rank_pool_bytes(model, context, block_tokens=block_tokens)

    if not pool_bytes(context):
        raise UnsupportedModelError(
            "This model has no KV cache: how many sequences have room is not a matter of memory."
        )
    held = rank_weights_bytes(model)
    active = activation_bytes(model, tokens=step_tokens, rows=1)
    if kv_share is None:
        pool = max(0.0, min(memory_bytes * USABLE_SHARE, memory_bytes - active) - held)
    else:
        pool = max(0.0, memory_bytes - held) * kv_share
    return MemoryFit(
        memory_bytes=memory_bytes,
        weights_bytes=held,
        activation_bytes=active,
        kv_pool_bytes=pool,
        max_batch=int(pool // pool_bytes(context)),
        max_context=bisect_right(range(1, model.spec.max_position + 1), pool, key=pool_bytes),
    )


def parameter_bytes(num_parameters: float, bits: float) -> float:
    """Bytes of so many parameters."""
    return num_parameters * bits / 8
