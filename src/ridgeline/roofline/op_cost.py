"""The price of each op of `core.ops`: FLOPs and bytes for a batch, on one rank.

Bytes are those that must move: weights once for each pass (of stacked experts, those that tokens
go to), K and V of each segment's visible context once, the state of each segment's sequence once
each way, and the named buffers that an op reads and writes. What a fused kernel keeps in registers
or cache (scores, a feed-forward network's inner width) is not counted.

How ranks share weights, and what they exchange, is what `core.op_facts` says of each op. A list
that was made for one rank (`models.shard`) has that rank's shapes and its exchanges as ops: it is
priced as it stands, in a layout of one rank.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from ridgeline.core import ops
from ridgeline.core.context_ranks import RUN_TOKENS
from ridgeline.core.op_facts import Collective
from ridgeline.core.rounding import ceil_div, round_up
from ridgeline.core.sharding import num_kv_parts, num_parts
from ridgeline.core.weight_uses import WeightUse, experts_of, weight_uses
from ridgeline.roofline.batch import BatchShape
from ridgeline.roofline.model import PricedModel
from ridgeline.roofline.work import Work


@dataclass(frozen=True, slots=True)
class _Pricing:
    """One op of one batch; helpers share the model and the numbers of ranks."""

    model: PricedModel
    batch: BatchShape

    @property
    def tokens(self) -> float:
        """Tokens that this rank computes."""
        ranks = self.model.layout.context
        if ranks == 1:
            return self.batch.num_tokens
        shared = self.shared_tokens
        return self.batch.num_tokens - shared + shared / ranks

    @property
    def shared_tokens(self) -> int:
        """Of ranges that context-parallel ranks share."""
        lengths = self.batch.stops - self.batch.starts
        return int(lengths[self.batch.shared_by(self.model.layout.context)].sum())

    @property
    def ranks(self) -> int:
        return self.model.layout.tensor

    def buffers(self, elements_per_token: float) -> float:
        """Bytes of activations that are read or written."""
        return self.tokens * elements_per_token * self.model.activation_bytes

    def weight_bytes(self, op: ops.Op) -> float:
        """Of all weights of an op that this rank holds."""
        return _held_bytes(self.model, weight_uses(op))

    def products(self, op: ops.Op) -> Work:
        """Matrix products of all tokens, each with this rank's part of the matrices it meets."""
        met, layout = experts_of(op)[1] * _own_experts(op), self.model.layout
        elements = sum(
            prod(use.weight.shape[-2:]) * (met if use.is_stacked else 1) / num_parts(use, layout)
            for use in weight_uses(op)
            if use.role.is_matrix
        )
        return Work(flops=2.0 * self.tokens * elements, weight_bytes=self.weight_bytes(op))

    def moved(self, elements_per_token: float) -> Work:
        return Work(activation_bytes=self.buffers(elements_per_token))

    def kv_heads(
        self,
        op: ops.QKVProject
        | ops.HeadNorm
        | ops.Rope
        | ops.KVWrite
        | ops.GatherContext
        | ops.AttentionOp,
    ) -> float:
        """KV heads that this rank holds."""
        heads = op.num_kv_heads  # none of a layer that reads those of another
        return heads / num_kv_parts(heads, self.model.layout) if heads else 0.0

    def kv_row_bytes(self, op: ops.KVWrite | ops.GatherContext | ops.AttentionOp) -> float:
        """Of K and V of a token in one layer, on this rank."""
        form, widths = self.model.kv_format, (op.k_width, op.v_width)
        return self.kv_heads(op) * sum(form.num_bytes((width,)) for width in widths if width)


def op_work(op: ops.Op, batch: BatchShape, model: PricedModel) -> Work:
    """What an op moves and computes for a batch, on one rank; exact but for experts touched."""
    p = _Pricing(model, batch)
    work = _local_work(op, p)
    if model.layout.num_ranks == 1 or model.lists_exchanges:
        return work
    return work + _exchanged(op, p)


