"""The price of each op of `core.ops`: FLOPs and bytes for a batch, on one rank.

Bytes are those that must move: weights once for each pass (of stacked experts, those that tokens
go to), K and V of each segment's visible context once, and the named buffers that an op reads and
writes. What a fused kernel keeps in registers or cache (scores, a feed-forward network's inner
width) is not counted.

Tensor-parallel ranks hold 1/n of every matrix of the layers, of the heads of q and of the head of
the model; each KV head is held by max(1, n / K) ranks. Two all-reduces a layer join them.
"""

from dataclasses import dataclass

import numpy as np

from ridgeline.core.ops import (
    MLP,
    AddResidual,
    AddShared,
    Attend,
    Embed,
    Head,
    HeadNorm,
    KVWrite,
    LatentAttend,
    LatentProject,
    MoE,
    Norm,
    Op,
    OutProject,
    QKVProject,
    Rope,
    SharedExpert,
    Weight,
    op_weights,
)
from ridgeline.roofline.batch import Batch
from ridgeline.roofline.model import PricedModel
from ridgeline.roofline.work import Work


@dataclass(frozen=True, slots=True)
class _Pricing:
    """One op of one batch; helpers share the model and the numbers of ranks."""

    model: PricedModel
    batch: Batch

    @property
    def tokens(self) -> float:
        """Tokens that this rank computes."""
        return self.batch.num_tokens / self.model.layout.context

    @property
    def ranks(self) -> int:
        return self.model.layout.tensor

    def buffers(self, elements_per_token: float) -> float:
        """Bytes of activations that are read or written."""
        return self.tokens * elements_per_token * self.model.activation_bytes

    def linear(self, *matrices: Weight | None, biases: tuple[Weight | None, ...] = ()) -> Work:
        """Matrix products of all tokens with some matrices, each split over the ranks."""
        held = [matrix for matrix in matrices if matrix is not None]
        elements = sum(matrix.shape[-1] * matrix.shape[-2] for matrix in held)
        return Work(
            flops=2.0 * self.tokens * elements / self.ranks,
            weight_bytes=sum(map(self.model.bytes_of, (*held, *biases))) / self.ranks,
        )

    def moved(self, elements_per_token: float) -> Work:
        return Work(activation_bytes=self.buffers(elements_per_token))

    def kv_share(self, num_kv_heads: int) -> float:
        """The part of the KV heads that one rank holds."""
        return 1.0 / min(self.ranks, num_kv_heads)

    def all_reduce(self) -> Work:
        """Joins partial sums of the hidden state: each rank sends 2(n−1)/n of it (a ring)."""
        if self.ranks == 1:
            return Work()
        size = self.buffers(self.model.spec.hidden_size)
        return Work(link_bytes=2 * (self.ranks - 1) / self.ranks * size, link_messages=1)


def op_work(op: Op, batch: Batch, model: PricedModel) -> Work:
    """What an op moves and computes for a batch, on one rank; exact but for experts touched."""
    p, hidden = _Pricing(model, batch), model.spec.hidden_size
    match op:
        case Embed():
            tables = [op.weight] if op.positions is None else [op.weight, op.positions]
            rows = sum(model.format_of(table).num_bytes((hidden,)) for table in tables)
            return Work(weight_bytes=p.tokens * rows) + p.moved(hidden * len(tables))
        case Norm():
            weights = model.bytes_of(op.weight) + model.bytes_of(op.bias)
            return Work(weight_bytes=weights) + p.moved(2 * hidden)
        case AddResidual() | AddShared():
            return p.moved(3 * hidden)
        case HeadNorm():
            width = (op.num_heads / p.ranks + op.num_kv_heads * p.kv_share(op.num_kv_heads)) * (
                op.head_dim
            )
            weights = sum(map(model.bytes_of, op_weights(op)))
            return Work(weight_bytes=weights) + p.moved(2 * width)
        case Rope():
            keys = op.num_kv_heads * op.key_dim * p.kv_share(op.num_kv_heads)
            return p.moved(2 * (op.num_heads * op.head_dim / p.ranks + keys))
        case QKVProject():
            return _qkv(op, p) + p.moved(hidden)
        case LatentProject():
            return _latent_project(op, p)
        case KVWrite():
            return _kv_write(op, p)
        case Attend():
            return _attend(op, p)
        case LatentAttend():
            return _latent_attend(op, p)
        case OutProject():
            work = p.linear(op.weight, biases=(op.bias,))
            inner = op.weight.shape[1] / p.ranks
            return work + p.moved(inner + hidden) + p.all_reduce()
        case MLP():
            biases = (op.gate_bias, op.up_bias, op.down_bias)
            work = p.linear(op.gate, op.up, op.down, biases=biases)
            return work + p.moved(2 * hidden) + p.all_reduce()
        case MoE():
            return _moe(op, p)
        case SharedExpert():
            return p.linear(op.gate, op.up, op.down, op.output_gate) + p.moved(2 * hidden)
        case Head():
            return _head(op, p)


