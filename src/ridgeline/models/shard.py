"""One rank's part of a lowered model: its stage's ops, with what ranks exchange among them.

Every matrix is split by its outputs, and what ranks computed is gathered before it is multiplied
again. So each output is summed by one rank, in the order in which one process sums it: the results
are the same bits, which sums of partial results (Megatron-LM, arXiv 1909.08053, §3) are not. See
docs/decisions/0022-ranks.md for what that costs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ridgeline.core import ops
from ridgeline.core.cache_groups import shares_kv
from ridgeline.core.errors import SettingsError
from ridgeline.core.ops import Op, Weight
from ridgeline.core.parallel_layout import ParallelLayout, borders
from ridgeline.core.spec import AttentionSpec, LayerSpec, MLASpec, ModelSpec, NormScope
from ridgeline.models.lower import lower
from ridgeline.models.operator_split import operator_part

Range = tuple[int, int]
# What every rank does by itself.
_Whole = (
    ops.Norm | ops.AddResidual | ops.AddShared | ops.ScaleHidden | ops.Xielu | ops.LayerEmbed
    | ops.LayerInput | ops.SparseGateUp | ops.SplitStreams | ops.PredictStreams
    | ops.CorrectStreams | ops.AddToStreams | ops.JoinStreams | ops.AddLaurel | ops.SendHidden
    | ops.ReceiveHidden
)  # fmt: skip
_Heads = TypeVar("_Heads", ops.HeadNorm, ops.Rope, ops.Attend, ops.QKVProject)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """``spec`` has the rank's heads and stage, and is otherwise the model's. ``rows`` is the
    half-open range of each weight's first axis that the rank has, where that is not all of it."""

    spec: ModelSpec
    ops: tuple[Op, ...]
    rows: Mapping[str, Range]


def shard(spec: ModelSpec, layout: ParallelLayout, rank: int) -> Shard:
    """A rank's part of a model; a pure function.

    Raises:
        SettingsError: the model cannot be split so; says why.
    """
    stage, place = divmod(rank, layout.stage_ranks)
    spec = replace(spec, stage=layout.layers_of(stage))
    _check_shared_kv(spec)
    if layout.stage_ranks == 1:
        return Shard(spec=spec, ops=lower(spec), rows={})
    if layout.splits_operators:
        own_spec, own_ops = operator_part(spec, place)
        return Shard(spec=own_spec, ops=own_ops, rows={})
    if layout.context > 1:
        return Shard(spec=spec, ops=_with_contexts(spec, layout.context), rows={})
    of_experts = _Parts(spec, layout.stage_ranks, place)
    if layout.tensor == 1:  # all but the experts are whole
        check_experts(spec, layout.expert)
        whole = lower(spec)
        own = tuple(of_experts.experts(op) if isinstance(op, ops.MoE) else op for op in whole)
        return Shard(spec=spec, ops=own, rows=of_experts.rows)
    parts = _Parts(
        spec, layout.tensor, place % layout.tensor, layout.stage_ranks, place, rows=of_experts.rows
    )
    return Shard(
        spec=replace(spec, layers=tuple(map(parts.layer, spec.layers))),
        ops=tuple(
            part
            for op in lower(spec)
            for part in ((of_experts.experts(op),) if isinstance(op, ops.MoE) else parts.of(op))
        ),
        rows=parts.rows,
    )


def _check_shared_kv(spec: ModelSpec) -> None:
    """Refuse a stage one of whose layers reads the K and V of a layer before the stage."""
    for layer in spec.layers_here:
        attention = spec.layers[layer].attention
        source = attention.kv_layer if isinstance(attention, AttentionSpec) else None
        if source is not None and source not in spec.layers_here:
            raise SettingsError(
                f"Layer {layer} of this {spec.model_type} model reads K and V of layer {source}, "
                "which another stage of the pipeline would have; lower pipeline_parallel_size."
            )