def _local_work(op: ops.Op, p: _Pricing) -> Work:
    hidden = p.model.spec.hidden_size
    match op:
        case ops.Embed():
            tables = [use.weight for use in weight_uses(op)]
            rows = sum(p.model.format_of(table).num_bytes((hidden,)) for table in tables)
            return Work(weight_bytes=p.tokens * rows) + p.moved(hidden * len(tables))
        case ops.Norm():
            return Work(weight_bytes=p.weight_bytes(op)) + p.moved(2 * op.width(hidden))
        case ops.Xielu():
            return Work(weight_bytes=p.weight_bytes(op)) + p.moved(2 * op.width)
        case ops.LayerEmbed():
            return _layer_embed(op, p)
        case ops.LayerInput():
            return p.products(op) + p.moved(2 * hidden + op.width)
        case ops.ScaleHidden():
            return Work(weight_bytes=p.weight_bytes(op)) + p.moved(2 * hidden)
        case ops.AddResidual() | ops.AddShared():
            return p.moved(3 * hidden)
        case ops.AddLaurel():
            return p.moved(5 * hidden)
        case ops.SplitStreams() | ops.JoinStreams():
            return p.products(op) + p.moved((2 + len(op.weights)) * hidden)
        case ops.PredictStreams():
            return p.products(op) + p.moved((2 * op.num_streams + 1) * hidden)
        case ops.CorrectStreams():
            return p.products(op) + p.moved((2 * op.num_streams + 2) * hidden)
        case ops.AddToStreams():
            return p.moved((2 * op.num_streams - 1) * hidden)
        case ops.SparseGateUp():
            return p.products(op) + p.moved(hidden + op.up.shape[0])
        case ops.HeadNorm():
            heads = op.num_heads / p.ranks + p.kv_heads(op) * (2 if op.values else 1)
            width = heads * op.head_dim
            return Work(weight_bytes=p.weight_bytes(op)) + p.moved(2 * width)
        case ops.Rope():
            keys = p.kv_heads(op) * op.key_dim
            return p.moved(2 * (op.num_heads * op.head_dim / p.ranks + keys))
        case ops.GrowQueries():
            return p.moved(2 * op.num_heads * op.head_dim / p.ranks)
        case ops.QKVProject():
            outputs = (op.num_heads / p.ranks + 2 * p.kv_heads(op)) * op.head_dim
            return p.products(op) + p.moved(hidden + outputs)
        case ops.LatentProject():
            outputs = op.query.shape[0] / p.ranks + op.latent.shape[0]
            return p.products(op) + p.moved(hidden + outputs)
        case ops.KVWrite():
            width = p.kv_heads(op) * (op.k_width + op.v_width)
            written = p.batch.num_tokens / p.model.layout.context * p.kv_row_bytes(op)
            return Work(kv_write_bytes=written, activation_bytes=p.buffers(width))
        case ops.Attend():
            return _attend(op, p)
        case ops.BidirectionalAttend():
            return _attend_both_ways(op, p)
        case ops.LatentAttend():
            return _latent_attend(op, p)
        case ops.ConvProject():
            return p.products(op) + p.moved(hidden * (1 + 3 / p.ranks))
        case ops.ShortConv():
            return _state_op(op, p) + p.moved(4 * hidden / p.ranks)
        case ops.DeltaProject():
            outputs = sum(use.weight.shape[0] for use in weight_uses(op))
            return p.products(op) + p.moved(hidden + outputs / p.ranks)
        case ops.GatedDelta():
            values = op.num_value_heads * op.value_dim
            moved = op.conv.shape[0] + 2 * (values + op.num_value_heads)
            return _state_op(op, p) + p.moved(moved / p.ranks)
        case ops.ScanProject():
            outputs = op.mixed.shape[0] + op.gate.shape[0] + op.step.shape[0]
            return p.products(op) + p.moved(hidden + outputs / p.ranks)
        case ops.SelectiveScan():
            values = op.num_heads * op.head_dim
            moved = op.conv.shape[0] + 2 * values + op.num_heads
            return _state_op(op, p) + p.moved(moved / p.ranks)
        case ops.GateHeads():
            return p.products(op) + p.moved(hidden + 2 * op.weight.shape[0] / p.ranks)
        case ops.OutProject():
            return p.products(op) + p.moved(op.weight.shape[1] / p.ranks + op.weight.shape[0])
        case ops.GateUp():
            return p.products(op) + p.moved(hidden + op.up.shape[0])
        case ops.Down():
            gated = hidden if op.output_gate else 0
            return p.products(op) + p.moved(sum(op.weight.shape) + gated)
        case ops.MLP() | ops.SharedExpert():
            return p.products(op) + p.moved(2 * hidden)
        case ops.MoE():
            work = _moe(op, p) + p.moved((2 if op.router_src is None else 3) * hidden)
            return work + _expert_outputs(op, p) if op.borders else work
        case ops.Head():
            return _head(op, p)
        case ops.Gather():
            return _gathered(op, op.own, op.borders[-1], p.tokens, p.model.activation_bytes)
        case ops.GatherTokens():
            # Which rank has a token is not known: of all ranks together it is every row once.
            part = hidden / op.num_ranks
            return _gathered(op, part, hidden, p.tokens, p.model.activation_bytes)
        case ops.GatherLogits():
            size = max(4.0, p.model.activation_bytes)
            return _gathered(op, op.own, op.borders[-1], p.batch.logit_rows, size)
        case ops.GatherContext():
            return _context_gathered(op, p)
        case ops.GatherSplits():
            return _splits_gathered(op.num_heads, op.width, p)
        case ops.GatherRanges():
            return _ranges_gathered(hidden, p)
        case ops.ReceiveHidden():
            return p.moved(hidden)
        case ops.KeepFeatures():
            return p.moved(2 * op.width)
        case ops.ReadFeatures():
            return p.moved(2 * op.width + hidden)
        case ops.JoinFeatures():
            return p.moved(4 * hidden)
        case ops.AddInner():
            return p.moved(3 * hidden)
        case ops.SendHidden():
            return p.moved(hidden) + Work(link_bytes=p.buffers(hidden), link_messages=1)