def adapter_work(adapter: int, num_tokens: int, model: PricedModel) -> Work:
    """The low-rank products of the tokens that go through a LoRA adapter."""
    elements = model.adapter_elements[adapter - 1]
    return Work(
        flops=2.0 * num_tokens * elements, weight_bytes=model.activations.num_bytes((elements,))
    )


def experts_touched(num_experts: int, top_k: int, num_tokens: float) -> float:
    """Experts that at least one of the tokens goes to, if routing is uniform.

    >>> round(experts_touched(8, 2, 1), 9), round(experts_touched(8, 2, 4), 2)
    (2.0, 5.47)
    """
    missed: float = (1.0 - top_k / num_experts) ** num_tokens
    return num_experts * (1.0 - missed)


def _qkv(op: QKVProject, p: _Pricing) -> Work:
    share = p.kv_share(op.num_kv_heads)
    kv_width = op.num_kv_heads * op.head_dim * share
    query = p.linear(op.query, biases=(op.query_bias,))
    keys = p.linear(op.key, op.value, biases=(op.key_bias, op.value_bias)) * (p.ranks * share)
    return query + keys + p.moved(op.num_heads * op.head_dim / p.ranks + 2 * kv_width)


def _latent_project(op: LatentProject, p: _Pricing) -> Work:
    """The latents are small and every rank computes them; the heads of q are split."""
    model = p.model
    to_latents = (
        p.linear(op.query_latent, op.latent, biases=(op.query_latent_bias, op.latent_bias))
        * p.ranks
    )
    norms = Work(weight_bytes=model.bytes_of(op.query_norm) + model.bytes_of(op.latent_norm))
    outputs = op.query.shape[0] / p.ranks + op.latent.shape[0]
    return to_latents + p.linear(op.query) + norms + p.moved(model.spec.hidden_size + outputs)


def _kv_write(op: KVWrite, p: _Pricing) -> Work:
    model, share = p.model, p.kv_share(op.num_kv_heads)
    width = op.num_kv_heads * (op.k_width + op.v_width) * share
    row = _kv_row_bytes(model, op.num_kv_heads, op.k_width, op.v_width) * share
    return Work(kv_write_bytes=p.tokens * row, activation_bytes=p.buffers(width))


def _kv_row_bytes(model: PricedModel, heads: int, k_width: int, v_width: int) -> float:
    form = model.kv_format
    return sum(heads * form.num_bytes((width,)) for width in (k_width, v_width) if width)


def _pairs(p: _Pricing, window: int | None) -> float:
    count = p.batch.square_pairs if p.model.dense_attention else p.batch.visible_pairs
    return count(window) / p.model.layout.context


def _attend(op: Attend, p: _Pricing) -> Work:
    share, width = p.kv_share(op.num_kv_heads), op.num_heads * op.head_dim / p.ranks
    rows = p.batch.kv_rows(op.window) / p.model.layout.context
    row = _kv_row_bytes(p.model, op.num_kv_heads, op.head_dim, op.head_dim) * share
    work = Work(
        flops=4.0 * _pairs(p, op.window) * width,
        weight_bytes=p.model.bytes_of(op.sinks) / p.ranks,
        kv_read_bytes=rows * row,
        activation_bytes=p.buffers(2 * width),
    )
    return work + _ring(p, row)


