"""The ops on states of sequences: what they read before a segment, and leave in it and after it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch.nn import functional

from ridgeline.core import ops
from ridgeline.executors.reference.batch import Batch, SegmentInput
from ridgeline.executors.reference.kv_cache import ReferenceKVCache
from ridgeline.kernels import reference as kernels
from ridgeline.kernels.tensors import as_tensor

Buffers = dict[str, torch.Tensor]
Ranges = Iterable[tuple[Any, int, int]]
"""Segments, each with the first of its rows and the one behind its last."""


class States(Protocol):
    """Where the states of some segments come from and go to: `StateAccess`, or nowhere."""

    def before(self, item: Any) -> torch.Tensor:
        """The state ``[E]`` before a segment's first token."""

    def taken_in(self, item: Any, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of what an op reads of a segment's tokens, ``rows``, what the state takes in: with those
        of the tokens that lag before them."""

    def wanted(self, item: Any) -> Mapping[int, Sequence[int]]:
        """Before which of the tokens that it takes in the state is to be stored, and in which
        blocks; their number stands for the end."""

    def write(self, blocks: Sequence[int], *parts: torch.Tensor) -> None:
        """Store a state, which is these parts one after the other."""


class StateAccess:
    """One layer's part of the states of a batch, in the pool."""

    def __init__(self, cache: ReferenceKVCache, batch: Batch, op: ops.StateOp) -> None:
        self._pool_NE = cache.states[:, op.offset : op.offset + op.state_elements]
        self._group, self._role = len(cache.groups), batch.role
        self._offset = op.offset

    def before(self, item: SegmentInput) -> torch.Tensor:
        running = self._pool_NE[self._running(item)]
        return torch.zeros_like(running) if item.segment.start == 0 else running

    def taken_in(self, item: SegmentInput, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """And keeps the drafts', of which some will lag."""
        segment, kept = item.segment, item.state.drafted
        assert not segment.parents, "a state takes in one token after the other"
        if segment.state_lag:
            before = [each[: segment.state_lag] for each in kept[self._offset]]
        else:
            before = [each[:0] for each in rows]
        if segment.num_drafts:
            kept[self._offset] = tuple(each[-segment.num_drafts :].clone() for each in rows)
        return tuple(map(torch.cat, zip(before, rows, strict=True)))

    def wanted(self, item: SegmentInput) -> dict[int, list[int]]:
        """Where it is to be saved, and before the drafts where it runs."""
        segment = item.segment
        first, stop = segment.start - segment.state_lag, segment.stop - segment.num_drafts
        found = {stop - first: [self._running(item)]}
        for position, block in segment.state_saves:
            if first <= position < stop:
                found.setdefault(position - first, []).append(block)
        return found

    def write(self, blocks: Sequence[int], *parts: torch.Tensor) -> None:
        self._pool_NE[list(blocks)] = torch.cat([part.flatten() for part in parts])

    def _running(self, item: SegmentInput) -> int:
        (block,) = item.state.table(self._role, self._group)
        return block


def run_state_op(
    op: ops.StateOp,
    buffers: Buffers,
    ranges: Ranges,
    states: States,
    weight: Callable[[ops.Weight], torch.Tensor],
) -> torch.Tensor:
    """What an op on states makes of each segment: the buffer ``h``."""
    match op:
        case ops.ShortConv():
            return run_short_conv(op, buffers, ranges, states, weight)
        case ops.GatedDelta():
            return run_gated_delta(op, buffers, ranges, states, weight)
        case ops.SelectiveScan():
            return run_selective_scan(op, buffers, ranges, states, weight)


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
        gates_SD, values_SD = states.taken_in(
            item, buffers["q"][first:last], buffers["v"][first:last]
        )
        inputs_SD = gates_SD * values_SD
        before_MD = states.before(item).view(past, -1)
        out_SD, rows = kernels.short_conv(inputs_SD, before_MD, weight_DL, bias_D)
        for index, blocks in states.wanted(item).items():
            states.write(blocks, rows[index : index + past])
        out_SD = out_SD[first - last :].to(inputs_SD.dtype)
        outputs.append(buffers["k"][first:last] * out_SD)
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
    matrix_shape = (op.num_value_heads, op.key_dim, op.value_dim)
    for item, first, last in ranges:
        mixed_SD, factors_SG = states.taken_in(
            item, buffers["q"][first:last], buffers["v"][first:last]
        )
        convolved = _Convolved(states, item, mixed_SD, weight(op.conv), None)
        beta_SG, decay_SG = wide(factors_SG).chunk(2, dim=-1)
        log_G, bias_G = wide(weight(op.decay_log)), wide(weight(op.decay_bias))
        inputs = _split(op, functional.silu(convolved.out_SD))._replace(
            beta_SG=torch.sigmoid(beta_SG), decay_SG=kernels.decay_factors(decay_SG, log_G, bias_G)
        )
        out_SGv = convolved.through(matrix_shape, partial(kernels.gated_delta, inputs))
        out_SGv = out_SGv[first - last :]
        normed = kernels.normalise(out_SGv, wide(weight(op.gain)), op.norm)
        gate_SGv = wide(buffers["k"][first:last]).view(normed.shape)
        gated = normed * functional.silu(gate_SGv)
        outputs.append(gated.to(buffers["k"].dtype).flatten(1))
    return torch.cat(outputs)


def run_selective_scan(
    op: ops.SelectiveScan,
    buffers: Buffers,
    ranges: Ranges,
    states: States,
    weight: Callable[[ops.Weight], torch.Tensor],
) -> torch.Tensor:
    """``[T, H·p]``: convolution, scan, gate and norm of each segment."""
    outputs = []
    wide = kernels.wide
    log_H, offset_H, skip_H = (
        wide(weight(each)) for each in (op.decay_log, op.step_offset, op.skip)
    )
    conv_DL = wide(weight(op.conv))
    conv_DL = conv_DL * as_tensor(op.conv_scales)[:, None].to(conv_DL)
    bias_D = None if op.conv_bias is None else weight(op.conv_bias)
    values, groups = op.num_heads * op.head_dim, op.num_groups * op.state_dim
    for item, first, last in ranges:
        mixed_SD, steps_SH = states.taken_in(
            item, buffers["q"][first:last], buffers["v"][first:last]
        )
        convolved = _Convolved(states, item, mixed_SD, conv_DL, bias_D)
        x, write, read = torch.split(
            functional.silu(convolved.out_SD), [values, groups, groups], dim=-1
        )
        step_SH = functional.softplus(wide(steps_SH) + offset_H)
        inputs = kernels.ScanInputs(
            torch.unflatten(x, -1, (op.num_heads, -1)),
            torch.unflatten(write, -1, (op.num_groups, -1)),
            torch.unflatten(read, -1, (op.num_groups, -1)),
            step_SH,
            torch.exp(-log_H.exp() * step_SH),
        )
        matrix_shape = (op.num_heads, op.state_dim, op.head_dim)
        out_SHp = convolved.through(matrix_shape, partial(kernels.selective_scan, inputs))
        out_SI = (out_SHp + skip_H[:, None] * inputs.x_SHp).flatten(1)[first - last :]
        gated = out_SI * functional.silu(wide(buffers["k"][first:last]))
        if op.norm is not None and op.gain is not None:
            grouped = torch.unflatten(gated, -1, (op.num_groups, -1))
            gain = wide(weight(op.gain)).view(op.num_groups, -1)
            gated = kernels.normalise(grouped, gain, op.norm).flatten(1)
        outputs.append(gated.to(buffers["k"].dtype))
    return torch.cat(outputs)


class _Convolved:
    """What a segment's rows become by the convolution before a recurrence, ``out_SD``, and the rest
    of the state, which the recurrence takes through the tokens."""

    def __init__(
        self,
        states: States,
        item: Any,
        inputs_SD: torch.Tensor,
        weight_DL: torch.Tensor,
        bias_D: torch.Tensor | None,
    ) -> None:
        self._states, self._item = states, item
        before, (channels, length) = states.before(item), weight_DL.shape
        self._past, size = length - 1, (length - 1) * channels
        self._matrices = before[size:]
        self.out_SD, self._rows = kernels.short_conv(
            inputs_SD, before[:size].view(self._past, channels), weight_DL, bias_D
        )

    def through(
        self,
        shape: tuple[int, int, int],
        recurrence: Callable[[torch.Tensor], Iterable[tuple[torch.Tensor, torch.Tensor]]],
    ) -> torch.Tensor:
        """Outputs of all tokens that are taken in; states that are wanted are stored."""
        wanted, state = self._states.wanted(self._item), self._matrices.view(shape)
        outputs = []
        for index, (out, after) in enumerate(recurrence(state)):
            if index in wanted:
                self._states.write(wanted[index], self._rows[index : index + self._past], state)
            outputs.append(out)
            state = after
        if after_all := wanted.get(len(outputs)):
            self._states.write(after_all, self._rows[len(outputs) :], state)
        return torch.stack(outputs)


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