def _expert_outputs(op: ops.MoE, p: _Pricing) -> Work:
    """What each expert of each token made of it, from the ranks that have them to all others."""
    rows, hidden = p.tokens * op.routing.top_k, p.model.spec.hidden_size
    num_ranks = len(op.borders) - 1
    own = (op.borders[op.rank + 1] - op.borders[op.rank]) / op.borders[-1]
    sent = p.buffers(op.routing.top_k * hidden * own) * (num_ranks - 1)
    return Work(
        activation_bytes=2 * rows * hidden * p.model.activation_bytes,
        link_bytes=sent,
        link_messages=1,
    )


def _own_experts(op: ops.Op) -> float:
    """The share of the experts that this rank has, of a list that was made for it."""
    if not isinstance(op, ops.MoE):
        return 1.0
    return op.up.shape[0] / op.router.shape[0]


def _gathered(op: ops.GatherOp, own: float, width: int, rows: float, element_bytes: float) -> Work:
    """Of ``width`` elements a row, this rank sends its own to each of the others."""
    if not rows:
        return Work()
    return Work(
        activation_bytes=rows * (own + width) * element_bytes,
        link_bytes=rows * own * element_bytes * (op.num_ranks - 1),
        link_messages=1,
    )


def _exchanged(op: ops.Op, p: _Pricing) -> Work:
    """What ranks send one another: an all-reduce by a ring 2(n−1)/n of the hidden state each."""
    layout, hidden = p.model.layout, p.buffers(p.model.spec.hidden_size)
    match op.facts.collective:
        case Collective.NONE | Collective.LATER | Collective.ITSELF:
            return Work()
        case Collective.EXPERTS if layout.expert > 1:
            sent = 2 * experts_of(op)[1] * hidden * (layout.expert - 1) / layout.expert
            return Work(link_bytes=sent, link_messages=2)
        case Collective.ALL_REDUCE | Collective.EXPERTS:
            # That of the embedding is not priced: one more beside two a layer.
            if p.ranks == 1 or isinstance(op, ops.Embed):
                return Work()
            return Work(link_bytes=2 * (p.ranks - 1) / p.ranks * hidden, link_messages=1)
        case Collective.ALL_GATHER:
            assert isinstance(op, ops.Head)
            ranges = _ranges_gathered(p.model.spec.hidden_size, p)
            if p.ranks == 1 or not p.batch.logit_rows:
                return ranges
            return ranges + Work(link_bytes=_logits_bytes(op, p) * (p.ranks - 1), link_messages=1)
        case Collective.CONTEXT:
            assert isinstance(op, ops.AttentionOp)
            if isinstance(op, ops.BidirectionalAttend) or layout.context == 1:
                return Work()
            width = op.latent_dim if isinstance(op, ops.LatentAttend) else op.head_dim
            return _context_gathered(op, p) + _splits_gathered(op.num_heads, width, p)


