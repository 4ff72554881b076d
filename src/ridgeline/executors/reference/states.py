"""The ops on states of sequences: what they read before a segment, and leave in it and after it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.nn import functional

from ridgeline.core import ops
from ridgeline.executors.reference.batch import Batch, SegmentInput
from ridgeline.executors.reference.kv_cache import ReferenceKVCache
from ridgeline.kernels import reference as kernels

Buffers = dict[str, torch.Tensor]
Ranges = Iterable[tuple[Any, int, int]]
"""Segments, each with the first of its rows and the one behind its last."""


class States(Protocol):
    """Where the states of some segments come from and go to: `StateAccess`, or nowhere."""

    def before(self, item: Any) -> torch.Tensor:
        """The state ``[E]`` before a segment's first token."""

    def wanted(self, item: Any) -> Mapping[int, Sequence[int]]:
        """Before which of a segment's tokens the state is to be stored, and in which blocks; with
        an entry for its number of tokens."""

    def write(self, blocks: Sequence[int], *parts: torch.Tensor) -> None:
        """Store a state, which is these parts one after the other."""


class StateAccess:
    """One layer's part of the states of a batch, in the pool."""

    def __init__(self, cache: ReferenceKVCache, batch: Batch, op: ops.StateOp) -> None:
        self._pool_NE = cache.states[:, op.offset : op.offset + op.state_elements]
        self._group, self._role = len(cache.groups), batch.role

    def before(self, item: SegmentInput) -> torch.Tensor:
        running = self._pool_NE[self._running(item)]
        return torch.zeros_like(running) if item.segment.start == 0 else running

    def wanted(self, item: SegmentInput) -> dict[int, list[int]]:
        """Where it is to be saved, and after the last token where it runs."""
        segment = item.segment
        found = {segment.num_tokens: [self._running(item)]}
        for position, block in segment.state_saves:
            if segment.start <= position < segment.stop:
                found.setdefault(position - segment.start, []).append(block)
        return found

    def write(self, blocks: Sequence[int], *parts: torch.Tensor) -> None:
        self._pool_NE[list(blocks)] = torch.cat([part.flatten() for part in parts])

    def _running(self, item: SegmentInput) -> int:
        (block,) = item.state.tables[self._role, self._group]
        return block


def run_short_conv(
    op: ops.ShortConv,
    buffers: Buffers,
    ranges: Ranges,
    states: States,
    weight: Callable[[ops.Weight], torch.Tensor],
) -> torch.Tensor:
    """``[T, D]``: the gated convolution of each segment."""
    outputs = []
    bias_D = None if op.bias is None else weight(op.bias)
    weight_DL = weight(op.weight)
    past = weight_DL.shape[1] - 1
    for item, first, last in ranges:
        inputs_SD = buffers["q"][first:last] * buffers["v"][first:last]
        before_MD = states.before(item).view(past, -1)
        out_SD, rows = kernels.short_conv(inputs_SD, before_MD, weight_DL, bias_D)
        for index, blocks in states.wanted(item).items():
            states.write(blocks, rows[index : index + past])
        outputs.append(buffers["k"][first:last] * out_SD.to(inputs_SD.dtype))
    return torch.cat(outputs)


def run_gated_delta(
    op: ops.GatedDelta,
    buffers: Buffers,
    ranges: Ranges,
    states: States,
    weight: Callable[[ops.Weight], torch.Tensor],
) -> torch.Tensor:
    """``[T, G·v]``: convolution, rule, norm and gate of each segment."""
    outputs = []
    wide = kernels.wide
    past, channels = op.conv.shape[1] - 1, op.conv.shape[0]
    matrix_shape = (op.num_value_heads, op.key_dim, op.value_dim)
    for item, first, last in ranges:
        before = states.before(item)
        mixed, rows = kernels.short_conv(
            buffers["q"][first:last],
            before[: past * channels].view(past, channels),
            weight(op.conv),
            None,
        )
        beta_SG, decay_SG = wide(buffers["v"][first:last]).chunk(2, dim=-1)
        log_G, bias_G = wide(weight(op.decay_log)), wide(weight(op.decay_bias))
        inputs = _split(op, functional.silu(mixed))._replace(
            beta_SG=torch.sigmoid(beta_SG), decay_SG=kernels.decay_factors(decay_SG, log_G, bias_G)
        )
        wanted, state = states.wanted(item), before[past * channels :].view(matrix_shape)
        out_SGv = []
        for index, (out_Gv, after) in enumerate(kernels.gated_delta(inputs, state)):
            if index in wanted:
                states.write(wanted[index], rows[index : index + past], state)
            out_SGv.append(out_Gv)
            state = after
        states.write(wanted[len(out_SGv)], rows[len(out_SGv) :], state)
        normed = kernels.normalise(torch.stack(out_SGv), wide(weight(op.gain)), op.norm)
        gate_SGv = wide(buffers["k"][first:last]).view(normed.shape)
        gated = normed * functional.silu(gate_SGv)
        outputs.append(gated.to(buffers["k"].dtype).flatten(1))
    return torch.cat(outputs)


def _split(op: ops.GatedDelta, mixed: torch.Tensor) -> kernels.DeltaInputs:
    """Heads of queries, keys and values; decay and beta are to come."""
    keys = op.num_key_heads * op.key_dim
    query, key, value = torch.split(mixed, [keys, keys, mixed.shape[1] - 2 * keys], dim=-1)
    none = mixed[:, :0]
    return kernels.DeltaInputs(
        query.view(len(mixed), op.num_key_heads, -1),
        key.view(len(mixed), op.num_key_heads, -1),
        value.view(len(mixed), op.num_value_heads, -1),
        none,
        none,
    )