def _latent_attend(op: LatentAttend, p: _Pricing) -> Work:
    """The cheaper of expanding the latents and of absorbing the matrix into q and the output."""
    heads, rank, context_ranks = op.num_heads / p.ranks, op.latent_dim, p.model.layout.context
    pairs, rows = _pairs(p, None), p.batch.kv_rows(None) / context_ranks
    projection = rank * (op.nope_dim + op.v_dim)
    if p.model.dense_attention:
        multiplies = _cheaper_form_of_each(op, p.batch)
    else:
        plain = rows * projection + pairs * (op.nope_dim + op.rope_dim + op.v_dim)
        absorbed = p.tokens * projection + pairs * (2 * rank + op.rope_dim)
        multiplies = min(plain, absorbed)
    row = _kv_row_bytes(p.model, 1, rank + op.rope_dim, 0)
    work = Work(
        flops=2.0 * heads * multiplies,
        weight_bytes=p.model.bytes_of(op.expand) / p.ranks,
        kv_read_bytes=rows * row,
        activation_bytes=p.buffers(heads * (op.nope_dim + op.rope_dim + op.v_dim)),
    )
    return work + _ring(p, row)


def _cheaper_form_of_each(op: LatentAttend, batch: Batch) -> float:
    """Multiplications for each head where each segment's form is chosen by itself."""
    tokens, context = batch.stops - batch.starts, batch.stops
    pairs, projection = tokens * context, op.latent_dim * (op.nope_dim + op.v_dim)
    plain = context * projection + pairs * (op.nope_dim + op.rope_dim + op.v_dim)
    absorbed = tokens * projection + pairs * (2 * op.latent_dim + op.rope_dim)
    return float(np.minimum(plain, absorbed).sum())


def _ring(p: _Pricing, row_bytes: float) -> Work:
    """Context-parallel ranks pass the batch's fresh K and V around."""
    ranks = p.model.layout.context
    if ranks == 1:
        return Work()
    return Work(link_bytes=(ranks - 1) * p.tokens * row_bytes, link_messages=ranks - 1)


def _moe(op: MoE, p: _Pricing) -> Work:
    """Experts are spread over the expert-parallel ranks, and each is split by the tensor ranks
    that are left."""
    model, hidden = p.model, p.model.spec.hidden_size
    num_experts, top_k, num_tokens = op.gate.shape[0], op.routing.top_k, p.batch.num_tokens
    ranks = max(model.layout.tensor, model.layout.expert)
    stacked = (op.gate, op.up, op.down, op.gate_bias, op.up_bias, op.down_bias)
    one_expert = sum(map(model.bytes_of, stacked)) / num_experts
    touched = experts_touched(num_experts, top_k, num_tokens)
    elements = 3 * op.gate.shape[1] * op.gate.shape[2]
    router_bytes = sum(map(model.bytes_of, (op.router, op.router_bias, op.correction_bias)))
    work = Work(
        flops=2.0 * p.tokens * (hidden * num_experts + top_k * elements / ranks),
        weight_bytes=router_bytes + touched * one_expert / ranks,
        activation_bytes=p.buffers(2 * hidden),
    )
    if model.layout.expert > 1:
        # Each token goes to its experts' ranks and back.
        sent = 2 * top_k * p.buffers(hidden) * (model.layout.expert - 1) / model.layout.expert
        return work + Work(link_bytes=sent, link_messages=2)
    return work + p.all_reduce()


def _head(op: Head, p: _Pricing) -> Work:
    """Rows that are wanted, times the matrix; logits are written in at least float32."""
    model, rows = p.model, p.batch.logit_rows
    if not rows:
        return Work()
    vocab, hidden = op.weight.shape
    logits = rows * vocab * max(4.0, model.activation_bytes) / p.ranks
    gathered = Work(link_bytes=logits * (p.ranks - 1), link_messages=1) if p.ranks > 1 else Work()
    return gathered + Work(
        flops=2.0 * rows * vocab * hidden / p.ranks,
        weight_bytes=(model.bytes_of(op.weight) + model.bytes_of(op.bias)) / p.ranks,
        activation_bytes=rows * hidden * model.activation_bytes + logits,
    )