def _context_gathered(op: ops.GatherContext | ops.AttentionOp, p: _Pricing) -> Work:
    """K and V of each shared range and of all before it, in whole blocks; a range with something
    before it takes two exchanges. Which rank has a block is not known: this is the mean."""
    ranks, size = p.model.layout.context, p.model.block_tokens
    shared = p.batch.shared_by(ranks)
    starts, stops = p.batch.starts[shared], p.batch.stops[shared]
    blocks = int((ceil_div(starts, size) + ceil_div(stops, size) - starts // size).sum())
    num_bytes = blocks * size * p.kv_row_bytes(op)
    return Work(
        activation_bytes=num_bytes * (1 + 1 / ranks),
        link_bytes=num_bytes * (ranks - 1) / ranks,
        link_messages=len(starts) + int(np.count_nonzero(starts)),
    )


def _splits_gathered(num_heads: int, width: int, p: _Pricing) -> Work:
    """Of each token of ranges that are not shared, head and run of KV a maximum, a sum, and
    elements in whole vectors of 16; always float32. The mean of ranks."""
    ranks = p.model.layout.context
    own = ~p.batch.shared_by(ranks)
    starts, stops = p.batch.starts[own], p.batch.stops[own]
    rows = int(((stops - starts) * ceil_div(stops, RUN_TOKENS)).sum()) * num_heads
    num_bytes = rows * (round_up(width, 16) + 2) * 4.0
    return Work(
        activation_bytes=num_bytes * (1 + 1 / ranks),
        link_bytes=num_bytes * (ranks - 1) / ranks,
        link_messages=min(1, len(starts)),
    )


def _ranges_gathered(hidden: int, p: _Pricing) -> Work:
    """Hidden states of shared ranges; the mean of ranks."""
    ranks = p.model.layout.context
    num_bytes = p.shared_tokens * hidden * p.model.activation_bytes
    return Work(
        activation_bytes=num_bytes * (1 + 1 / ranks),
        link_bytes=num_bytes * (ranks - 1) / ranks,
        link_messages=int(np.count_nonzero(p.batch.shared_by(ranks))),
    )


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


def expert_bytes(op: ops.Op, model: PricedModel) -> float:
    """Of the stacked weights of one expert, on one rank."""
    stacked = [use for use in weight_uses(op) if use.is_stacked]
    return _held_bytes(model, stacked) / experts_of(op)[0]


def _held_bytes(model: PricedModel, uses: Iterable[WeightUse]) -> float:
    return sum(model.bytes_of(use.weight) / num_parts(use, model.layout) for use in uses)


def _pairs(p: _Pricing, window: int | None, *, chunked: bool = False) -> float:
    count = p.batch.square_pairs if p.model.dense_attention else p.batch.visible_pairs
    return count(window, chunked=chunked) / p.model.layout.context


def _rows_read(p: _Pricing, window: int | None, *, chunked: bool = False) -> float:
    """Tokens whose K and V a rank reads: of shared ranges all, of others its part."""
    ranks, rows = p.model.layout.context, p.batch.kv_rows(window, chunked=chunked)
    if ranks == 1:
        return rows
    of_shared = int(p.batch.stops[p.batch.shared_by(ranks)].sum())
    return of_shared + (rows - of_shared) / ranks


def _layer_embed(op: ops.LayerEmbed, p: _Pricing) -> Work:
    """Of the table a row a token, of the matrix everything."""
    width, hidden = op.projection.shape
    held = _held_bytes(p.model, (use for use in weight_uses(op) if not use.role.is_table))
    rows = p.tokens * p.model.format_of(op.table).num_bytes((width,))
    work = Work(flops=2.0 * p.tokens * width * hidden, weight_bytes=held + rows)
    return work + p.moved(hidden + width)


def _attend(op: ops.Attend, p: _Pricing) -> Work:
    width = op.num_heads * op.head_dim / p.ranks
    return Work(
        flops=4.0 * _pairs(p, op.window, chunked=op.chunked) * width,
        weight_bytes=p.weight_bytes(op),
        kv_read_bytes=_rows_read(p, op.window, chunked=op.chunked) * p.kv_row_bytes(op),
        activation_bytes=p.buffers(2 * width),
    )


def _attend_both_ways(op: ops.BidirectionalAttend, p: _Pricing) -> Work:
    """K and V are buffers of the pass."""
    count = p.batch.square_pairs if p.model.dense_attention else p.batch.mutual_pairs
    width = op.num_heads * op.head_dim / p.ranks
    return Work(
        flops=4.0 * count(op.window) / p.model.layout.context * width,
        activation_bytes=p.buffers(2 * width + p.kv_heads(op) * 2 * op.head_dim),
    )


def _state_op(op: ops.StateOp, p: _Pricing) -> Work:
    """The state is read and written once for each sequence, however many its tokens are."""
    return Work(
        flops=2.0 * p.tokens * op.product_elements / p.ranks,
        weight_bytes=p.weight_bytes(op),
        state_bytes=2 * 4.0 * p.batch.num_segments * op.state_elements / p.ranks,
    )


def _latent_attend(op: ops.LatentAttend, p: _Pricing) -> Work:
    """The cheaper of expanding the latents and of absorbing the matrix into q and the output."""
    heads, rank = op.num_heads / p.ranks, op.latent_dim
    pairs, rows = _pairs(p, None), _rows_read(p, None)
    projection = rank * (op.nope_dim + op.v_dim)
    if p.model.dense_attention:
        multiplies = _cheaper_form_of_each(op, p.batch)
    else:
        plain = rows * projection + pairs * (op.nope_dim + op.rope_dim + op.v_dim)
        absorbed = p.tokens * projection + pairs * (2 * rank + op.rope_dim)
        multiplies = min(plain, absorbed)
    return Work(
        flops=2.0 * heads * multiplies,
        weight_bytes=p.weight_bytes(op),
        kv_read_bytes=rows * p.kv_row_bytes(op),
        activation_bytes=p.buffers(heads * (op.nope_dim + op.rope_dim + op.v_dim)),
    )


def _cheaper_form_of_each(op: ops.LatentAttend, batch: BatchShape) -> float:
    """Multiplications for each head where each segment's form is chosen by itself."""
    tokens, context = batch.stops - batch.starts, batch.stops
    pairs, projection = tokens * context, op.latent_dim * (op.nope_dim + op.v_dim)
    plain = context * projection + pairs * (op.nope_dim + op.rope_dim + op.v_dim)
    absorbed = tokens * projection + pairs * (2 * op.latent_dim + op.rope_dim)
    return float(np.minimum(plain, absorbed).sum())


def _moe(op: ops.MoE, p: _Pricing) -> Work:
    """Of the experts' weights, those that some token goes to are read."""
    touched = experts_touched(*experts_of(op), p.batch.num_tokens)
    router = _held_bytes(p.model, (use for use in weight_uses(op) if not use.is_stacked))
    read = router + touched * expert_bytes(op, p.model)
    return replace(p.products(op), weight_bytes=read)


def _head(op: ops.Head, p: _Pricing) -> Work:
    """Rows that are wanted, times the matrix."""
    model, rows = p.model, p.batch.logit_rows
    if not rows:
        return Work()
    vocab, hidden = op.weight.shape
    return Work(
        flops=2.0 * rows * vocab * hidden / p.ranks,
        weight_bytes=p.weight_bytes(op),
        activation_bytes=rows * hidden * model.activation_bytes + _logits_bytes(op, p),
    )


def _logits_bytes(op: ops.Head, p: _Pricing) -> float:
    """Logits are written in at least float32."""
    return p.batch.logit_rows * op.weight.shape[0] * max(4.0, p.model.activation_bytes) / p.ranks