def _with_contexts(spec: ModelSpec, num_ranks: int) -> tuple[Op, ...]:
    """All of a model's ops, and what ranks that share contexts exchange.

    Raises:
        SettingsError: they cannot share those of this model.
    """
    mixers = [layer.state or layer.attention for layer in spec.layers]
    plain = [each for each in mixers if isinstance(each, AttentionSpec)]
    model_ops = lower(spec)
    reasons = {
        "its layers keep states": any(layer.state for layer in spec.layers),
        "it attends to tokens in both directions": any(
            isinstance(op, ops.BidirectionalAttend) for op in model_ops
        ),
        "some of its layers attend within a window": any(each.window for each in plain),
        "some of its layers read K and V of others": shares_kv(spec),
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise SettingsError(
                f"Ranks cannot share the contexts of a {spec.model_type} model: {reason}. Leave "
                "context_parallel_size out."
            )
    found: list[Op] = []
    for op in model_ops:
        if isinstance(op, ops.Head):
            found.append(ops.GatherRanges(hidden_size=spec.hidden_size, num_ranks=num_ranks))
        found.append(op)
        if isinstance(op, ops.KVWrite):
            heads, k_width, v_width = op.num_kv_heads, op.k_width, op.v_width
            found.append(
                ops.GatherContext(
                    num_kv_heads=heads, k_width=k_width, v_width=v_width, num_ranks=num_ranks
                )
            )
        if isinstance(op, ops.Attend | ops.LatentAttend):
            width = op.latent_dim if isinstance(op, ops.LatentAttend) else op.head_dim
            found.append(ops.GatherSplits(num_heads=op.num_heads, width=width, num_ranks=num_ranks))
    if not spec.has_head:
        found.append(ops.GatherRanges(hidden_size=spec.hidden_size, num_ranks=num_ranks))
    return tuple(found)


def check_experts(spec: ModelSpec, num_ranks: int) -> None:
    """
    Raises:
        SettingsError: the model has fewer experts in a layer than there are ranks, or none at all.
    """
    mixtures = [layer.experts for layer in spec.layers if layer.experts is not None]
    fewest = min((mixture.num_experts for mixture in mixtures), default=0)
    if fewest < num_ranks:
        has = (
            f"{fewest} experts in a layer, fewer than {num_ranks} ranks" if fewest else "no experts"
        )
        raise SettingsError(f"This {spec.model_type} model has {has}; lower expert_parallel_size.")


@dataclass(frozen=True, slots=True)
class _Parts:
    """Cuts ops for one rank, and notes which rows of which weights they have.

    ``rank`` of ``num_ranks`` is the part that it has; it is at ``place`` of the ``stage_ranks``
    that exchange, of which those beyond the first ``num_ranks`` have the same parts again, and send
    nothing of them.
    """

    spec: ModelSpec
    num_ranks: int
    rank: int
    stage_ranks: int = 0
    place: int = 0
    rows: dict[str, Range] = field(default_factory=dict)

    def layer(self, spec: LayerSpec) -> LayerSpec:
        """A layer with this rank's heads."""
        attention = spec.attention
        if isinstance(attention, MLASpec):  # whose latent all heads read
            heads = self.heads(attention.num_heads, self.num_ranks)
            return replace(spec, attention=replace(attention, num_heads=_size(heads[0])))
        if not isinstance(attention, AttentionSpec):
            raise self.refused("its layers that keep states are not split over ranks yet")
        heads = self.heads(attention.num_heads, attention.num_kv_heads)
        own: AttentionSpec = replace(
            attention, num_heads=_size(heads[0]), num_kv_heads=_size(heads[1])
        )
        return replace(spec, attention=own)

    def of(self, op: Op) -> tuple[Op, ...]:
        """This rank's part of an op, and what is exchanged after it."""
        match op:
            case ops.Embed():
                edges = self.borders(op.weight.shape[0])
                table = self.part(op.weight, self.own(edges))
                own = replace(op, weight=table, first_token=edges[self.rank])
                hidden = self.spec.hidden_size
                sent = self.sent(edges)
                return own, ops.GatherTokens(borders=sent, rank=self.place, hidden_size=hidden)
            case _ if isinstance(op, _Whole):
                return (op,)
            case ops.QKVProject():
                return (self.qkv(op),)
            case ops.LatentProject():
                heads = self.own(self.borders(op.num_heads))
                query = self.part(op.query, _times(heads, op.query.shape[0] // op.num_heads))
                return (replace(op, query=query, num_heads=_size(heads)),)
            case ops.HeadNorm():
                return (self.head_norm(op),)
            case ops.Rope():
                return (self.with_heads(op),)
            case ops.GrowQueries():
                return (replace(op, num_heads=_size(self.own(self.borders(op.num_heads)))),)
            case ops.KVWrite():
                kv = self.kv_heads(op.num_kv_heads) if op.has_values else (0, 1)
                return (replace(op, num_kv_heads=_size(kv)),)
            case ops.Attend():
                return self.attend(op)
            case ops.LatentAttend():
                heads = self.own(self.borders(op.num_heads))
                expand = self.part(op.expand, _times(heads, op.nope_dim + op.v_dim))
                latent = replace(op, expand=expand, num_heads=_size(heads))
                return latent, self.gather_heads(op.num_heads, op.v_dim)
            case ops.OutProject() | ops.Down():
                own_out, gather = self.outputs(op)
                return own_out, gather
            case ops.GateUp():
                return self.inside(op, op.gate_bias, op.up_bias)
            case ops.MLP():
                return self.mlp(op)
            case ops.SharedExpert():
                return self.shared_expert(op)
            case ops.Head():
                edges = self.borders(op.weight.shape[0])
                rows = self.own(edges)
                own_head = replace(
                    op, weight=self.part(op.weight, rows), bias=self.optional(op.bias, rows)
                )
                return own_head, ops.GatherLogits(borders=self.sent(edges), rank=self.place)
            case _:
                raise self.refused(f"its {type(op).__name__} is not split over ranks yet")

    def qkv(self, op: ops.QKVProject) -> ops.QKVProject:
        heads = self.heads(op.num_heads, op.num_kv_heads)
        q, kv = (_times(each, op.head_dim) for each in heads)
        own = replace(
            op,
            query=self.part(op.query, q),
            key=self.optional(op.key, kv),
            value=self.optional(op.value, kv),
            query_bias=self.optional(op.query_bias, q),
            key_bias=self.optional(op.key_bias, kv),
            value_bias=self.optional(op.value_bias, kv),
        )
        return self.with_heads(own)

    def head_norm(self, op: ops.HeadNorm) -> ops.HeadNorm:
        if op.scope is NormScope.PROJECTION:
            raise self.refused("its norms of q and k go over all heads together")
        if op.scope is NormScope.EACH_HEAD:
            q, kv = self.heads(op.num_heads, op.num_kv_heads)
            op = replace(
                op,
                query=self.optional(op.query, q),
                key=self.optional(op.key, kv),
                query_bias=self.optional(op.query_bias, q),
                key_bias=self.optional(op.key_bias, kv),
            )
        return self.with_heads(op)

    def attend(self, op: ops.Attend) -> tuple[Op, Op]:
        q, _ = self.heads(op.num_heads, op.num_kv_heads)
        own = self.with_heads(replace(op, sinks=self.optional(op.sinks, q)))
        return own, self.gather_heads(op.num_heads, op.head_dim)

    def gather_heads(self, num_heads: int, width: int) -> Op:
        """Of what attention made of all heads."""
        edges = tuple(head * width for head in self.borders(num_heads))
        return ops.Gather(buffer="h", borders=self.sent(edges), rank=self.place)

    def outputs(self, op: ops.OutProject | ops.Down) -> tuple[Op, Op]:
        """A product to h or shared, each rank having some of its columns."""
        edges = self.borders(op.weight.shape[0])
        rows = self.own(edges)
        own = replace(op, weight=self.part(op.weight, rows), bias=self.optional(op.bias, rows))
        buffer = op.dst if isinstance(op, ops.Down) else "h"
        return own, ops.Gather(buffer=buffer, borders=self.sent(edges), rank=self.place)

    def mlp(self, op: ops.MLP) -> tuple[Op, ...]:
        biases = (op.gate_bias, op.up_bias)
        down = ops.Down(weight=op.down, bias=op.down_bias)
        return *self.inside(op, *biases), *self.outputs(down)

    def shared_expert(self, op: ops.SharedExpert) -> tuple[Op, ...]:
        down = ops.Down(
            weight=op.down, bias=None, dst="shared", output_gate=op.output_gate, src=op.src
        )
        return *self.inside(op, None, None), *self.outputs(down)

    def inside(
        self,
        op: ops.MLP | ops.GateUp | ops.SharedExpert,
        gate_bias: Weight | None,
        up_bias: Weight | None,
    ) -> tuple[Op, Op]:
        """The first half of a feed-forward network, of whose width each rank has a part."""
        edges = self.borders(op.up.shape[0])
        rows = self.own(edges)
        own = ops.GateUp(
            gate=self.optional(op.gate, rows),
            up=self.part(op.up, rows),
            gate_bias=self.optional(gate_bias, rows),
            up_bias=self.optional(up_bias, rows),
            activation=op.activation,
            src=op.src,
        )
        return own, ops.Gather(buffer="inner", borders=self.sent(edges), rank=self.place)

    def experts(self, op: ops.MoE) -> ops.MoE:
        """Each rank has some of the experts, whole."""
        edges = self.borders(op.up.shape[0])
        rows = self.own(edges)
        return replace(
            op,
            gate=self.optional(op.gate, rows),
            up=self.part(op.up, rows),
            down=self.part(op.down, rows),
            gate_bias=self.optional(op.gate_bias, rows),
            up_bias=self.optional(op.up_bias, rows),
            down_bias=self.optional(op.down_bias, rows),
            borders=edges,
            rank=self.rank,
        )

    def with_heads(self, op: _Heads) -> _Heads:
        """An op with this rank's numbers of heads."""
        is_latent = isinstance(op, ops.Rope) and op.key_dim != op.head_dim
        q, kv = self.heads(op.num_heads, self.num_ranks if is_latent else op.num_kv_heads)
        return replace(op, num_heads=_size(q), num_kv_heads=_size(kv))

    def heads(self, num_heads: int, num_kv_heads: int) -> tuple[Range, Range]:
        """This rank's heads of q, and the KV heads that they read."""
        ranks = self.num_ranks
        if num_heads % ranks or (num_kv_heads % ranks and ranks % num_kv_heads):
            raise self.refused(
                f"{ranks} ranks do not share its {num_heads} heads and {num_kv_heads} KV heads "
                "equally"
            )
        return self.own(self.borders(num_heads)), self.kv_heads(num_kv_heads)

    def kv_heads(self, num_kv_heads: int) -> Range:
        """This rank's KV heads: one of them, if there are fewer than ranks, but for none."""
        if not num_kv_heads:
            return 0, 0
        first = self.rank * num_kv_heads // self.num_ranks
        return first, max(first + 1, (self.rank + 1) * num_kv_heads // self.num_ranks)

    def borders(self, size: int) -> tuple[int, ...]:
        if size < self.num_ranks:
            raise self.refused(f"a width of {size} is less than {self.num_ranks} ranks")
        return borders(size, self.num_ranks)

    def sent(self, edges: tuple[int, ...]) -> tuple[int, ...]:
        """Borders of what each rank of the stage sends."""
        return edges + (edges[-1],) * (self.stage_ranks - self.num_ranks)

    def own(self, edges: tuple[int, ...]) -> Range:
        return edges[self.rank], edges[self.rank + 1]

    def part(self, weight: Weight, rows: Range) -> Weight:
        """Rows of a weight."""
        noted = self.rows.setdefault(weight.name, rows)
        assert noted == rows, f"{weight.name} is used in two ways"
        return replace(weight, shape=(_size(rows), *weight.shape[1:]))

    def optional(self, weight: Weight | None, rows: Range) -> Weight | None:
        return None if weight is None else self.part(weight, rows)

    def refused(self, why: str) -> SettingsError:
        return SettingsError(
            f"A {self.spec.model_type} model cannot be split over tensor-parallel ranks here: "
            f"{why}. Leave tensor_parallel_size out."
        )


def _times(heads: Range, width: int) -> Range:
    """Rows of some heads."""
    return heads[0] * width, heads[1] * width


def _size(rows: Range) -> int:
    return rows[1] - rows[0]
