"""A model as the roofline prices it: its ops, the formats of its numbers, its ranks."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from math import prod
from typing import Any

from ridgeline.core.cache_groups import KVGroup, StateGroup, kv_groups, state_group
from ridgeline.core.formats import BFLOAT16, NumberFormat
from ridgeline.core.op_facts import Role
from ridgeline.core.ops import AttentionOp, ContextOp, Op, StateOp, Weight
from ridgeline.core.parallel_layout import ParallelLayout
from ridgeline.core.spec import ModelSpec, RoutingSpec
from ridgeline.core.weight_uses import op_weights, weight_uses
from ridgeline.roofline.kernels import PLAIN, KernelModel

# What quantizers take of the layers.
_QUANTIZED = (Role.PRODUCT, Role.EXPANSION, Role.OUTPUT_GATE)


@dataclass(frozen=True, kw_only=True, eq=False)
class PricedModel:
    """What `price` needs to know beside the batch.

    ``memo`` keeps what has been computed of it; nothing but speed depends on it.

    Attributes:
        spec: the model.
        ops: what `models.lower` made of it.
        activations: format of the buffers between ops, and of weights that are not quantized.
        weights: format of the matrices of the layers. Embeddings, the head, norms, biases and
            routers stay in ``activations``, as quantizers leave them.
        weight_formats: formats of single weights by name, before all else.
        kv: format of the KV cache.
        layout: how the model is spread over ranks. Prices are those of one rank.
        compute: format of the products of weights in that format, if not that of the activations
            (FP8 by FP8). Other weights, such as a 16-bit head, are multiplied in the activations'.
        products_by_weight: each product runs at the rate of its weight's format (the cpu executor).
        kernels: how the executor's products grow with tokens.
        dense_attention: masked scores are computed too (the reference executor does).
        adapter_elements: of the low-rank matrices of each LoRA adapter, in ``activations``; adapter
            1 is the first.
        block_tokens: of a KV block, which context-parallel ranks exchange whole.
    """

    spec: ModelSpec
    ops: tuple[Op, ...]
    activations: NumberFormat = BFLOAT16
    weights: NumberFormat | None = None
    weight_formats: Mapping[str, NumberFormat] = field(default_factory=dict)
    kv: NumberFormat | None = None
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    dense_attention: bool = False
    compute: NumberFormat | None = None
    products_by_weight: bool = False
    kernels: KernelModel = PLAIN
    adapter_elements: tuple[int, ...] = ()
    block_tokens: int = 16

    @property
    def compute_format(self) -> NumberFormat:
        """Of products with weights of that format; others are in that of the activations."""
        return self.compute or self.activations

    def product_format(self, weight: Weight | None) -> NumberFormat:
        """Of the products with a weight; of others (attention) it is the activations'."""
        if weight is None:
            return self.activations
        form = self.format_of(weight)
        if self.products_by_weight or form.name == self.compute_format.name:
            return form
        return self.activations

    @cached_property
    def main_format(self) -> NumberFormat:
        """How most elements of the layers' weights are stored."""
        elements: Counter[NumberFormat] = Counter()
        for use in (use for op in self.ops for use in weight_uses(op)):
            if not (use.role.is_table or use.role is Role.HEAD):
                elements[self.format_of(use.weight)] += prod(use.weight.shape)
        return elements.most_common(1)[0][0]

    @property
    def main_product_format(self) -> NumberFormat:
        """Of most products of the layers; MFU is a share of this format's peak."""
        return self.main_format if self.products_by_weight else self.compute_format

    @property
    def kv_format(self) -> NumberFormat:
        return self.kv or self.activations

    @property
    def activation_bytes(self) -> float:
        """Of one element of a buffer."""
        return self.activations.bits / 8

    @cached_property
    def groups(self) -> tuple[KVGroup, ...]:
        return kv_groups(self.spec)

    @cached_property
    def states(self) -> StateGroup | None:
        """The layers that keep states of sequences."""
        return state_group(self.spec)

    @property
    def state_bytes(self) -> int:
        """Of one sequence's state."""
        return 0 if self.states is None else self.states.num_bytes

    def kv_token_bytes(self, group: KVGroup) -> float:
        """Of one token in one layer of a KV group, scales included."""
        widths = (group.k_width, group.v_width)
        bits = sum(width * self.kv_format.bits_per_element(width) for width in widths if width)
        return group.num_kv_heads * bits / 8

    def format_of(self, weight: Weight) -> NumberFormat:
        """How a weight is stored."""
        if weight.name in self.weight_formats:
            return self.weight_formats[weight.name]
        if self.weights is not None and weight.name in self._quantized_names:
            return self.weights
        return self.activations

    def bytes_of(self, weight: Weight | None) -> float:
        return 0.0 if weight is None else self.format_of(weight).num_bytes(weight.shape)

    @cached_property
    def _quantized_names(self) -> frozenset[str]:
        """Matrices of the layers, routers excepted."""
        uses = (use for op in self.ops for use in weight_uses(op))
        return frozenset(use.weight.name for use in uses if use.role in _QUANTIZED)

    @cached_property
    def lists_exchanges(self) -> bool:
        """Whether what context-parallel ranks exchange stands in the list of ops."""
        return any(isinstance(op, ContextOp) for op in self.ops)

    @cached_property
    def grouped_ops(self) -> tuple[tuple[Op, int], ...]:
        """Ops that cost the same, each with how often it occurs, in order of the first."""
        counts: dict[object, tuple[Op, int]] = {}
        for op in self.ops:
            key = (type(op), tuple(self._cost_key(op, f.name) for f in fields(op)))
            first, count = counts.get(key, (op, 0))
            counts[key] = (first, count + 1)
        return tuple(counts.values())

    @cached_property
    def attention_ops(self) -> tuple[tuple[AttentionOp, int], ...]:
        """Those of `grouped_ops` whose cost depends on contexts."""
        return tuple((op, n) for op, n in self.grouped_ops if isinstance(op, AttentionOp))

    @cached_property
    def state_ops(self) -> tuple[tuple[StateOp, int], ...]:
        """Those whose cost depends on the number of sequences."""
        return tuple((op, n) for op, n in self.grouped_ops if isinstance(op, StateOp))

    @cached_property
    def token_ops(self) -> tuple[tuple[Op, int], ...]:
        """Those whose cost depends on the numbers of tokens and of rows of logits alone."""
        others = AttentionOp | StateOp
        return tuple(each for each in self.grouped_ops if not isinstance(each[0], others))

    @cached_property
    def memo(self) -> dict[object, Any]:
        return {}

    def _cost_key(self, op: Op, name: str) -> object:
        """What of a field sets the cost: shapes and counts, not names and numbers."""
        value = getattr(op, name)
        if isinstance(value, Weight):
            return value.shape, self.format_of(value)
        if isinstance(value, RoutingSpec):
            return value.top_k
        is_count = isinstance(value, int) and name not in ("layer", "group", "offset")
        return value if is_count or isinstance(value, tuple) else None


def weights_of(model: PricedModel) -> tuple[Weight, ...]:
    """Every weight once, in the order of the ops; a tied head is the embedding."""
    found = {weight.name: weight for op in model.ops for weight in op_weights(op)}
    return tuple(found.values())
